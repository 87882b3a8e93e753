"""Start of a worker in a Python environment of its own, which need not have Starling.

    python -P -S -u bootstrap.py FD FOLDERS CONFINEMENT

FOLDERS, separated by colons, have Starling's packages, which this version of Python imports from there and nothing
else; CONFINEMENT is a JSON object with the arguments of `confine`. With `-S` nothing that the environment installs runs
before the worker is confined. Of the environment the worker then needs only msgspec.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import types

NEEDED = (0, 21)
"""Oldest version of msgspec."""
_PROBLEM_CHARS = 2000


def main(argv: list[str]) -> None:
    """Serve the service over the socket `argv[1]` until it closes."""
    fd, folders, confinement = int(argv[1]), argv[2], json.loads(argv[3])
    package = types.ModuleType("starling")  # a namespace package; an installed one is not looked for
    package.__path__ = folders.split(os.pathsep)
    sys.modules["starling"] = package
    from starling.reward.score.workers.confine import confine

    confine(**confinement)
    import site

    site.main()
    if problem := _problem():
        _refuse(fd, problem)
        return
    from starling.reward.score.workers.worker import serve

    serve(fd, is_confined=True)


def _problem() -> str:
    """Return why a worker cannot run in this environment, in one sentence; empty if it can."""
    lacks = f"{sys.executable} "
    try:
        import msgspec
    except Exception as error:  # noqa: BLE001 - a damaged package may raise anything
        lacks += f"cannot import msgspec ({type(error).__name__}: {error})"
    else:
        if version_of(msgspec.__version__) >= NEEDED:
            return ""
        lacks += f"has msgspec {msgspec.__version__}"
    wanted = ".".join(map(str, NEEDED))
    return (
        f"{lacks}, and workers need {wanted} or later: install it there, as with "
        f"`{sys.executable} -m pip install 'msgspec>={wanted}'`."
    )


def version_of(text: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) if it has none."""
    numbers = text.split(".")[:2]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 and all(map(str.isdecimal, numbers)) else (0, 0)


def _refuse(fd: int, problem: str) -> None:
    """Send the message `WorkerStartFailed`, without msgspec."""
    tag, text = b"start_failed", problem[:_PROBLEM_CHARS].encode("utf-8", "replace")
    body = b"\x92" + bytes([0xA0 | len(tag)]) + tag + b"\xda" + struct.pack(">H", len(text)) + text
    with socket.socket(fileno=fd) as sock:
        sock.sendall(struct.pack("<I", len(body)) + body)


if __name__ == "__main__":
    main(sys.argv)
