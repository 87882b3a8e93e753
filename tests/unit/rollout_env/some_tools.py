"""User tools, some of which misbehave; imported in sandboxed processes only."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from typing import Any

CALLS: list[int] = []


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


async def later(text: str) -> str:
    """Return the text after a moment."""
    await asyncio.sleep(0)
    return text[::-1]


def table() -> dict[str, Any]:
    return {"rows": [1, 2], "é": None}


def fails(what: str = "x") -> None:
    raise LookupError(f"there is no {what}")


def leaves(code: int = 3) -> None:
    sys.exit(code)


def crashes() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_returns(marker: str) -> None:
    """Ignore every signal that can be, with a child that does so too, and has `marker` in its command line."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)", marker])
    time.sleep(3600)


def takes_all_processors() -> None:
    """Never end, in processes each of which has a share of its own."""
    for _ in range(16):
        if os.fork() == 0:
            os.setsid()
            break
    while True:
        pass


def computes(seconds: float) -> str:
    """Return after so much processor time, a half of it in child processes that end soon."""
    for _ in range(10):
        child = os.fork()
        if not child:
            while time.process_time() < seconds / 20:
                pass
            os._exit(0)
        os.waitpid(child, 0)
    end = time.process_time() + seconds / 2
    while time.process_time() < end:
        pass
    return "done"


class Computes:
    """The same, in steps of one session."""

    def step(self, seconds: float) -> str:
        return computes(seconds)

    def sleep(self) -> None:
        time.sleep(3600)


def count() -> int:
    """Count the calls in this process."""
    CALLS.append(1)
    return len(CALLS)


def environment() -> dict[str, str]:
    return dict(os.environ)


def devours(mb: int) -> int:
    return len(bytearray(mb << 20))


def limits() -> list[int]:
    return [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CORE)]


def long() -> str:
    return "x" * 100_000


def strange() -> object:
    return object()


NOT_A_FUNCTION = 3


def packed(*values: int) -> int:
    return sum(values)


class Guess:
    """A number to guess."""

    def __init__(self, most: int = 9, slow: float = 0.0) -> None:
        self.most, self.slow, self.wanted, self.num = most, slow, 0, 0

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.wanted = seed % self.most
        return f"a number below {self.most}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.slow)
        self.num += 1
        right = action.strip() == str(self.wanted)
        return (
            ("yes" if right else "no"),
            (1.0 if right else -0.25),
            right,
            self.num > 5,
            {"guesses": self.num, "s": "t"},
        )


class Broken(Guess):
    """Returns invalid results."""

    def step(self, action: str) -> Any:
        return action


class Measuring(Guess):
    """Its steps report many numbers."""

    def step(self, action: str) -> Any:
        text, reward, terminated, truncated, _ = super().step(action)
        return text, reward, terminated, truncated, {f"m{n}": 1.0 for n in range(1001)}


class Silent(Guess):
    """Its reset returns no text."""

    def reset(self, *, seed: int, options: dict[str, Any]) -> Any:
        return 3
