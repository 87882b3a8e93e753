"""Evaluation tasks, as `starling evaluate --tasks` names them: a dataset and the scorers of its answers.

| name | rows | scorer |
|---|---|---|
| `reasoning_gym:TASK` | generated, `--limit` of them (100) | that task's |
| `gsm8k:FILE` | `question`, `answer` | `gsm8k`: the last number |
| `math:FILE` | `problem`, `answer` or `solution` | `math`: the expression |
| `FILE.jsonl`, `FILE.parquet`, `hf:NAME`, `MODULE:FACTORY` | any source of [data], with `question` and `answer` | `--scorer` (`exact_match`) |
| `FILE.toml` | its [data] | its [[scorers]] |
"""  # noqa: E501 - a table

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from starling.common.errors import ConfigError

GYM = "reasoning_gym:"
KNOWN = ("gsm8k", "math", "reasoning_gym")
GYM_ROWS = 100
"""Rows of a generated task without a limit."""
SUFFIXES = (".jsonl", ".parquet", ".toml")


@dataclass(frozen=True)
class EvaluationTask:
    """One task, as sections of a recipe."""

    name: str
    data: dict[str, Any]
    scorers: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class TaskOptions:
    """Options of the command line for all tasks."""

    limit: int = 0
    """Maximum number of prompts of each task; 0 for all."""
    scorer: str = "exact_match"
    """Scorer of a dataset without one of its own."""
    plain: bool = False
    """Prompts are plain text, not turns of a conversation."""
    system: str = ""
    """System message of each conversation."""


def find_tasks(names: Sequence[str], options: TaskOptions) -> list[EvaluationTask]:
    """Return the tasks of these names, with unique names. Raises ConfigError for an unknown one."""
    tasks: list[EvaluationTask] = []
    for name in names:
        task = _find(name, options)
        twins = sum(other.name.partition("#")[0] == task.name for other in tasks)
        tasks.append(EvaluationTask(f"{task.name}#{twins + 1}", task.data, task.scorers) if twins else task)
    return tasks


def scorers_of(tasks: Sequence[EvaluationTask]) -> list[dict[str, Any]]:
    """Return the scorers of all tasks, each restricted to its task and with a label of its own."""
    if len(tasks) == 1:
        return [dict(scorer) for scorer in tasks[0].scorers]
    return [
        {**scorer, "tasks": [task.name], "label": f"{task.name}/{scorer.get('label') or scorer['name']}"}
        for task in tasks
        for scorer in task.scorers
    ]


def absolute(path: str) -> str:
    """Return `path` as absolute if it exists, so that a run can be resumed from any folder; else unchanged."""
    return str(Path(path).absolute()) if path and Path(path).exists() else path


def _find(name: str, options: TaskOptions) -> EvaluationTask:
    kind, colon, rest = name.partition(":")
    if name.startswith(GYM):
        data = {"source": name, "size": options.limit or GYM_ROWS}
        return EvaluationTask(rest, _with_options(data, options), ({"name": name},))
    if colon and kind in ("gsm8k", "math"):
        columns = {"prompt_column": "question", "reference_column": "answer"}
        if kind == "math":
            columns = {"prompt_column": "problem", "reference_column": _reference_of_math(Path(rest))}
        return EvaluationTask(kind, _with_options({"source": rest, **columns}, options), ({"name": kind},))
    if Path(name).suffix == ".toml":
        return _of_file(Path(name), options)
    if not colon and Path(name).suffix not in SUFFIXES:
        raise ConfigError(_unknown(name))
    title = Path(name).stem if Path(name).suffix in SUFFIXES else rest
    return EvaluationTask(
        title.rpartition("/")[2] or name, _with_options({"source": name}, options), ({"name": options.scorer},)
    )


def _unknown(name: str) -> str:
    close = get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {close[0]}:{'TASK' if close[0] == 'reasoning_gym' else 'FILE'}?"
    else:
        hint = "write reasoning_gym:TASK, gsm8k:FILE, math:FILE, hf:NAME, MODULE:FACTORY, or a .jsonl, .parquet, .toml"
    return f"there is no task {name!r}; {hint}"


def _with_options(data: dict[str, Any], options: TaskOptions) -> dict[str, Any]:
    """Return `data` with the options of all tasks."""
    data = {**data, "source": absolute(str(data.get("source", "")))}
    if options.limit:
        data["limit"] = options.limit
    if options.plain:
        data["format"] = "{" + data.get("prompt_column", "question") + "}"
    if options.system:
        data["system"] = options.system
    return data


def _reference_of_math(path: Path) -> str:
    """Return the column of the reference: `answer` if the rows have it, else `solution`."""
    if path.suffix != ".jsonl" or not path.is_file():
        return "answer"
    with path.open() as lines:
        try:
            first = json.loads(next(lines, "{}"))
        except (ValueError, RecursionError):
            return "answer"  # the loader of the file reports the line
    return "solution" if isinstance(first, dict) and "answer" not in first and "solution" in first else "answer"


def _of_file(path: Path, options: TaskOptions) -> EvaluationTask:
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the task {path}: {error.strerror}; correct the path") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the task {path} is not valid TOML: {error}; correct the file") from None
    if not isinstance(tree.get("data"), dict):
        raise ConfigError(f"the task {path} has no section [data]; add one, as in a recipe")
    unknown = tree.keys() - {"name", "data", "scorers"}
    if unknown:
        raise ConfigError(f"the task {path} has {min(unknown)!r}; a task has name, [data] and [[scorers]]")
    scorers = tuple(tree.get("scorers", ())) or ({"name": options.scorer},)
    return EvaluationTask(str(tree.get("name", path.stem)), _with_options(tree["data"], options), scorers)
