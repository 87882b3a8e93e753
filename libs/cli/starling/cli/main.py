"""The `starling` command."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from starling.cli.services import SERVICES
from starling.common.errors import ConfigError, StarlingError

if TYPE_CHECKING:
    from starling.cli.recipe.schema import Recipe
    from starling.cli.run.attempt import Attempt

MODULES = {**SERVICES, "sim": "starling.sim.cli"}
"""Commands that are programs of their own, started by name: this package needs none of them to be installed."""
OPERATIONS = ("status", "why", "set", "evaluate", "stop")
NOT_EVALUATED = ("--evaluation.at-start=false", "--evaluation.at-end=false", "--evaluation.every=0")
"""What a run has no versions for, or generates nothing for, whatever its recipe says."""
USAGE = """usage: starling COMMAND ...

  run RECIPE.toml [--config MORE.toml ...] [--section.key value ...] [--dry-run]
                        train: start and supervise every process of a run on this machine
  run --resume RUN_FOLDER
                        go on with a run that was stopped, or whose machine was
  run RECIPE.toml --from STATE [...]
                        a new run that goes on from a state of another one: its folder, or a URL
  export RUN_OR_STATE OUT [--ema] [--model FOLDER]
                        write the model of a saved state in Hugging Face form, without a run
  evaluate --model DIR --tasks TASK[,TASK] [--num-gpus N] [--tp-size T] [--out FOLDER] [...]
                        answer the prompts of tasks with a model, score the answers, and print the figures
  infer --model DIR PROMPTS.jsonl [--num-gpus N] [--tp-size T] [--out FILE] [...]
                        answer the prompts of a file with a model
  serve --model DIR [--num-gpus N] [--tp-size T] [...]
                        answer requests of OpenAI clients with a model, until Ctrl-C
  rollout --only RECIPE.toml [--section.key value ...]
                        generate and score without a policy, and keep the trajectories
  policy --replay FOLDER RECIPE.toml [--section.key value ...]
                        train from kept trajectories, without rollouts
  status [RUN_FOLDER]   what a run is doing: its phase, its replicas, its groups
  why [RUN_FOLDER]      what a run waits for, on whom, and for how long already
  set [RUN_FOLDER] KEY VALUE
                        change a setting of a run that goes on
  evaluate [RUN_FOLDER] [--num-completions N]
                        evaluate the newest version now
  stop [RUN_FOLDER]     end a run in good order
  smoke                 prove in under a minute that everything works here
  controller | policy | rollout | reward | teacher --config FILE --controller tcp://HOST:PORT
                        run one service by itself; --help shows all its settings
  plan SOURCE DESTINATION [--model NAME] [--topology FILE.toml] [--picture FILE.svg] [--json]
                        what a weight synchronisation moves, how long it takes and how much memory, without a GPU
  sync-report RUN_FOLDER [--last N] [--json]
                        where the time of weight synchronisation went, and what its bottleneck is
  record RUN_FOLDER [--out FILE]
                        collect what the controller of a run went through into one file: a crash report
  replay FILE_OR_FOLDER [--incarnation N] [--until N] [--json]
                        make the controller's state after so many events again, and print it
  keys make FOLDER NAME ... [--replace] | list FOLDER | revoke FOLDER NAME ...
                        the CURVE keys of a run: whose they are, and which role each may play; also while it runs
  sim [--replicas N] [--faults MIX] [--seeds N] [--first-seed N]
                        simulate runs under faults, and check all that a run promises
  sim --what-if CHANGES [--base CHANGES] [--picture FILE.svg] [--json]
                        what staleness and throughput would be, for example with rollouts=512,response_length=2x
  scratch RECIPE.toml FOLDER [--section.key value ...]
                        make the folder of the recipe's [model.scratch]: configuration and tokenizer, no weights
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error of ours is one sentence on stderr and a non-zero exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": run,
        **{name: partial(operate, name) for name in OPERATIONS},
        "infer": partial(answer, "infer"),
        "serve": partial(answer, "serve"),
        "smoke": smoke,
        "plan": plan,
        "sync-report": sync_report,
        "record": record,
        "replay": replay,
        "keys": keys,
        "scratch": scratch,
        "export": export,
    }
    if command not in (*commands, *MODULES):
        print(f"starling: unknown command {command!r}; known: {', '.join([*commands, *MODULES])}", file=sys.stderr)
        return 2
    previous = signal.signal(signal.SIGINT, leave)
    try:
        if command == "rollout" and "--only" in rest:
            return run(generate_only(rest))
        if command == "policy" and any(word.partition("=")[0] == "--replay" for word in rest):
            return run(replay_from(rest))
        if command == "evaluate" and is_answering(rest):
            return answer(command, rest)
        return run_module(command, rest) if command in MODULES else commands[command](rest)
    except StarlingError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        signal.signal(signal.SIGINT, previous)


def leave(number: int, frame: FrameType | None) -> None:
    """End at once on Ctrl-C, as long as there is nothing to end in order.

    An exception would not do: it would be thrown into whatever import goes on, which may swallow it.
    """
    os.write(sys.stderr.fileno(), b"starling: interrupted before anything was started\n")
    os._exit(130)


def run_module(command: str, argv: list[str]) -> int:
    """Run a service, or the simulation, in this process, without importing any other."""
    part = MODULES[command].split(".")[1]
    if importlib.util.find_spec(f"starling.{part}") is None:
        raise ConfigError(f"starling {command} is not installed here; install the distribution starling-{part}")
    sys.argv = [f"starling {command}", *argv]
    try:
        runpy.run_module(MODULES[command], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def run(argv: Sequence[str]) -> int:
    """`starling run`."""
    from starling.cli.recipe.schema import Recipe, load_recipe, to_toml
    from starling.common.service import help_of

    parser = argparse.ArgumentParser(
        prog="starling run", formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, allow_abbrev=False
    )
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--from", dest="state", default="")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    if argv and argv[0] == "--resume":
        return resume(argv[1:])
    known, flags = parser.parse_known_args(list(argv))
    if known.help:
        print(USAGE + "\n" + help_of(Recipe))
        return 0
    if known.recipe is None or argv[0].startswith("-"):
        raise ConfigError(
            "the recipe comes first: write `starling run RECIPE.toml`, then flags; --help shows all settings"
        )
    recipe = load_recipe([known.recipe, *known.config], flags)
    if known.state:
        from starling.cli.recipe.warm_start import start_from_state

        recipe = start_from_state(recipe, known.state)
    if known.dry_run:
        from starling.cli.recipe.arithmetic import describe_arithmetic

        lines = describe_arithmetic(recipe)
        print(to_toml(recipe), *(f"# {line}" for line in lines), sep="\n")
        return 0
    from starling.cli.run.attempt import Attempt

    return supervise(recipe, Attempt.create(recipe))


def resume(argv: Sequence[str]) -> int:
    """`starling run --resume`: the same attempt with new processes, which find its keys, journal and saved states."""
    from starling.cli.recipe.schema import load_recipe
    from starling.cli.run.attempt import Attempt

    if len(argv) != 1 or argv[0].startswith("-"):
        raise ConfigError(
            "write `starling run --resume RUN_FOLDER` and nothing else: a run is taken up again as it was, "
            "and `starling set` changes what may change"
        )
    attempt = Attempt.find(Path(argv[0]))
    if not attempt.recipe.exists():
        raise ConfigError(
            f"{attempt.folder} has no recipe.toml, so `starling run` did not begin it; start its services"
        )
    return supervise(load_recipe([attempt.recipe], []), attempt)


def supervise(recipe: Recipe, attempt: Attempt, out: Path | None = None) -> int:
    """Run the processes of an attempt to its end, and say what came of it. Returns the exit code.

    `out`: where the answers of a run that only answers prompts go, besides its folder.
    """
    from rich.console import Console

    from starling.cli.evaluate.results import finish_answering
    from starling.cli.report.summary import report
    from starling.cli.run.supervisor import InterruptedRunError, Supervisor
    from starling.controller.settings import ANSWERING_KINDS

    begin = time.monotonic()
    try:
        Supervisor(recipe, attempt).run()
    except InterruptedRunError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if recipe.run.kind == "serve":
            return 0
        if recipe.run.kind in ANSWERING_KINDS:
            return finish_answering(recipe, attempt, out)
        report(attempt, time.monotonic() - begin, Console())
    except KeyboardInterrupt:
        print(f"starling: the run is over, without a report; its files are in {attempt.folder}", file=sys.stderr)
    return 0


def replay_from(argv: Sequence[str]) -> list[str]:
    """Return the command line of `starling run` that `starling policy --replay FOLDER RECIPE ...` stands for."""
    from starling.cli.recipe.schema import load_recipe
    from starling.controller.data.trajectories import TRAJECTORIES, check_enough, num_usable

    parser = argparse.ArgumentParser(prog="starling policy --replay", allow_abbrev=False)
    parser.add_argument("--replay", type=Path, required=True, metavar="FOLDER", help="the trajectories of a run")
    parser.add_argument("recipe", type=Path)
    known, flags = parser.parse_known_args(list(argv))
    folder = known.replay
    settings = ["--run.kind=replay", f"--data.source={TRAJECTORIES}{folder.absolute()}", *NOT_EVALUATED]
    recipe = load_recipe([known.recipe], [*settings, *flags])
    num, per_step = num_usable(folder), recipe.rl.prompts_per_step
    check_enough(folder, num, per_step)
    steps = min(recipe.rl.num_steps, num // per_step)
    print(f"replay: {num} groups = {num // per_step} steps x {per_step} prompts; {steps} are made", flush=True)
    return [str(known.recipe), *settings, *flags, f"--rl.num-steps={steps}"]


def generate_only(argv: Sequence[str]) -> list[str]:
    """Return the command line of `starling run` that `starling rollout --only RECIPE ...` stands for."""
    parser = argparse.ArgumentParser(prog="starling rollout --only", allow_abbrev=False)
    parser.add_argument("--only", action="store_true", required=True)
    parser.add_argument("recipe", type=Path)
    known, flags = parser.parse_known_args(list(argv))
    return [str(known.recipe), "--run.kind=generate", "--sft.num-steps=0", *NOT_EVALUATED, *flags]


def operate(command: str, argv: Sequence[str]) -> int:
    """`starling status`, `why`, `set`, `evaluate`, `stop`."""
    from starling.cli.operate import commands as commands

    return commands.main(command, argv)


def is_answering(argv: Sequence[str]) -> bool:
    """Say whether `starling evaluate` is to evaluate a model, and not the newest version of a run that goes on."""
    words = {word.partition("=")[0] for word in argv}
    return bool(words & {"--model", "--tasks", "--resume"})


def answer(command: str, argv: Sequence[str]) -> int:
    """`starling evaluate --model`, `infer` and `serve`."""
    from starling.cli.evaluate import commands as answering

    return answering.main(command, argv)


def smoke(argv: Sequence[str]) -> int:
    """`starling smoke`."""
    from starling.cli.run.smoke import run_smoke

    return run_smoke(list(argv))


def plan(argv: Sequence[str]) -> int:
    """`starling plan`."""
    from starling.cli.plan import command as command

    return command.main(argv)


def sync_report(argv: Sequence[str]) -> int:
    """`starling sync-report`."""
    from starling.cli.report import weight_sync as command

    return command.main(argv)


def record(argv: Sequence[str]) -> int:
    """`starling record`."""
    from starling.cli.report import replay as command

    return command.record(argv)


def replay(argv: Sequence[str]) -> int:
    """`starling replay`."""
    from starling.cli.report import replay as command

    return command.main(argv)


def keys(argv: Sequence[str]) -> int:
    """`starling keys`."""
    from starling.cli.operate import keys as command

    return command.main(argv)


def export(argv: Sequence[str]) -> int:
    """`starling export`."""
    from starling.cli.model import export as command

    return command.main(argv)


def scratch(argv: Sequence[str]) -> int:
    """`starling scratch`."""
    # transformers writes these files without torch, whose import would take most of the time; it warns of that.
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)
    from starling.cli.model.scratch import make_model_folder
    from starling.cli.recipe.schema import load_recipe

    parser = argparse.ArgumentParser(prog="starling scratch", allow_abbrev=False)
    parser.add_argument("recipe", type=Path, help="the recipe with the section [model.scratch]")
    parser.add_argument("folder", type=Path, help="where to make the model's folder")
    known, flags = parser.parse_known_args(list(argv))
    settings = load_recipe([known.recipe], flags).model.scratch
    if settings is None:
        raise ConfigError(f"{known.recipe} has no section [model.scratch]; add one, or use the folder of model.path")
    make_model_folder(settings, known.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
