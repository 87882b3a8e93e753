"""Misbehaving scorers for the tests of the pool, and a few good ones."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from decimal import Decimal
from typing import Any

Metadata = dict[str, Any]


class FailingStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def act(completion: str, reference: str, prompt_text: str, metadata: Metadata) -> object:
    """Misbehave as the completion says; return 1 for any other text."""
    what, _, detail = completion.partition(" ")
    match what:
        case "raise":
            raise ValueError(detail)
        case "raise-unsayable":
            raise FailingStr
        case "raise-surrogate":
            raise ValueError("\ud800")
        case "raise-long":
            raise ValueError("x" * 100_000)
        case "sys-exit":
            sys.exit(detail)
        case "value":
            return {
                "nan": float("nan"),
                "inf": float("-inf"),
                "none": None,
                "text": "1.0",
                "pair": (1.0, {}),
                "decimal": Decimal(1),
                "huge": 10**400,
                "true": True,
                "int": 3,
            }[detail]
        case "hang":
            while True:
                time.sleep(1000)
        case "hang-in-c":
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            ctypes.PyDLL(None).sleep(1000)  # while holding the GIL
        case "hang-with-child":
            sleep = [sys.executable, "-c", "import time; time.sleep(1000)", detail]
            subprocess.Popen(sleep, start_new_session=True)
            time.sleep(1000)
        case "exit":
            os._exit(int(detail))
        case "signal":
            signal.raise_signal(int(detail))
        case "segfault":
            ctypes.string_at(0)
        case "print":
            print("x" * 100_000)
            os.write(1, b"\xff" * 1000)
            subprocess.run(["echo", "noise"], check=True)
        case "fork":
            if os.fork() == 0:
                return 7.0  # the forked child continues as if it were the worker
        case "close-all":
            os.closerange(3, 1000)
        case "write-into-line":
            _line().sendall(b"\xff\xff\xff\xff garbage")
        case "write-deep-into-line":
            body = b"\x96\xa6report\x00\xcb" + bytes(8) + b"\xa0\xcb" + bytes(8) + b"\x91" * 200_000 + b"\xc0"
            _line().sendall(len(body).to_bytes(4, "little") + body)
            time.sleep(1000)
        case "forge":
            _forge(detail)
            time.sleep(1000)
        case "flood":
            _flood()
        case "fail-start":
            _fail_start()
    return 1.0


def _flood() -> None:
    """Report calls that the worker was never sent, faster than anyone reads."""
    import socket

    from starling.reward.score.scorers.batch import BatchScores
    from starling.reward.score.workers.protocol import CallReport, frame

    line, reports = _line(), frame(CallReport(1 << 20, BatchScores(((1.0,),), ("",)), 0.0)) * 100_000
    line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    while True:
        line.sendall(reports)


def _fail_start() -> None:
    """Report, long after the worker's start, that it has failed."""
    from starling.reward.score.workers.protocol import WorkerStartFailed, frame

    _line().sendall(frame(WorkerStartFailed("no scorer can be resolved")))
    time.sleep(1000)


def _forge(what: str) -> None:
    """Report the worker's first call in its name."""
    from starling.reward.score.scorers.batch import BatchScores
    from starling.reward.score.workers.protocol import CallReport, frame

    now, nan = time.monotonic(), float("nan")
    reports = {
        "time": CallReport(0, BatchScores(((1.0,),), ("",)), nan),
        "value": CallReport(0, BatchScores(((nan,),), ("",)), now),
        "problem": CallReport(0, BatchScores(((None,),), ("x" * 500_000,)), now),
        "length": CallReport(0, BatchScores(((None,),), ("x" * 2_000_000,)), now),
    }
    _line().sendall(frame(reports[what]))


def _line() -> Any:
    """Return the worker's socket to the service."""
    import socket

    return socket.socket(fileno=os.dup(int(sys.argv[1])))


def length(completion: str, reference: str, prompt_text: str, metadata: Metadata) -> int:
    return len(completion)


def modules(completion: str, reference: str, prompt_text: str, metadata: Metadata) -> bool:
    """Whether this process has imported the module that the completion names."""
    return completion in sys.modules


def everything(completion: str, reference: str, prompt_text: str, metadata: Metadata, *, bonus: float = 0.0) -> float:
    assert (completion, reference, prompt_text, metadata["deep"]) == ("c", "r", "p", {"list": [1, 2.5, None]})
    return 1.0 + bonus


def all_arguments(
    completion: str,
    reference: str,
    prompt_text: str,
    metadata: Metadata,
    num_tokens: int,
    *,
    status: str,
    unit: int = 1,
) -> float:
    """Take every argument of a scorer, positional and keyword-only."""
    return (-1 if status == "truncated" else 1) * num_tokens / unit


def too_few(completion: str, reference: str) -> float:
    return 1.0


async def coroutine(completion: str, reference: str, prompt_text: str, metadata: Metadata) -> float:
    return 1.0


NOT_CALLABLE = 3
