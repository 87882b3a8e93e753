"""The command line: every command with its flags, help, suggestions, and settings given as flags."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from starling.cli.app import GROUPS, make_app
from starling.cli.command_line import flags_of, parse, split
from starling.cli.main import main
from starling.cli.operate.command import Connection
from starling.cli.recipe.schema import Recipe
from starling.cli.run.command import MOST_USED
from starling.common.errors import ConfigError
from starling.common.settings import iter_settings

CONNECTION = ("--controller", "--key", "--run", "--timeout", "--json")
MODEL = ("--model", "--num-gpus", "--tp-size", "--engine", "--seed")
ANSWERS = ("--num-completions", "--temperature", "--max-tokens", "--limit", "--plain", "--system", "--resume", "--out")
FLAGS: dict[str, tuple[str, ...]] = {
    "run": ("--config", "--launcher", "--from", "--dry-run", "--resume", "--accept-changed-data"),
    "rollout-only": ("--only",),
    "policy-replay": ("--replay",),
    "status": CONNECTION,
    "why": CONNECTION,
    "top": ("--allow-control", "--telemetry", "--observer-key", "--controller", "--key", "--run"),
    "set": CONNECTION,
    "checkpoint": CONNECTION,
    "stop": CONNECTION,
    "profile": (
        *CONNECTION, "--steps", "--seconds", "--groups", "--limit", "--ranks", "--memory", "--flames", "--merge",
    ),
    "scale": CONNECTION,
    "drain": CONNECTION,
    "evaluate": (*CONNECTION, *MODEL, *ANSWERS, "--tasks", "--scorer"),
    "infer": (*MODEL, *ANSWERS, "--prompt-column"),
    "serve": (*MODEL, "--from", "--config", "--key"),
    "prepare": ("--dir", "--models", "--policies", "--rollouts", "--rewards", "--teachers"),
    "smoke": (),
    "settings": ("--toml", "--json"),
    "plan": (
        "--model", "--dtype", "--quantise", "--topology", "--bucket-mib", "--gpus", "--gpus-per-host", "--gpu-gb",
        "--gpu-tflops", "--host-gb-per-s", "--network-gb-per-s", "--step-tokens", "--microbatch-tokens",
        "--sequence-tokens", "--rows", "--picture", "--json",
    ),
    "runs": ("--json",),
    "compare": ("--out", "-o"),
    "report": ("--out", "-o"),
    "dashboard": ("--host", "--port", "--allow-control", "--key", "--token-file", "--address-file", "--allow-host"),
    "sync-report": ("--last", "--json", "--trace"),
    "sim": (
        "--faults", "--replicas", "--no-shrink", "--jobs", "--seeds", "--first-seed",
        "--what-if", "--base", "--picture", "--json",
    ),
    "record": ("--out",),
    "replay": ("--incarnation", "--until", "--json"),
    "scratch": (),
    "export": ("--ema", "--model", "--shard-mb", "--storage-options", "--trust-remote-code"),
    "completion": ("--install",),
    "migrate": ("--out", "-o"),
    "join": (
        "--role",
        "--key",
        "--name",
        "--gpus",
        "--host",
        "--set",
        "--config",
        "--dir",
        "--replace",
        "--timeout",
    ),
    "deploy systemd": (
        "--role", "--gpus", "--controller", "--number", "--config", "--join", "--program", "--root",
        "--dry-run",
    ),
    "deploy slurm": (
        "--out", "--gpus-per-node", "--nodes-policy", "--nodes-rollout", "--cpus", "--time", "--image", "--mount",
        "--interface",
    ),
    "deploy lepton": (
        "--image", "--resource-shape", "--node-group", "--mount", "--env", "--secret", "--pull-secret",
        "--nodes-policy", "--nodes-rollout", "--out",
    ),
    "keys make": ("--replace",),
    "keys list": (),
    "keys revoke": (),
}  # fmt: skip
"""Every command with all of its flags."""
PARSED: dict[str, dict[str, Any]] = {
    "run a.toml --config b.toml --config c.toml --dry-run": {
        "recipe": Path("a.toml"), "config": (Path("b.toml"), Path("c.toml")), "dry_run": True,
    },
    "run a.toml --from s3://b/state": {"state": "s3://b/state"},
    "run --resume runs/a": {"resume": Path("runs/a"), "recipe": None},
    "rollout-only --only a.toml": {"recipe": Path("a.toml")},
    "rollout-only a.toml --only": {"recipe": Path("a.toml")},
    "policy-replay --replay kept a.toml": {"recipe": Path("a.toml"), "replay": Path("kept")},
    "policy-replay --replay=kept a.toml": {"recipe": Path("a.toml"), "replay": Path("kept")},
    "status": {"folder": None, "connection": Connection()},
    "why runs/a --json": {"folder": Path("runs/a"), "connection": Connection(json=True)},
    "set rl.max_staleness 2": {"words": ("rl.max_staleness", "2")},
    "set runs/a policy.optimizer.learning_rate 1e-6 --timeout 3": {
        "words": ("runs/a", "policy.optimizer.learning_rate", "1e-6"), "connection": Connection(timeout=3.0),
    },
    "set policy.algorithm.clip_low -1": {"words": ("policy.algorithm.clip_low", "-1")},
    "stop --controller tcp://h:1 --run x --key k.json": {
        "connection": Connection(controller="tcp://h:1", run="x", key=Path("k.json")),
    },
    "evaluate runs/a": {"folder": Path("runs/a")},
    "plan fsdp4 tp2 --model m --bucket-mib 0.5 --rows 3 --quantise fp8_row --picture a.svg --json": {
        "source": "fsdp4", "destination": "tp2", "model": "m", "bucket_mib": 0.5, "rows": 3, "quantise": "fp8_row",
        "picture": Path("a.svg"), "json": True,
    },
    "sync-report runs/a --last 2": {"folder": Path("runs/a"), "last": 2, "json": False},
    "sync-report runs/a --trace 7": {"folder": Path("runs/a"), "trace": 7},
    "runs": {"folder": Path("runs"), "json": False},
    "compare runs/a runs/b -o a.html": {"folders": (Path("runs/a"), Path("runs/b")), "out": Path("a.html")},
    "report runs/a --out a.html": {"folder": Path("runs/a"), "out": Path("a.html")},
    "record runs/a --out a.zip": {"folder": Path("runs/a"), "out": Path("a.zip")},
    "replay a.zip --incarnation 2 --until 7 --json": {
        "source": Path("a.zip"), "incarnation": 2, "until": 7, "json": True,
    },
    "scratch a.toml model": {"recipe": Path("a.toml"), "folder": Path("model")},
    "export runs/a out --ema --model m --shard-mb 2 --storage-options {} --trust-remote-code": {
        "state": "runs/a", "out": Path("out"), "ema": True, "model": "m", "shard_mb": 2, "storage_options": "{}",
        "trust_remote_code": True,
    },
    "keys make run/keys a b --replace": {"folder": Path("run/keys"), "name": "a", "names": ("b",), "replace": True},
    "keys run/keys a": {"folder": Path("run/keys"), "name": "a", "names": (), "replace": False},
    "keys list run/keys": {"folder": Path("run/keys")},
    "keys revoke run/keys a b": {"folder": Path("run/keys"), "name": "a", "names": ("b",)},
    "infer p.jsonl --model m --out a.jsonl --prompt-column q": {
        "prompts": "p.jsonl", "out": Path("a.jsonl"), "prompt_column": "q",
    },
}  # fmt: skip
"""Command lines, and the values of some of their parameters."""
SUGGESTIONS = {
    "rum a.toml": "unknown command 'rum'; did you mean 'run'?",
    "deploy kubernets": "unknown command 'kubernets'; known: systemd, slurm, lepton",
    "statsu": "unknown command 'statsu'; did you mean 'status'?",
    "run a.toml --dry-runn": "unknown flag --dry-runn; did you mean --dry-run?",
    "run a.toml --rseume": "unknown flag --rseume; did you mean --resume?",
    "status --jsno": "unknown flag --jsno; did you mean --json?",
    "plan a b --modle x": "unknown flag --modle; did you mean --model?",
    "evaluate --model m --task t": "unknown flag --task; did you mean --tasks?",
    "evaluate runs/a --limit 3": "--limit is for the evaluation of a model; give --model DIR, or leave it out",
    "evaluate --model m --tasks t --timeout 3": "--timeout is for the evaluation of a run in progress; leave it out",
    "plan fsdp4": "DESTINATION is missing; see starling plan --help",
    "sync-report runs/a --last two": 'unable to convert "two" into int; see starling sync-report --help',
    "stop a b": "unexpected argument 'b'; see starling stop --help",
    "policy --replay kept": "RECIPE is missing; see starling policy --replay --help",
    "sim --fault calm": "unknown flag --fault; did you mean --faults?",
    "sim --first-seed 4294967296": "--first-seed is 4294967296; it must be at least 0, and at most 4294967295",
    "run --resume": "write `starling run --resume RUN_FOLDER`",
    "run a.toml -- --dry-run": "--dry-run comes after `--`, where flags end; write it before",
    "run a.toml -- --rl.num-steps 3": "unknown flag --rl.num-steps",
    "run -- nowhere.toml": "the configuration file nowhere.toml does not exist",
    "policy --replay": "--replay needs a value; write `starling policy --replay FOLDER`; see starling policy --replay",
    "settings klx": "no setting has 'klx' in its key or text",
}
"""Mistakes, and the sentences with their remedies."""


def command_names() -> list[str]:
    return [name for commands in GROUPS.values() for name, _, _ in commands]


@pytest.mark.parametrize("command", FLAGS)
def test_command_has_its_flags(command: str) -> None:
    assert flags_of(make_app(), *command.split()) == {*FLAGS[command], "--help", "-h"}


def test_every_command_is_in_the_table_of_flags() -> None:
    services = {"controller", "policy", "rollout", "reward", "teacher"}
    known = {command.split()[0] for command in FLAGS} - {"rollout-only", "policy-replay"}
    assert known | services == set(command_names())


@pytest.mark.parametrize("words", PARSED)
def test_command_line_is_parsed(words: str) -> None:
    _, bound = parse(make_app(), words.split())
    bound.apply_defaults()
    assert {name: bound.arguments[name] for name in PARSED[words]} == PARSED[words]


@pytest.mark.parametrize("words", SUGGESTIONS)
def test_mistake_is_one_sentence_with_the_nearest_word(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("starling: ")
    assert SUGGESTIONS[words] in captured.err


def test_settings_are_split_from_own_flags() -> None:
    own = ("--config", "--dry-run")
    words = "a.toml --rl.group-size 16 --config b.toml --launch.colocate --dry-run --sampling.top-p=0.5"
    kept, settings = split(words.split(), own)
    assert kept == ["a.toml", "--config", "b.toml", "--dry-run"]
    assert settings == ["--rl.group-size=16", "--launch.colocate", "--sampling.top-p=0.5"]
    assert split(["--launch.colocate", "a.toml"], own) == (["a.toml"], ["--launch.colocate"])
    assert split(["--launch.colocate", "off", "a.toml"], own) == (["a.toml"], ["--launch.colocate=off"])
    assert split(["--group-size", "3"], own) == ([], ["--group-size=3"])
    with pytest.raises(ConfigError, match="unknown flag --confg; did you mean --config"):
        split(["--confg", "b.toml"], own)


def help_of(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(capsys=capsys)
    for group, commands in GROUPS.items():
        assert f"─ {group} ─" in text
        for name, _, sentence in commands:
            assert re.search(rf"│ {name} +{re.escape(sentence.split()[0])}", text), name
    assert main([]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("command", [name for name in FLAGS if name not in ("rollout-only", "policy-replay")])
def test_help_of_a_command_shows_that_command_only(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(*command.split(), capsys=capsys)
    assert text.startswith("Usage: ")
    assert f"starling {command}" in text
    for flag in FLAGS[command]:
        assert re.search(rf"{flag}\b", text), flag
    if " " not in command:
        assert "Example" in text or command == "smoke"


def test_help_of_run_is_at_most_two_screens_and_names_real_settings(capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of("run", capsys=capsys).splitlines()
    assert len(lines) <= 60
    assert MOST_USED.keys() <= {setting.key for setting in iter_settings(Recipe)}
    for key in MOST_USED:
        assert any(line.startswith(f"  --{key.replace('_', '-')} ") for line in lines), key
    assert "starling settings" in " ".join(lines)


def test_help_imports_neither_recipes_nor_services() -> None:
    """Help would be slow with pydantic, numpy, zmq or the settings of the services."""
    code = (
        "import sys\nfrom starling.cli.main import main\n"
        "for words in ([], ['run'], ['evaluate'], ['plan'], ['keys'], ['status'], ['settings']):\n"
        "    main([*words, '--help'])\n"
        "heavy = {'pydantic', 'numpy', 'zmq', 'torch', 'msgspec', 'starling.common.settings'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "[]\n"
