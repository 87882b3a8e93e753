"""`starling evaluate`, `infer` and `serve`: a model without a policy, on the GPUs of this machine.

`starling evaluate` without `--model` evaluates the newest version of a run in progress instead.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from starling.cli.command_line import CommandLine, Line, define
from starling.cli.evaluate.follow import NOTHING_TO_FOLLOW, FollowOptions, follow
from starling.cli.evaluate.options import DEFAULT_ANSWERS, DEFAULT_MODEL, AnswerOptions, ModelOptions
from starling.cli.operate.command import NO_CONNECTION, Flags, RunFolder, evaluate_run
from starling.common.counts import counted
from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from starling.cli.recipe.schema import Recipe
    from starling.cli.run.attempt import Attempt

MODEL = Group("Model", sort_key=1)
ANSWERS = Group("Answers", sort_key=2)
TASKS = Group("Tasks", sort_key=3)
RESULTS = Group("Results", sort_key=4)
IN_PROGRESS = Group("A run in progress, instead of a model", sort_key=8)
A_MODEL = frozenset({"--model", "--tasks", "--resume"})
"""Flags of the evaluation of a model; without any of them a run in progress is evaluated."""
A_RUN = frozenset({"--num-completions", "--controller", "--key", "--run", "--timeout", "--json"})
SETTINGS = "Any setting of a recipe may follow: --rollout.max-model-len 4096."


Model = Annotated[ModelOptions, Parameter(name="*", group=MODEL)]
Answers = Annotated[AnswerOptions, Parameter(name="*", group=ANSWERS)]
Follow = Annotated[FollowOptions, Parameter(name="*", group=IN_PROGRESS)]
Resume = Annotated[Path | None, Parameter(metavar="FOLDER", help="Resume a run that was interrupted.", group=RESULTS)]


def evaluate(
    folder: RunFolder = None,
    /,
    *,
    model: Model = DEFAULT_MODEL,
    answers: Answers = DEFAULT_ANSWERS,
    tasks: Annotated[
        str, Parameter(metavar="TASK[,TASK]", help="What to evaluate: see docs/how-to/evaluate.md.", group=TASKS)
    ] = "",
    scorer: Annotated[str, Parameter(help="Scorer of a dataset that names none.", group=TASKS)] = "exact_match",
    out: Annotated[
        Path | None,
        Parameter(metavar="FOLDER", help="The run's folder, with answers.jsonl and summary.json.", group=RESULTS),
    ] = None,
    resume: Resume = None,
    connection: Annotated[Flags, Parameter(name="*", group=IN_PROGRESS)] = NO_CONNECTION,
    line: Line,
) -> int:
    """Evaluate a model on tasks, or the newest version of a run."""
    if not is_of_model(line):
        foreign = [*sorted(line.flags - A_RUN), *line.settings]
        if foreign:
            raise ConfigError(f"{foreign[0]} is for the evaluation of a model; give --model DIR, or leave it out")
        return evaluate_run(answers.num_completions or 0, folder, connection)
    _check_no_run(line, folder)
    if resume is not None:
        return _resume("evaluate", resume, line, None)
    _check_model("evaluate", model)
    if out is not None:
        from starling.cli.evaluate.results import check_free

        check_free(out)
    from starling.cli.evaluate.harness import harness_tasks
    from starling.cli.evaluate.recipes import evaluation_recipe

    if harnessed := harness_tasks(tasks):
        return _evaluate_with_harness(model, answers, harnessed, out, line)
    recipe, instances = evaluation_recipe(model, answers, tasks, scorer, line.settings)
    return _answer(recipe, instances, folder=out)


def infer(
    prompts: Annotated[
        str, Parameter(help="A .jsonl of objects with messages, prompt, question or text.", metavar="PROMPTS.jsonl")
    ] = "",
    /,
    *,
    model: Model = DEFAULT_MODEL,
    answers: Answers = DEFAULT_ANSWERS,
    prompt_column: Annotated[str, Parameter(help="Another column of the prompts.", group=ANSWERS)] = "",
    out: Annotated[
        Path | None, Parameter(metavar="FILE", help="A copy of the answers, besides the run's own.", group=RESULTS)
    ] = None,
    resume: Resume = None,
    line: Line,
) -> int:
    """Answer the prompts of a file with a model."""
    if resume is not None:
        if out is not None:
            _check_copy(out)
        return _resume("infer", resume, line, out, "--out", prompts=prompts)
    _check_model("infer", model)
    if out is not None:
        _check_copy(out)
    from starling.cli.evaluate.recipes import inference_recipe

    recipe, instances = inference_recipe(model, answers, prompts, prompt_column, line.settings)
    return _answer(recipe, instances, copy=out)


def serve(*, model: Model = DEFAULT_MODEL, run: Follow = NOTHING_TO_FOLLOW, line: Line) -> int:
    """Answer requests of OpenAI clients with a model, or with the newest weights of a run, until Ctrl-C."""
    if run.controller or "--from" in line.flags:
        return follow(run, model, line.flags, line.settings)
    for flag in ("--config", "--key"):
        if flag in line.flags:
            raise ConfigError(f"{flag} is for the weights of a run; give --from tcp://host:port too, or leave it out")
    _check_model("serve", model)
    from starling.cli.evaluate.recipes import serving_recipe
    from starling.cli.run.attempt import Attempt
    from starling.cli.run.command import supervise
    from starling.cli.run.screen import short_path

    recipe, instances = serving_recipe(model, line.settings)
    attempt = Attempt.create(recipe)
    print(instances, f"addresses and API key: {short_path(attempt.folder / 'api')}/*.json", sep="\n", flush=True)
    return supervise(recipe, attempt)


def is_of_model(line: CommandLine) -> bool:
    """Return whether `starling evaluate` evaluates a model, and not the newest version of a run in progress."""
    return bool(line.flags & A_MODEL)


def _check_no_run(line: CommandLine, folder: Path | None) -> None:
    foreign = sorted(line.flags & (A_RUN - {"--num-completions"}))
    if foreign or folder is not None:
        what = foreign[0] if foreign else repr(str(folder))
        raise ConfigError(f"{what} is for the evaluation of a run in progress; leave it out, or give no --model")


def _check_model(command: str, model: ModelOptions) -> None:
    if not model.model:
        raise ConfigError(f"--model is missing; write starling {command} --model DIR ...")


def _check_copy(path: Path) -> None:
    """Raise ConfigError unless the answers can be written to `path`, a file of their own."""
    from starling.cli.evaluate.results import check_free

    check_free(path)
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder; give a file")


def _attempt(recipe: Recipe, out: Path | None) -> Attempt:
    from starling.cli.run.attempt import Attempt

    return Attempt.create(recipe) if out is None else Attempt.create_at(out)


def _answer(recipe: Recipe, instances: str, *, folder: Path | None = None, copy: Path | None = None) -> int:
    from starling.cli.run.command import supervise
    from starling.controller.data.load import prompts_to_answer

    num, completions = len(prompts_to_answer(recipe)), recipe.evaluation.num_completions
    attempt = _attempt(recipe, folder)
    size = f"{counted(num, 'prompt')} x {counted(completions, 'completion')} = {counted(num * completions, 'sequence')}"
    print(instances, size, sep="\n", flush=True)
    return supervise(recipe, attempt, copy)


def _evaluate_with_harness(
    model: ModelOptions, answers: AnswerOptions, tasks: tuple[str, ...], out: Path | None, line: CommandLine
) -> int:
    """Serve the model to lm-eval until that has evaluated it."""
    from starling.cli.evaluate.harness import HarnessOptions, check_alone, run_harness
    from starling.cli.evaluate.recipes import serving_recipe

    check_alone(model.num_gpus, model.tp_size, answers.group_size)
    one = replace(model, num_gpus=model.tp_size)
    recipe, instances = serving_recipe(one, ["--run.name", "evaluate", *line.settings])
    attempt = _attempt(recipe, out)
    print(instances, f"tasks of lm-eval: {', '.join(tasks)}", sep="\n", flush=True)
    options = HarnessOptions(
        tasks=tasks,
        model=model.model,
        limit=answers.limit,
        plain=answers.plain,
        system=answers.system,
        temperature=answers.temperature,
        max_tokens=answers.max_tokens,
        seed=model.seed,
    )
    return run_harness(recipe, attempt, options)


def _resume(command: str, folder: Path, line: CommandLine, copy: Path | None, *allowed: str, prompts: str = "") -> int:
    """Resume the run in `folder`."""
    from starling.cli.recipe.schema import load_recipe
    from starling.cli.run.attempt import Attempt
    from starling.cli.run.command import supervise

    foreign = [*filter(None, [prompts]), *sorted(line.flags - {"--resume", *allowed}), *line.settings]
    if foreign:
        raise ConfigError(f"a run is resumed as it was started: give --resume FOLDER without {foreign[0]}")
    attempt = Attempt.find(folder)
    if not attempt.recipe.exists():
        raise ConfigError(f"{attempt.folder} has no recipe.toml, so there is nothing to resume; start a new run")
    recipe = load_recipe([attempt.recipe], [])
    if recipe.run.kind != command:
        raise ConfigError(f"{attempt.folder} is a run of kind {recipe.run.kind!r}; use starling run --resume")
    return supervise(recipe, attempt, copy)


evaluate_command = define(
    "evaluate",
    evaluate,
    "--model DIR --tasks TASK[,TASK] [OPTIONS] [--SECTION.KEY VALUE ...]\n"
    "       starling evaluate [RUN_FOLDER] [--num-completions N]",
    SETTINGS,
    """Examples:
  starling evaluate --model /models/Qwen3-8B --tasks gsm8k:test.jsonl,reasoning_gym:spell_backward
  starling evaluate --model /models/Qwen3-8B --engine vllm --tasks lm-eval:arc_easy --out results
  starling evaluate --resume results
  starling evaluate runs/quickstart --num-completions 4""",
)
infer_command = define(
    "infer",
    infer,
    "--model DIR PROMPTS.jsonl [OPTIONS] [--SECTION.KEY VALUE ...]",
    SETTINGS,
    "Example:\n  starling infer --model /models/Qwen3-8B prompts.jsonl --num-gpus 8 --out answers.jsonl",
)
serve_command = define(
    "serve",
    serve,
    "--model DIR [OPTIONS] [--SECTION.KEY VALUE ...]\n"
    "       starling serve --from ADDRESS --config FILE --key FILE [--model DIR] [OPTIONS] [--SECTION.KEY VALUE ...]",
    SETTINGS,
    """Examples:
  starling serve --model /models/Qwen3-8B --num-gpus 8 --rollout.api.port 8000
  starling serve --from tcp://10.0.0.1:5555 --config config.toml --key rollout-7.json --model /models/Qwen3-8B""",
)
