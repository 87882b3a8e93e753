"""Every snippet of the documentation: recipes load, commands and their flags exist, Python compiles and runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml
from pydantic import BaseModel
from snippets import PAGES, ROOT, SHELLS, Snippet, all_snippets, script_of, starling_commands

from starling.cli.app import make_app
from starling.cli.command_line import CommandLine, flags_of, parse
from starling.cli.evaluate.tasks import TaskOptions, find_tasks
from starling.cli.recipe.schema import Recipe
from starling.common.service import SECTIONS, parse_arguments
from starling.common.settings import field_at, load
from starling.controller.settings import ControllerProcess
from starling.policy.shell.loading import PolicyProcess
from starling.reward.shell.main import RewardProcess
from starling.rollout.settings import RolloutProcess, TeacherProcess

SERVICES: dict[str, type[BaseModel]] = {
    "controller": ControllerProcess,
    "policy": PolicyProcess,
    "rollout": RolloutProcess,
    "reward": RewardProcess,
    "teacher": TeacherProcess,
}
LEAST = {
    "model": {"path": "model"},
    "data": {"source": "questions.jsonl"},
    "rl": {"num_steps": 1},
    "reward": {"scorers": [{"name": "exact_match"}]},
}
"""What a recipe needs at least; the parts of recipes on the pages are put on top of it."""
PARTS_S = 120.0
NAMED = re.compile(r"`(?:\.venv/bin/)?(starling(?:-\w+)? [^`]+)`")


def recipe_problem(tree: dict[str, Any], folder: Path, flags: tuple[str, ...] = ()) -> None:
    """Raise ConfigError if `tree` on top of the least recipe is none."""
    least, part = folder / "least.toml", folder / "part.toml"
    base = {key: value for key, value in LEAST.items() if not (key == "reward" and "teacher" in tree)}
    least.write_text(tomli_w.dumps(base))
    scorers = tree.get("reward", {}).get("scorers", [])
    if scorers and all(one.get("use") == "evaluation" for one in scorers):
        tree = {**tree, "reward": {**tree["reward"], "scorers": [*scorers, *LEAST["reward"]["scorers"]]}}
    part.write_text(tomli_w.dumps(tree))
    load(Recipe, [least, part] if tree else [least], flags)


@pytest.mark.parametrize("snippet", all_snippets("toml"), ids=str)
def test_toml_is_read_by_its_settings(snippet: Snippet, tmp_path: Path) -> None:
    """A part of a recipe, the settings of a reward service, a task of an evaluation, or metadata of a package."""
    tree = tomllib.loads(snippet.text)
    (tmp_path / "part.toml").write_text(snippet.text)
    if "project" in tree:
        return
    if "scorers" in tree:
        (task,) = find_tasks([str(tmp_path / "part.toml")], TaskOptions())
        recipe_problem({"data": task.data, "reward": {"scorers": list(task.scorers)}}, tmp_path)
    elif "http" in tree.get("reward", {}):
        scorers = {"reward": {"scorers": [{"name": "exact_match"}]}}
        (tmp_path / "least.toml").write_text(tomli_w.dumps(scorers))
        load(RewardProcess, [tmp_path / "least.toml", tmp_path / "part.toml"], others=SECTIONS)
    else:
        recipe_problem(tree, tmp_path)


@pytest.mark.parametrize("snippet", all_snippets("json"), ids=str)
def test_json_can_be_read(snippet: Snippet) -> None:
    """One value, or one in each line."""
    try:
        json.loads(snippet.text)
    except ValueError:
        for line in snippet.text.splitlines():
            json.loads(line)


@pytest.mark.parametrize("snippet", all_snippets("yaml"), ids=str)
def test_yaml_can_be_read(snippet: Snippet) -> None:
    assert all(isinstance(one, dict) for one in yaml.safe_load_all(snippet.text))


@pytest.mark.parametrize("snippet", all_snippets("python"), ids=str)
def test_python_compiles_and_runs(snippet: Snippet, tmp_path: Path) -> None:
    compile(snippet.text, str(snippet), "exec")
    if not snippet.is_runnable:
        return
    command = [sys.executable, "-c", snippet.text]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PARTS_S)
    assert done.returncode == 0, done.stderr
    comments = re.findall(r"print\(.*\)  # (.*)", snippet.text)
    assert done.stdout.splitlines()[: len(comments)] == comments


@pytest.mark.parametrize("snippet", all_snippets(*SHELLS), ids=str)
def test_commands_are_parsed_by_the_command_line(snippet: Snippet, tmp_path: Path) -> None:
    script = script_of(snippet)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    for words in starling_commands(script):
        check_command(words, tmp_path)
    for target in re.findall(r"^make ([a-z-]+)", script, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"
    for file in re.findall(r"\bpython (\S+\.py)", script):
        titles = {one.title for one in all_snippets("python")}
        assert (ROOT / file).exists() or file in titles, f"there is no {file}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_have_these_flags(page: str) -> None:
    """`starling COMMAND ... --flag`: the command is known, and each of its flags."""
    for text in NAMED.findall((ROOT / page).read_text().replace("\n", " ")):
        program, *words = text.split()
        command = program.removeprefix("starling-") if "-" in program else next(iter(words), "")
        if not re.fullmatch(r"[a-z-]+", command) or command == "--help":
            continue
        flags = [word.partition("=")[0].rstrip(".,") for word in words if word.startswith("--")]
        if command in SERVICES and not {"--only", "--replay"} & set(flags):
            assert words[:1] in (["reward"], *([name] for name in SERVICES)) or "-" in program
            continue
        command = {"rollout": "rollout-only", "policy": "policy-replay"}.get(command, command)
        app = make_app()
        assert command in [*app], f"{page}: {text}"
        known = flags_of(app, command)
        for flag in flags:
            assert flag in known or is_setting(Recipe, flag), f"{page}: {text}"


def check_command(words: list[str], folder: Path) -> None:
    """Parse a command as the program does. Raises ConfigError, or AssertionError for an unknown setting."""
    program, *rest = words
    role = program.partition("-")[2] or next(iter(rest), "")
    if role in SERVICES and not {"--only", "--replay"} & set(rest):
        check_service(role, rest if "-" in program else rest[1:])
        return
    if role in ("rollout", "policy"):
        rest = [f"{role}-{'only' if role == 'rollout' else 'replay'}", *rest[1:]]
    if not rest or rest == ["--help"]:
        return
    _, bound = parse(make_app(), rest)
    line = bound.arguments.get("line")
    if isinstance(line, CommandLine) and line.settings:
        kinds = {"rollout-only": ("--run.kind=generate",)}.get(rest[0], ())
        for flag in line.settings:
            assert is_setting(Recipe, flag.partition("=")[0]), flag
        if rest[0] == "run":
            recipe_problem({}, folder, (*line.settings, *kinds))


def check_service(role: str, rest: list[str]) -> None:
    """Parse the command line of a service, and look up each setting in it."""
    if rest[:1] in (["bench"], ["replay"]):
        command = [sys.executable, "-m", "starling.cli.main", role, rest[0], "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PARTS_S, check=True)
        for flag in (word for word in rest if word.startswith("--")):
            assert f"{flag} " in done.stdout, f"starling {role} {rest[0]} has no {flag}"
        return
    arguments = parse_arguments(role, rest, SERVICES[role])
    for flag in arguments.flags:
        if flag.startswith("--"):
            assert is_setting(SERVICES[role], flag.partition("=")[0]), flag


def is_setting(schema: type[BaseModel], flag: str) -> bool:
    """Return whether `schema` has the setting that a flag names."""
    return field_at(schema, flag.removeprefix("--").replace("-", "_").split(".")) is not None
