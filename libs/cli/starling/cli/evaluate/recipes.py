"""Recipes of runs without a policy, built from the command lines of `starling evaluate`, `infer` and `serve`.

Instances of the engine share the prompts: the controller gives the next one to an instance with a free slot, and the
answers are written in the order of prompts, so the number of instances changes the duration and not the result.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w

from starling.cli.evaluate.options import AnswerOptions, ModelOptions
from starling.cli.evaluate.tasks import TaskOptions, absolute, find_tasks, scorers_of
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.gpus import num_instances, visible_gpus
from starling.common.errors import ConfigError
from starling.common.ranges import MAX_GROUPS
from starling.common.settings import unusable_text
from starling.controller.settings import ControllerSettings
from starling.rollout.settings import RolloutSettings

START_S = 1800.0
"""How long the run waits for its first instance: loading a large model takes minutes."""
ROWS: int = RolloutSettings.model_fields["max_rows"].default
WINDOW: int = ControllerSettings.model_fields["window"].default
PROMPT_COLUMNS = ("messages", "prompt", "question", "text")
"""Columns that may hold the prompts of a file, in the order of preference."""


def evaluation_recipe(
    model: ModelOptions, answers: AnswerOptions, tasks: str, scorer: str, settings: Sequence[str]
) -> tuple[Recipe, str]:
    """Return the recipe that evaluates `model` on `tasks`, and the number of instances in words.

    Raises:
        ConfigError: a task, the model or a setting cannot be used.
    """
    names = [name for name in tasks.split(",") if name]
    if not names:
        raise ConfigError("--tasks is missing; name what to evaluate, for example --tasks gsm8k:test.jsonl")
    options = TaskOptions(answers.limit, scorer, answers.plain, answers.system)
    found = find_tasks(names, options)
    sections = _answer_sections(answers)
    sections["evaluation"]["tasks"] = [{"name": task.name, "data": task.data} for task in found]
    sections |= {"data": found[0].data, "reward": {"scorers": scorers_of(found)}}
    return _load("evaluate", model, answers.group_size, sections, settings)


def inference_recipe(
    model: ModelOptions, answers: AnswerOptions, prompts: str, column: str, settings: Sequence[str]
) -> tuple[Recipe, str]:
    """Return the recipe that answers the file `prompts`, and the number of instances in words. Raises ConfigError."""
    if not prompts:
        raise ConfigError("the file of prompts is missing; write starling infer --model DIR prompts.jsonl")
    found = column or prompt_column(Path(prompts))
    data: dict[str, Any] = {"source": absolute(prompts), "prompt_column": found, "reference_column": ""}
    if answers.plain or (found == "text" and not column):
        data["format"] = "{" + found + "}"
    elif answers.system:
        data["system"] = answers.system
    sections = {**_answer_sections(answers), "data": {**data, "limit": answers.limit}}
    return _load("infer", model, answers.group_size, sections, settings)


def serving_recipe(model: ModelOptions, settings: Sequence[str]) -> tuple[Recipe, str]:
    """Return the recipe that serves `model`, and the number of instances in words. Raises ConfigError."""
    return _load("serve", model, 1, {"data": {"source": ""}}, settings)


def prompt_column(path: Path) -> str:
    """Return the column that holds the prompts of a file, judged by its first line. Raises ConfigError."""
    try:
        with path.open() as lines:
            first = next((line for line in lines if line.strip()), "{}")
        columns = json.loads(first)
    except (OSError, ValueError, RecursionError):
        return PROMPT_COLUMNS[0]  # the loader of the file reports what is wrong with it
    found = next((name for name in PROMPT_COLUMNS if name in columns), None) if isinstance(columns, dict) else None
    if path.suffix == ".jsonl" and found is None:
        raise ConfigError(
            f"line 1 of {path} has none of {', '.join(PROMPT_COLUMNS)}; rename a column, or give --prompt-column"
        )
    return found or "prompt"


def _answer_sections(answers: AnswerOptions) -> dict[str, Any]:
    return {
        "sampling": {"max_tokens": answers.max_tokens},
        "evaluation": {"num_completions": answers.group_size, "temperature": answers.temperature},
    }


def _load(
    kind: Literal["evaluate", "infer", "serve"],
    model: ModelOptions,
    group_size: int,
    sections: dict[str, Any],
    settings: Sequence[str],
) -> tuple[Recipe, str]:
    present = visible_gpus()
    if model.tp_size > 1 and model.engine == "transformers":
        raise ConfigError(f"--tp-size {model.tp_size}: the engine transformers has one device; give --engine vllm")
    wanted = model.num_gpus if model.num_gpus is not None else len(present) or model.tp_size
    instances, words = num_instances(wanted, model.tp_size, len(present))
    # As many prompts as fill the engine; the controller keeps as many again ready, for all instances.
    num_slots = max(1, ROWS // max(1, group_size))
    tree = {
        "run": {"name": kind, "kind": kind, "seed": model.seed},
        "model": {"path": absolute(model.model), "dtype": "bfloat16" if present else "float32"},
        "launch": {"num_rollouts": instances, "gpus_per_rollout": model.tp_size if present else 0},
        "controller": {"start_s": START_S, "window": min(max(WINDOW, 2 * instances * num_slots), MAX_GROUPS)},
        "rollout": {"engine": model.engine, "num_slots": num_slots, "vllm": {"tensor_parallel_size": model.tp_size}},
        **sections,
    }
    problem = unusable_text(tree)
    if problem is not None:
        raise ConfigError(f"{problem} (from the command line)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{kind}.toml"
        file.write_text(tomli_w.dumps(tree))
        return load_recipe([file], settings), words
