"""The entry point of the `starling` command."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from starling.cli.services import SERVICES, run_module
from starling.common.errors import StarlingError
from starling.common.observe.terminal import printable


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code; an error is one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    previous = signal.signal(signal.SIGINT, leave)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a path may be no text
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except StarlingError as error:
        print(f"starling: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except BrokenPipeError:  # what reads the output, as `head`, has read enough
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        what = "the output" if error.filename is None else printable(os.fsdecode(error.filename))
        print(
            f"starling: {what} cannot be used: {error.strerror}; check that it exists, its permissions and its disk",
            file=sys.stderr,
        )
        _discard_output()
        return 1
    finally:
        signal.signal(signal.SIGINT, previous)


def _discard_output() -> None:
    """Send what stdout still holds to nowhere, so that the interpreter does not fail at it once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


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
    from starling.cli.terminal import guarded_output

    with guarded_output():
        return call(make_app(), [command, *rest])


if __name__ == "__main__":
    sys.exit(main())
