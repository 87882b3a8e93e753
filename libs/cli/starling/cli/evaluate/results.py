"""Results of a run without a policy: one line for each prompt, in the order of prompts, and figures of each task.

Both are computed from the files of the run alone, without the replica or the time of an answer: any number of instances
and restarts leads to the same bytes as long as they sample the same tokens.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from starling.cli.console import Console
from starling.cli.recipe.schema import Recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.screen import short_path
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.controller.core.evaluation.evaluation import TASK, pass_rates
from starling.controller.core.records import StoredGroup
from starling.controller.data.load import prompts_to_answer
from starling.controller.data.trajectories import FOLDER, INDEX, read_file, read_index

ANSWERS = "answers.jsonl"
SUMMARY = "summary.json"


def stored_groups(attempt: Attempt) -> Iterator[StoredGroup]:
    """Yield the groups in the run's files, in the order of prompts. Raises ConfigError."""
    folder = attempt.folder / FOLDER
    for line in read_index(folder):
        yield from read_file(folder, line)


def finish_answering(recipe: Recipe, attempt: Attempt, out: Path | None) -> int:
    """Report a run that answers prompts, complete or stopped. Returns the exit code."""
    index = read_index(attempt.folder / FOLDER) if (attempt.folder / FOLDER / INDEX).exists() else []
    answered, wanted = sum(line.num_groups for line in index), len(prompts_to_answer(recipe))
    if answered < wanted:
        print(
            f"stopped with {answered} of {wanted} prompts in files; `starling {recipe.run.kind} --resume "
            f"{short_path(attempt.folder)}` resumes it"
        )
        return 130
    return conclude(attempt, Console(), out, is_scored=recipe.kind.is_scored)


def conclude(attempt: Attempt, console: Console, out: Path | None = None, *, is_scored: bool) -> int:
    """Write and print answers and figures of a complete run. Returns the exit code: 1 if no prompt has an answer.

    `out`: a second file for the answers.
    """
    groups = list(stored_groups(attempt))
    path = attempt.folder / ANSWERS
    lines = [json.dumps(answer(group, is_scored=is_scored), ensure_ascii=False) + "\n" for group in groups]
    write_whole(path, "".join(lines))
    if out is not None:
        partial = out.with_name(f".{out.name}.partial")
        shutil.copyfile(path, partial)
        partial.rename(out)
    if is_scored:
        found = summary(groups)
        write_whole(attempt.folder / SUMMARY, json.dumps(found, indent=1) + "\n")
        console.print(table_of(found))
    problems = [group.problem for group in groups if not group.trajectories]
    failed = len(problems)
    unanswered = f", {failed} without any" if failed else ""
    console.print(
        f"answers to {counted(len(groups), 'prompt')}{unanswered}: {short_path(out or path)}", highlight=False
    )
    if failed < len(groups) or not groups:
        return 0
    print(
        f"starling: none of the {failed} prompts has an answer; the first failed with: {problems[0]}", file=sys.stderr
    )
    return 1


def answer(group: StoredGroup, *, is_scored: bool) -> dict[str, Any]:
    """Return a group as a line of answers.jsonl."""
    prompt = group.prompt
    line: dict[str, Any] = {"id": prompt.id}
    if prompt.messages:
        line["messages"] = [{"role": message.role, "content": message.content} for message in prompt.messages]
    else:
        line["text"] = prompt.text
    if TASK in prompt.metadata:
        line["task"] = prompt.metadata[TASK]
    if prompt.reference:
        line["reference"] = prompt.reference
    line["completions"] = [_completion(group, index, scored=is_scored) for index in _indices(group)]
    if group.problem:
        line["problem"] = group.problem
    return line


def _indices(group: StoredGroup) -> range:
    return range(len(group.trajectories))


def _completion(group: StoredGroup, index: int, *, scored: bool) -> dict[str, Any]:
    trajectory = group.trajectories[index]
    completion: dict[str, Any] = {
        "text": trajectory.text,
        "status": str(trajectory.status),
        "num_tokens": trajectory.num_tokens,
    }
    if scored:
        completion["reward"] = group.rewards[index]
        completion["scores"] = _scores(group.components, index)
        if group.evaluation_scores:
            completion["evaluation_scores"] = _scores(group.evaluation_scores, index)
    return completion


def _scores(scores: Mapping[str, Sequence[float | None]], index: int) -> dict[str, float]:
    """Return the scores of one completion, without those that failed."""
    return {name: value for name, values in scores.items() if (value := values[index]) is not None}


def summary(groups: Sequence[StoredGroup]) -> dict[str, Any]:
    """Return the figures of all prompts, and of each task in the order of the tasks."""
    tasks: dict[str, list[StoredGroup]] = {}
    for group in groups:
        tasks.setdefault(str(group.prompt.metadata.get(TASK, "")), []).append(group)
    named = {name: _figures(members) for name, members in tasks.items() if name}
    return {**_figures(groups), **({"tasks": named} if named else {})}


def _figures(groups: Sequence[StoredGroup]) -> dict[str, Any]:
    answered = [group for group in groups if group.trajectories]
    trajectories = [trajectory for group in answered for trajectory in group.trajectories]
    num_tokens = sum(trajectory.num_tokens - trajectory.num_masked for trajectory in trajectories)
    return {
        "num_prompts": len(groups),
        "num_failed": len(groups) - len(answered),
        **pass_rates([group.rewards for group in answered]),
        "num_tokens": num_tokens,
        "completion_tokens_mean": num_tokens / len(trajectories) if trajectories else None,
        "truncated_share": (
            sum(t.status == "truncated" for t in trajectories) / len(trajectories) if trajectories else None
        ),
    }


def table_of(found: dict[str, Any]) -> Table:
    """Return the figures as a table, a row for each task and, of several, one for all."""
    tasks: dict[str, dict[str, Any]] = dict(found.get("tasks", {}))
    if len(tasks) != 1:
        tasks["all"] = found
    passes = [name for name in found if name.startswith("pass_at_") and name != "pass_at_k"]
    passes += ["pass_at_k"] if found["k"] else []  # Without any answer there is no k.
    table = Table(title="evaluation", title_justify="left")
    table.add_column("task")
    for column in ("prompts", "failed", "reward", *(p.replace("pass_at_k", f"pass_at_{found['k']}") for p in passes)):
        table.add_column(column, justify="right")
    table.add_column("tokens", justify="right")
    for name, figures in tasks.items():
        rewards = [figures.get(key) for key in ("reward_mean", *passes)]
        cells = ["" if value is None else f"{value:.3f}" for value in rewards]
        table.add_row(
            name, str(figures["num_prompts"]), str(figures["num_failed"]), *cells, f"{figures['num_tokens']:,}"
        )
    return table


def check_free(path: Path) -> None:
    """Raise ConfigError when `path` exists and is not an empty folder: nothing is overwritten."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ConfigError(f"{path} exists; give another --out, or --resume the folder of a run that is not complete")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the folder of {path} does not exist; make it, or give another --out")
