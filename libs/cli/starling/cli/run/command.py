"""`starling run`: train a recipe on this machine, begin from a saved state, or resume a run.

`starling rollout --only` and `starling policy --replay` are runs of other kinds.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from starling.cli.command_line import Line, define
from starling.common.counts import counted
from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from starling.cli.recipe.schema import Recipe
    from starling.cli.run.attempt import Attempt

NOT_EVALUATED = ("--evaluation.at-start=false", "--evaluation.at-end=false", "--evaluation.every=0")
"""Settings of a run that trains no versions, or generates nothing, and so has nothing to evaluate."""
MOST_USED = {
    "model.path": "folder of the model, in Hugging Face format",
    "data.source": "prompts: a .jsonl or .parquet, hf:NAME, or MODULE:FACTORY",
    "reward.scorers": "how completions are scored: '[{name = \"math\"}]'",
    "rl.num_steps": "steps; each makes one version",
    "rl.prompts_per_step": "prompts of one step",
    "rl.group_size": "completions of each prompt",
    "rl.max_staleness": "how many versions old a trained token may be",
    "sampling.max_tokens": "maximum tokens of a completion",
    "policy.algorithm.name": "grpo, dr_grpo, dapo, gspo, ...",
    "policy.optimizer.learning_rate": "step size of the optimizer",
    "rollout.engine": "transformers, vllm, or MODULE:CLASS",
    "launch.num_rollouts": "rollout replicas on this machine",
    "run.name": "files go to runs/NAME/attempt-N",
    "run.seed": "seed of weights, data order and sampling",
}
"""Settings that the help of `starling run` shows, with a short text each."""
USAGE = """RECIPE.toml [--SECTION.KEY VALUE ...] [OPTIONS]
       starling run --resume RUN_FOLDER [--accept-changed-data]"""
EXAMPLES = """Examples:
  starling run recipes/quickstart.toml
  starling run mine.toml --config cluster.toml --rl.group-size 16
  starling run mine.toml --dry-run
  starling run mine.toml --from runs/mine/attempt-1
  starling run --resume runs/mine/attempt-1"""
START = Group("A new run", sort_key=1)
OTHER = Group("Another run", sort_key=2)


def run(
    recipe: Annotated[Path | None, Parameter(help="The run's configuration, a TOML file; it comes first.")] = None,
    /,
    *,
    config: Annotated[
        tuple[Path, ...], Parameter(help="Another TOML file on top of the recipe; may be repeated.", group=START)
    ] = (),
    dry_run: Annotated[
        bool, Parameter(help="Check recipe, data, tokenizer, scorers, weights; start nothing.", group=START)
    ] = False,
    launcher: Annotated[
        str, Parameter(metavar="NAME", help="Place the replicas with NAME, as launch.launcher.", group=START)
    ] = "",
    state: Annotated[
        str,
        Parameter(
            name="--from",
            metavar="STATE",
            help="Begin from a saved state: its folder or URL, or a run's folder.",
            group=OTHER,
        ),
    ] = "",
    resume: Annotated[
        Path | None, Parameter(metavar="RUN_FOLDER", help="Resume a run after a stop or a crash.", group=OTHER)
    ] = None,
    accept_changed_data: Annotated[
        bool, Parameter(help="With --resume: go on although the data has changed.", group=OTHER)
    ] = False,
    line: Line,
) -> int:
    """Train: start and supervise every process of a run, on this machine or through a launcher."""
    if resume is not None:
        return _resume(resume, line.arguments, accept_changed_data=accept_changed_data)
    if accept_changed_data:
        raise ConfigError("--accept-changed-data is for a run that is resumed; write it with --resume RUN_FOLDER")
    if recipe is None or (line.arguments[0].startswith("-") and line.arguments[0] != "--"):
        raise ConfigError(
            "the recipe comes first: write `starling run RECIPE.toml`, then flags; `starling settings` lists all"
        )
    if not dry_run:
        begin_imports(recipe)
    from starling.cli.recipe.schema import load_recipe

    placed_by = (f"--launch.launcher={launcher}",) if launcher else ()
    loaded = load_recipe([recipe, *config], (*line.settings, *placed_by))
    if state:
        from starling.cli.recipe.warm_start import start_from_state
        from starling.cli.run.attempt import newest_attempt

        loaded = start_from_state(loaded, state if "://" in state else str(newest_attempt(Path(state))))
    if dry_run:
        return _print_recipe(loaded)
    return _start(loaded)


def begin_imports(recipe: Path) -> None:
    """Start the process that imports torch and transformers for policies and rollouts, unless there is no `recipe`.

    The classes of the settings, which are needed to read the recipe, are imported meanwhile.
    """
    from starling.cli.run.environment import of_fork_server
    from starling.cli.run.forkserver import Forks

    if recipe.is_file():
        Forks(of_fork_server())


def rollout_only(
    recipe: Annotated[Path, Parameter(help="The run's configuration, a TOML file.")],
    /,
    *,
    only: Annotated[bool, Parameter(help="Start no policy.")] = True,
    line: Line,
) -> int:
    """Generate and score without a policy, and keep the trajectories."""
    begin_imports(recipe)
    from starling.cli.recipe.schema import load_recipe

    return _start(load_recipe([recipe], generate_settings(line.settings)))


def policy_replay(
    recipe: Annotated[Path, Parameter(help="The run's configuration, a TOML file.")],
    /,
    *,
    replay: Annotated[Path, Parameter(metavar="FOLDER", help="The trajectories of an earlier run.")],
    line: Line,
) -> int:
    """Train from the trajectories of an earlier run, without rollouts."""
    begin_imports(recipe)
    from starling.cli.recipe.schema import load_recipe

    return _start(load_recipe([recipe], replay_settings(replay, recipe, line.settings)))


def smoke(*, line: Line) -> int:
    """Check in under a minute that everything works on this machine."""
    from starling.cli.run.smoke import run_smoke

    run_smoke(line.settings)
    return 0


def generate_settings(settings: tuple[str, ...]) -> list[str]:
    """Return `settings` of a recipe with those that make it a run without a policy."""
    return ["--run.kind=generate", "--sft.num-steps=0", *NOT_EVALUATED, *settings]


def replay_settings(folder: Path, recipe: Path, settings: tuple[str, ...]) -> list[str]:
    """Return `settings` of `recipe` with those that train on the trajectories in `folder`.

    The number of steps is at most what the stored groups suffice for. Raises ConfigError when there are too few.
    """
    from starling.cli.recipe.schema import load_recipe
    from starling.controller.data.trajectories import TRAJECTORIES, check_enough, num_usable

    flags = [
        "--run.kind=replay",
        f"--data.source={TRAJECTORIES}{folder.absolute()}",
        *NOT_EVALUATED,
        *settings,
    ]
    loaded = load_recipe([recipe], flags)
    num, per_step = num_usable(folder), loaded.rl.prompts_per_step
    check_enough(folder, num, per_step)
    steps = min(loaded.rl.num_steps, num // per_step)
    stored = f"{counted(num, 'group')} = {counted(num // per_step, 'step')} x {counted(per_step, 'prompt')}"
    print(f"replay: {stored}; it trains {steps}", flush=True)
    return [*flags, f"--rl.num-steps={steps}"]


def supervise(recipe: Recipe, attempt: Attempt, out: Path | None = None) -> int:
    """Run the processes of an attempt to its end and report the result. Returns the exit code.

    `out`: a second file for the answers of a run that only answers prompts, besides the one in its folder.
    """
    from starling.cli.console import Console
    from starling.cli.evaluate.results import finish_answering
    from starling.cli.report.summary import report
    from starling.cli.run.screen import short_path
    from starling.cli.run.supervisor import InterruptedRunError, Supervisor

    begin = time.monotonic()
    resumes = f"`starling run --resume {short_path(attempt.folder)}` resumes it"
    try:
        Supervisor(recipe, attempt).run()
    except InterruptedRunError as error:
        print(f"starling: {error}, and {resumes}", file=sys.stderr)
        return 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if recipe.kind.serves_requests:
            return 0
        if recipe.kind.answers_each_prompt:
            return finish_answering(recipe, attempt, out)
        report(attempt, time.monotonic() - begin, Console())
        if not attempt.is_complete():
            print(f"stopped at step {attempt.num_steps()} of {recipe.plan().last_step}; {resumes}")
    except KeyboardInterrupt:
        print(f"starling: the run is over, without a report; its files are in {attempt.folder}", file=sys.stderr)
    return 0


def _start(recipe: Recipe) -> int:
    from starling.cli.run.attempt import Attempt

    _check_addresses(recipe)
    return supervise(recipe, Attempt.create(recipe))


def _check_addresses(recipe: Recipe) -> None:
    """Raise ConfigError when the controller could not listen at an address of the recipe."""
    from starling.common.net.binding import check_address

    check_address(recipe.network.host, recipe.network.port)
    if recipe.observe.http:
        from starling.common.observe.endpoint import checked_endpoint

        checked_endpoint(recipe.observe)


def _print_recipe(recipe: Recipe) -> int:
    from starling.cli.recipe.arithmetic import describe_arithmetic
    from starling.cli.recipe.inputs import check_inputs
    from starling.cli.recipe.schema import to_shown_toml
    from starling.common.importing import without_modules
    from starling.controller.core.groups.validation.recording import truncation_notice

    _check_addresses(recipe)
    # transformers imports it for its quantisers; it takes time, and warns
    hidden = () if recipe.policy.uses_torchao else ("torchao",)
    with without_modules(*hidden):
        sizes = describe_arithmetic(recipe)
    plan = recipe.plan()
    notices = filter(None, [truncation_notice(plan.sampling, plan.kind)])
    lines = [*sizes, *check_inputs(recipe), *(f"notice: {notice}" for notice in notices)]
    print(to_shown_toml(recipe), *(f"# {line}" for line in lines), sep="\n")
    return 0


def _resume(folder: Path, arguments: tuple[str, ...], *, accept_changed_data: bool) -> int:
    """Resume the attempt in `folder` with new processes, which find its keys, journal and saved states."""
    from starling.cli.recipe.schema import load_recipe
    from starling.cli.run.attempt import Attempt

    if len([word for word in arguments if word not in ("--resume", "--accept-changed-data")]) != 1:
        raise ConfigError(
            "write `starling run --resume RUN_FOLDER`, with --accept-changed-data or nothing else: a run is resumed as "
            "it was, and `starling set` changes what may change"
        )
    attempt = Attempt.find(folder)
    if not attempt.recipe.exists():
        raise ConfigError(
            f"{attempt.folder} has no recipe.toml, so `starling run` did not start it; start its services instead"
        )
    attempt.check_journal()
    if attempt.is_complete():
        print(complete_sentence(attempt))
        return 0
    flags = ["--controller.accept-changed-data=true"] if accept_changed_data else []
    return supervise(load_recipe([attempt.recipe], flags), attempt)


def complete_sentence(attempt: Attempt) -> str:
    """Return that the run is complete, and what can be done with it."""
    folder = attempt.folder
    next_steps = (
        f"`starling export {folder} OUT` writes its model, `starling run RECIPE.toml --from {folder}` trains it further"
    )
    return f"the run in {folder} is complete; {next_steps if attempt.trains() else 'its results are in that folder'}"


def _settings_note() -> str:
    lines = ["Any setting of a recipe can be given as a flag; a later one wins. The most used:"]
    lines += [f"  --{key.replace('_', '-'):<31} {text}" for key, text in MOST_USED.items()]
    lines += ["`starling settings WORD ...` searches all of them, `starling settings --toml` writes them as a recipe."]
    return "\n".join(lines)


command = define(
    "run",
    run,
    USAGE,
    _settings_note(),
    EXAMPLES,
)
smoke_command = define(
    "smoke",
    smoke,
    "[--SECTION.KEY VALUE ...]",
    "It trains a tiny model with all services, kills one rollout, and checks the invariants of the run.",
)
rollout_only_command = define("rollout-only", rollout_only, "RECIPE.toml [--SECTION.KEY VALUE ...]")
policy_replay_command = define("policy-replay", policy_replay, "FOLDER RECIPE.toml [--SECTION.KEY VALUE ...]")
