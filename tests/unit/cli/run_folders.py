"""Folders of runs, written by the writers that a controller and a supervisor use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from starling.cli.recipe.schema import Recipe, to_toml
from starling.common.files import write_whole
from starling.common.settings import complete_toml
from starling.controller.core.records import ControllerStarted, MemberLeft, Record, RunBegun, RunEnded
from starling.controller.shell.journal.journal import Journal
from starling.controller.shell.outputs.append_file import AppendFile
from starling.controller.shell.outputs.samples import Samples

BEGUN = 1_700_000_000.0
ENDED = RunEnded(ok=True, reason="the run is complete")
VOID = frozenset({"meta", "br", "hr", "img", "input", "link", "path", "circle"})
"""Elements without an end; `path` and `circle` end themselves in the SVG of our pages."""
REFERENCES = frozenset({"src", "href", "xlink:href", "srcset", "data", "action", "background", "poster"})


def step_line(step: int, **fields: object) -> dict[str, Any]:
    """Return the line of a step of reinforcement learning, one second after its predecessor."""
    return {
        "time": BEGUN + step,
        "kind": "step",
        "step": step,
        "phase": "rl",
        "reward_mean": step / 1000,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "entropy": 1.0,
        "approx_kl": 1e-4,
        "loss": 0.1,
        "num_tokens": 500.0,
        "time/step_s": 1.0,
        **fields,
    }


def evaluation_line(version: int, reward: float) -> dict[str, Any]:
    return {
        "time": BEGUN + version + 0.5,
        "kind": "evaluation",
        "version": version,
        "cause": "every",
        "num_prompts": 8,
        "num_failed": 0,
        "reward_mean": reward,
        "pass_at_k": reward,
        "k": 1,
    }


def make_attempt(
    parent: Path,
    lines: Iterable[Mapping[str, Any]],
    *,
    number: int = 1,
    records: Iterable[Record] = (ENDED, MemberLeft(name="rollout-0")),
    samples: Mapping[int, list[dict[str, Any]]] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write an attempt of the run in `parent`: metrics, journal, samples by step, and its recipe."""
    folder = parent / f"attempt-{number}"
    folder.mkdir(parents=True)
    metrics = AppendFile(folder / "metrics.jsonl")
    for line in lines:
        metrics.write(json.dumps(line))
    metrics.close()
    journal = Journal(folder / "journal.sqlite", network_disk=True)
    for record in (RunBegun(run="x", plan={}), ControllerStarted(incarnation=1), *records):
        journal.append(record)
    journal.commit()
    journal.close()
    kept = Samples(folder, 1 << 20)
    for step, rows in (samples or {}).items():
        kept.write(step, rows)
    kept.close()
    recipe = Recipe.model_validate(
        {
            "run": {"name": parent.name},
            "data": {"source": "p.jsonl", "format": "{question}"},
            "model": {"path": "models/small"},
            "reward": {"scorers": [{"name": "math"}]},
            **(settings or {}),
        }
    )
    write_whole(folder / "recipe.toml", complete_toml(to_toml(recipe)))
    (folder / "config.toml").write_text('[run]\nid = "x"\n')
    return folder


def many_steps(num: int) -> Iterator[dict[str, Any]]:
    """Yield the lines of a long run: steps, publications and adoptions, rewards with outliers."""
    yield {"time": BEGUN, "kind": "joined", "replica": "rollout-0", "role": "rollout", "host": "a", "pid": 1}
    for step in range(1, num + 1):
        spike = 5.0 if step == num // 2 else 0.0
        yield step_line(step, reward_mean=step / num + spike)
        yield {
            "time": BEGUN + step,
            "kind": "adopted",
            "replica": "rollout-0",
            "version": step,
            "attested": True,
            "pull_s": 0.01,
            "pause_s": 0.001,
            "size_bytes": 1000,
            "transport": "ucx",
        }


class PageChecker(HTMLParser):
    """Reads a page as a browser would: elements that are not closed, references to others, and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.problems: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in REFERENCES and not (value or "").startswith("#")):
                self.problems.append(f"<{tag} {name}={value!r}>")
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.problems.append(f"<{tag}>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes another element")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check_page(path: Path) -> str:
    """Check that a page is well formed and refers to nothing else; return its text."""
    content = path.read_text(encoding="utf-8")
    page = PageChecker(content)
    assert page.problems == []
    assert "url(" not in content
    assert "@import" not in content
    assert content.count("http") == content.count("http-equiv")
    return "".join(page.text)
