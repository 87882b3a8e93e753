"""The `starling` command."""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from starling.common.errors import ConfigError, StarlingError

SERVICES = ("controller", "policy", "rollout", "reward")
USAGE = """usage: starling COMMAND ...

  run RECIPE.toml [--config MORE.toml ...] [--section.key value ...] [--dry-run]
                        train: start and supervise every process of a run on this machine
  smoke                 prove in under a minute that everything works here
  controller | policy | rollout | reward --config FILE --controller tcp://HOST:PORT
                        run one service by itself; --help shows all its settings
  plan SOURCE DESTINATION [--model NAME] [--topology FILE.toml] [--picture FILE.svg] [--json]
                        what a weight synchronisation moves, how long it takes and how much memory, without a GPU
  sync-report RUN_FOLDER [--last N] [--json]
                        where the time of weight synchronisation went, and what its bottleneck is
  keys FOLDER NAME ...  make the CURVE keys of a run: for the controller and for each name
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
    commands = {"run": run, "smoke": smoke, "plan": plan, "sync-report": sync_report, "keys": keys, "scratch": scratch}
    if command not in (*commands, *SERVICES):
        print(f"starling: unknown command {command!r}; known: {', '.join([*commands, *SERVICES])}", file=sys.stderr)
        return 2
    previous = signal.signal(signal.SIGINT, leave)
    try:
        return run_service_module(command, rest) if command in SERVICES else commands[command](rest)
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


def run_service_module(role: str, argv: list[str]) -> int:
    """Run a service in this process, without importing any other."""
    sys.argv = [f"starling {role}", *argv]
    try:
        runpy.run_module(f"starling.{role}.shell.main", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0


def run(argv: Sequence[str]) -> int:
    """`starling run`."""
    from starling.cli.recipe import Recipe, load_recipe, to_toml
    from starling.common.service import help_of

    parser = argparse.ArgumentParser(
        prog="starling run", formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False, allow_abbrev=False
    )
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    known, flags = parser.parse_known_args(list(argv))
    if known.help:
        print(USAGE + "\n" + help_of(Recipe))
        return 0
    if known.recipe is None or argv[0].startswith("-"):
        raise ConfigError(
            "the recipe comes first: write `starling run RECIPE.toml`, then flags; --help shows all settings"
        )
    recipe = load_recipe([known.recipe, *known.config], flags)
    if known.dry_run:
        from starling.cli.arithmetic import arithmetic

        lines = arithmetic(recipe)
        print(to_toml(recipe), *(f"# {line}" for line in lines), sep="\n")
        return 0
    from rich.console import Console

    from starling.cli.report import report
    from starling.cli.supervisor import Attempt, InterruptedRunError, Supervisor

    begin = time.monotonic()
    attempt = Attempt.create(recipe)
    try:
        Supervisor(recipe, attempt).run()
    except InterruptedRunError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 130
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        report(attempt, time.monotonic() - begin, Console())
    except KeyboardInterrupt:
        print(f"starling: the run is over, without a report; its files are in {attempt.folder}", file=sys.stderr)
    return 0


def smoke(argv: Sequence[str]) -> int:
    """`starling smoke`."""
    from starling.cli.smoke import run_smoke

    return run_smoke(list(argv))


def plan(argv: Sequence[str]) -> int:
    """`starling plan`."""
    from starling.cli import plan as command

    return command.main(argv)


def sync_report(argv: Sequence[str]) -> int:
    """`starling sync-report`."""
    from starling.cli import sync_report as command

    return command.main(argv)


def keys(argv: Sequence[str]) -> int:
    """`starling keys`."""
    from starling.common.net.curve import make_keys

    parser = argparse.ArgumentParser(prog="starling keys")
    parser.add_argument("folder", type=Path, help="where to write <name>.json and allowed.json")
    parser.add_argument("names", nargs="+", help="replicas, for example policy-0 rollout-0 reward-0")
    known = parser.parse_args(list(argv))
    make_keys(known.folder, known.names)
    print(f"wrote keys for the controller and {len(known.names)} replicas to {known.folder}")
    return 0


def scratch(argv: Sequence[str]) -> int:
    """`starling scratch`."""
    # transformers writes these files without torch, whose import would take most of the time; it warns of that.
    sys.modules["torch"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)
    from starling.cli.recipe import load_recipe
    from starling.cli.scratch import make_model_folder

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
