"""The entry point of the `starling` command."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from starling.cli.services import SERVICES, run_module
from starling.common.errors import StarlingError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; an error is one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    previous = signal.signal(signal.SIGINT, leave)
    try:
        return _dispatch(arguments)
    except StarlingError as error:
        print(f"starling: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        signal.signal(signal.SIGINT, previous)


def leave(number: int, frame: FrameType | None) -> None:
    """End at once on Ctrl-C while there is nothing to stop gracefully.

    An exception would not do: it would be raised in whatever import is running, which may swallow it.
    """
    os.write(sys.stderr.fileno(), b"starling: interrupted before anything was started\n")
    os._exit(130)


def _dispatch(arguments: list[str]) -> int:
    command, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    flags = {word.partition("=")[0] for word in rest}
    if command == "rollout" and "--only" in flags:
        command = "rollout-only"
    elif command == "policy" and "--replay" in flags:
        command = "policy-replay"
    elif command in SERVICES:
        return run_module(command, rest)
    from starling.cli.app import make_app
    from starling.cli.command_line import call

    return call(make_app(), [command, *rest])


if __name__ == "__main__":
    sys.exit(main())
