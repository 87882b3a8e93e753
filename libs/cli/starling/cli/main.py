"""The `starling` command."""

from __future__ import annotations

import argparse
import runpy
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from starling.common.errors import StarlingError

SERVICES = ("controller", "policy", "rollout", "reward")
USAGE = """usage: starling COMMAND ...

  run RECIPE.toml [--config MORE.toml ...] [--section.key value ...] [--dry-run]
                        train: start and supervise every process of a run on this machine
  smoke                 prove in under a minute that everything works here
  controller | policy | rollout | reward --config FILE --controller tcp://HOST:PORT
                        run one service by itself; --help shows all its settings
  keys FOLDER NAME ...  make the CURVE keys of a run: for the controller and for each name
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; an error of ours is one sentence on stderr and a non-zero exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command in SERVICES:
        return run_service_module(command, rest)
    commands = {"run": run, "smoke": smoke, "keys": keys}
    if command not in commands:
        print(f"starling: unknown command {command!r}; known: {', '.join([*commands, *SERVICES])}", file=sys.stderr)
        return 2
    try:
        return commands[command](rest)
    except StarlingError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("starling: interrupted before anything was started", file=sys.stderr)
        return 130


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
        prog="starling run", epilog=None, formatter_class=argparse.RawDescriptionHelpFormatter, add_help=False
    )
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    known, flags = parser.parse_known_args(list(argv))
    if known.help or known.recipe is None:
        print(USAGE + "\n" + help_of(Recipe))
        return 0 if known.help else 2
    recipe = load_recipe([known.recipe, *known.config], flags)
    if known.dry_run:
        from starling.cli.arithmetic import arithmetic

        print(to_toml(recipe))
        print("\n".join(f"# {line}" for line in arithmetic(recipe)))
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
    report(attempt, time.monotonic() - begin, Console())
    return 0


def smoke(argv: Sequence[str]) -> int:
    """`starling smoke`."""
    from starling.cli.smoke import run_smoke

    return run_smoke(list(argv))


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


if __name__ == "__main__":
    sys.exit(main())
