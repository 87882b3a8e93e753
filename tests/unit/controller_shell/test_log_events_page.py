"""`docs/reference/log-events.md` lists every logged event and every kind of line in metrics.jsonl, with its fields."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from starling.controller.core.groups.group import GroupState
from starling.controller.shell.main import QUIET_NOTES
from starling.sim.cluster.cluster import SimulatedCluster
from starling.sim.scenario.scenario import answering_scenario_of, scenario_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/log-events.md").read_text()
LEVELS = ("debug", "info", "warning", "error", "exception", "critical")
SECTIONS = {
    "Every process": "libs/common",
    "Controller": "services/controller",
    "Policy": "services/policy",
    "Rollout": "services/rollout",
    "Reward": "services/reward",
}


def rows(section: str) -> dict[str, tuple[str, set[str]]]:
    """Return the level and the fields of each event in a section of the page."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    table = re.findall(r"^\| `([^`]+)` \|([^|]*)\|[^|]+\|([^|]*)\|$", text, re.MULTILINE)
    assert len(table) == len({name for name, _, _ in table}), f"{section} lists an event twice"
    return {name: (level.strip(), set(re.findall(r"`([^`]+)`", fields))) for name, level, fields in table}


def sources(folder: str) -> Iterator[ast.Module]:
    return (ast.parse(path.read_text()) for path in sorted((ROOT / folder / "starling").rglob("*.py")))


def logged(folder: str) -> dict[str, tuple[set[str], set[str]]]:
    """Return the levels and the fields of each event that the structlog loggers of a distribution log."""
    levels, fields = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for module in sources(folder):
        names = {alias.name for node in ast.walk(module) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(module) if "structlog" in names else ():
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level)) if level in LEVELS:
                    (event,) = node.args
                    assert isinstance(event, ast.Constant | ast.Name), "an event has a constant name"
                    if isinstance(event, ast.Constant):
                        levels[event.value].add("error" if level == "exception" else level)
                        fields[event.value] |= {keyword.arg or "**" for keyword in node.keywords} - {"exc_info"}
    return {event: (levels[event], fields[event]) for event in levels}


def note_kinds() -> set[str]:
    """Return the kinds of lines that the controller's core and its shell write to metrics.jsonl."""
    kinds = set[str]()
    for module in sources("services/controller"):
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    match node:
                        case ast.Call(func=ast.Attribute(attr="note" | "_write_line"), args=[first, *_]):
                            kinds |= constants(first, function)
    return kinds


def constants(expression: ast.expr, function: ast.FunctionDef) -> set[str]:
    """Return the strings that an expression may be: constants, states of groups, and what its names are set to."""
    found = set[str]()
    match expression:
        case ast.Constant(value=str(text)):
            found.add(text)
        case ast.Attribute(value=ast.Name(id="GroupState"), attr=name):
            found.add(str(GroupState[name]))
        case ast.IfExp(body=body, orelse=other):
            found |= constants(body, function) | constants(other, function)
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            found |= constants(inner, function)
        case ast.Name(id=name):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                    found |= constants(node.value, function)
    return found


def test_log_events_page_lists_the_events_of_the_code() -> None:
    for section, folder in SECTIONS.items():
        in_code, on_page = logged(folder), rows(section)
        assert sorted(on_page) == sorted(in_code), section
        for event, (levels, fields) in in_code.items():
            level, listed = on_page[event]
            assert set(level.split(", ")) == levels, event
            assert fields - {"**"} <= listed, event
            assert fields >= listed or "**" in fields, f"{event} does not have all the fields of the page"


def test_log_events_page_lists_the_kinds_of_metrics_lines() -> None:
    on_page = rows("Lines of metrics.jsonl")
    assert sorted(on_page) == sorted(note_kinds())
    for kind, (level, _) in on_page.items():
        is_logged = kind not in QUIET_NOTES | {"samples", "logger", "notice"}
        assert level == ("" if not is_logged else "warning" if kind == "alarm" else "info"), kind


def test_log_events_page_lists_the_fields_of_simulated_runs() -> None:
    on_page, seen = rows("Lines of metrics.jsonl"), set[str]()
    scenarios = [scenario_of(seed, mix) for seed in range(4) for mix in ("everything", "preemptions")]
    scenarios += [answering_scenario_of(seed, "everything") for seed in range(3)]
    for scenario in scenarios:
        for note in SimulatedCluster(scenario).run().host.notes:
            seen.add(note.kind)
            _, listed = on_page[note.kind]
            assert set(note.fields) <= listed or "*" in listed, f"{note.kind}: {sorted(set(note.fields) - listed)}"
    assert {"step", "adopted", "joined", "left", "failed", "interrupted", "waiting", "evaluation"} <= seen
