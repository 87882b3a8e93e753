"""`starling evaluate --model`, `infer` and `serve`: a recipe without a policy, made of a command line, and run.

Instances of the engine share the prompts: the controller gives each the next one when it has room, and what comes back
is written in the order of prompts, so their number changes how long it takes and not what comes of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from starling.cli.evaluate.harness import HarnessOptions, check_alone, harness_tasks, run_harness
from starling.cli.evaluate.results import check_free
from starling.cli.evaluate.tasks import TaskOptions, absolute, find_tasks, scorers_of
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.attempt import Attempt
from starling.cli.run.gpus import num_instances, visible_gpus
from starling.cli.run.screen import short_path
from starling.common.errors import ConfigError
from starling.controller.data.load import prompts_to_answer
from starling.controller.settings import ControllerSettings
from starling.rollout.settings import RolloutSettings

START_S = 1800.0
"""How long the run waits for its first instance: to load a large model takes minutes."""
ROWS: int = RolloutSettings.model_fields["max_rows"].default
WINDOW: int = ControllerSettings.model_fields["window"].default
PROMPT_COLUMNS = ("messages", "prompt", "question", "text")
"""What a line of a file of prompts is looked for, in this order."""


def evaluate_parser() -> argparse.ArgumentParser:
    """Return the command line of `starling evaluate --model`."""
    parser = _parser("evaluate", "Answer the prompts of tasks with a model, score the answers, and print the figures.")
    _add_answering(parser)
    parser.add_argument("--tasks", metavar="TASK[,TASK]", help="see docs/how-to/evaluate.md for all forms")
    parser.add_argument("--scorer", default="exact_match", help="of a dataset that has none of its own")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the run, with answers.jsonl and summary.json")
    return parser


def infer_parser() -> argparse.ArgumentParser:
    """Return the command line of `starling infer`."""
    parser = _parser("infer", "Answer the prompts of a file with a model.")
    _add_answering(parser)
    parser.add_argument("prompts", nargs="?", help="a .jsonl of objects with messages, prompt, question or text")
    parser.add_argument("--prompt-column", default="", help="another column of the prompts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the answers go, besides the run's folder")
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """Return the command line of `starling serve`."""
    return _parser("serve", "Answer requests of OpenAI clients with a model, until Ctrl-C.")


def _parser(command: str, what: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"starling {command}",
        description=what,
        epilog="Any setting of a recipe may follow: --rollout.max-model-len 4096.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--model", metavar="DIR", help="the model's folder")
    parser.add_argument("--num-gpus", type=int, metavar="N", help="of all instances; default: all, or 1 without GPUs")
    parser.add_argument("--tp-size", type=int, default=1, metavar="T", help="GPUs that share one instance")
    parser.add_argument("--engine", default="transformers", help="transformers, vllm, or module:Class")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _add_answering(parser: argparse.ArgumentParser) -> None:
    """Add how each prompt is answered, once."""
    parser.add_argument("--num-completions", type=int, default=1, metavar="K", help="of each prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token at each place")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of each completion")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="only the first N prompts (of each task)")
    parser.add_argument("--plain", action="store_true", help="prompts are plain text, not turns of a conversation")
    parser.add_argument("--system", default="", help="system message of each conversation that has none")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with a run that was cut off")


def main(command: str, argv: Sequence[str]) -> int:
    """Run one of these commands to its end. Returns the exit code. Raises StarlingError."""
    from starling.cli.main import supervise

    parser = PARSERS[command]()
    try:
        known, flags = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see starling {command} --help") from None
    if command == "serve":
        return _serve(known, flags)
    copy = known.out if command == "infer" else None
    if known.resume is not None:
        kept = ("resume", "out") if command == "infer" else ("resume",)
        given = [name for name, value in vars(known).items() if name not in kept and value != parser.get_default(name)]
        if given or flags:
            what = f"--{given[0].replace('_', '-')}" if given else flags[0]
            raise ConfigError(f"a run is taken up as it was begun: give --resume FOLDER without {what}")
        return _resume(command, known.resume, copy)
    if not known.model:
        raise ConfigError(f"--model is missing; write starling {command} --model DIR ...")
    if copy is not None:
        _check_copy(copy)
    elif known.out is not None:
        check_free(known.out)
    if command == "evaluate" and (harnessed := harness_tasks(known.tasks)):
        return _by_harness(known, flags, harnessed)
    recipe, told = recipe_of(command, known, flags)
    num = len(prompts_to_answer(recipe))
    completions = recipe.evaluation.num_completions
    attempt = Attempt.create(recipe) if copy is not None or known.out is None else Attempt.create_at(known.out)
    print(told, f"{num} prompts x {completions} completions = {num * completions} sequences", sep="\n", flush=True)
    return supervise(recipe, attempt, copy)


def _serve(known: argparse.Namespace, flags: Sequence[str]) -> int:
    """Serve until the run is stopped."""
    from starling.cli.main import supervise

    if not known.model:
        raise ConfigError("--model is missing; write starling serve --model DIR")
    recipe, told = recipe_of("serve", known, flags)
    attempt = Attempt.create(recipe)
    print(told, f"addresses and API key: {short_path(attempt.folder / 'api')}/*.json", sep="\n", flush=True)
    return supervise(recipe, attempt)


def _by_harness(known: argparse.Namespace, flags: Sequence[str], tasks: tuple[str, ...]) -> int:
    """Have a harness evaluate a model that is served for it."""
    check_alone(known.num_gpus, known.tp_size, known.num_completions)
    one = argparse.Namespace(**{**vars(known), "num_gpus": known.tp_size})
    recipe, told = recipe_of("serve", one, ["--run.name", "evaluate", *flags])
    attempt = Attempt.create(recipe) if known.out is None else Attempt.create_at(known.out)
    print(told, f"tasks of lm-eval: {', '.join(tasks)}", sep="\n", flush=True)
    ways = {name: getattr(known, name) for name in ("limit", "plain", "system", "temperature", "max_tokens", "seed")}
    return run_harness(recipe, attempt, HarnessOptions(tasks, known.model, **ways))


def _check_copy(path: Path) -> None:
    """Raise ConfigError unless the answers can be written to `path`, a file of their own."""
    check_free(path)
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; give a file")


def _resume(command: str, folder: Path, copy: Path | None) -> int:
    """Take up the run in `folder`."""
    from starling.cli.main import supervise

    if copy is not None:
        _check_copy(copy)
    attempt = Attempt.find(folder)
    if not attempt.recipe.exists():
        raise ConfigError(f"{attempt.folder} has no recipe.toml, so nothing can be taken up there; begin it anew")
    recipe = load_recipe([attempt.recipe], [])
    if recipe.run.kind != command:
        raise ConfigError(
            f"{attempt.folder} is a run of kind {recipe.run.kind!r}; take it up with starling run --resume"
        )
    return supervise(recipe, attempt, copy)


def recipe_of(command: str, known: argparse.Namespace, flags: Sequence[str]) -> tuple[Recipe, str]:
    """Return the recipe that a command line means, and the arithmetic of its instances. Raises ConfigError."""
    present = visible_gpus()
    if known.tp_size > 1 and known.engine == "transformers":
        raise ConfigError(f"--tp-size {known.tp_size}: the engine transformers has one device; give --engine vllm")
    wanted = known.num_gpus if known.num_gpus is not None else len(present) or known.tp_size
    instances, told = num_instances(wanted, known.tp_size, len(present))
    # As many prompts as fill the engine; the controller has as many again ready, for all instances.
    num_slots = max(1, ROWS // getattr(known, "num_completions", 1))
    tree = {
        "run": {"name": command, "kind": command, "seed": known.seed},
        "model": {"path": absolute(known.model), "dtype": "bfloat16" if present else "float32"},
        "launch": {"num_rollouts": instances, "gpus_per_rollout": known.tp_size if present else 0},
        "controller": {"start_s": START_S, "window": max(WINDOW, 2 * instances * num_slots)},
        "rollout": {"engine": known.engine, "num_slots": num_slots, "vllm": {"tensor_parallel_size": known.tp_size}},
        **SECTIONS[command](known),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{command}.toml"
        file.write_text(tomli_w.dumps(tree))
        return load_recipe([file], flags), told


def _evaluated(known: argparse.Namespace) -> dict[str, Any]:
    if not known.tasks:
        raise ConfigError("--tasks is missing; name what to evaluate, for example --tasks gsm8k:test.jsonl")
    ways = TaskOptions(known.limit, known.scorer, known.plain, known.system)
    tasks = find_tasks([name for name in known.tasks.split(",") if name], ways)
    sections = _answered(known)
    sections["evaluation"]["tasks"] = [{"name": task.name, "data": task.data} for task in tasks]
    return {
        **sections,
        "data": tasks[0].data,
        "reward": {"scorers": scorers_of(tasks)},
    }


def _inferred(known: argparse.Namespace) -> dict[str, Any]:
    if not known.prompts:
        raise ConfigError("the file of prompts is missing; write starling infer --model DIR prompts.jsonl")
    column = known.prompt_column or prompt_column(Path(known.prompts))
    data: dict[str, Any] = {"source": absolute(known.prompts), "prompt_column": column, "reference_column": ""}
    if known.plain or (column == "text" and not known.prompt_column):
        data["format"] = "{" + column + "}"
    elif known.system:
        data["system"] = known.system
    return {**_answered(known), "data": {**data, "limit": known.limit}}


def _answered(known: argparse.Namespace) -> dict[str, Any]:
    """Return how prompts are answered."""
    return {
        "sampling": {"max_tokens": known.max_tokens},
        "evaluation": {"num_completions": known.num_completions, "temperature": known.temperature},
    }


def _served(known: argparse.Namespace) -> dict[str, Any]:
    return {"data": {"source": ""}}


SECTIONS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "evaluate": _evaluated,
    "infer": _inferred,
    "serve": _served,
}
"""What each command puts into its recipe besides model and instances."""
PARSERS = {"evaluate": evaluate_parser, "infer": infer_parser, "serve": serve_parser}


def prompt_column(path: Path) -> str:
    """Return the column in which a file of prompts has them, as its first line tells. Raises ConfigError."""
    try:
        with path.open() as lines:
            first = next((line for line in lines if line.strip()), "{}")
        columns = json.loads(first)
    except (OSError, ValueError):
        return PROMPT_COLUMNS[0]  # whoever reads the file says what is wrong with it
    found = next((name for name in PROMPT_COLUMNS if name in columns), None) if isinstance(columns, dict) else None
    if path.suffix == ".jsonl" and found is None:
        raise ConfigError(
            f"line 1 of {path} has none of {', '.join(PROMPT_COLUMNS)}; rename a column, or give --prompt-column"
        )
    return found or "prompt"
