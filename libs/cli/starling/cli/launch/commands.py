"""Commands of an engine's command line, such as squeue, that run beside the supervisor: nothing waits for their end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from starling.cli.launch.interface import LaunchError

START_S = 60.0
"""Deadline of a command that places a replica; a busy engine takes some seconds."""
LATE_S = 60.0
"""Deadline of a command that asks or stops; it is killed then, and asked again."""
MAX_OUTPUT_BYTES = 16 << 20


@dataclass(frozen=True)
class Done:
    """The end of a command."""

    code: int
    output: str
    errors: str


class RunningCommand:
    """A command whose output is looked at when it has ended."""

    def __init__(self, words: Sequence[str], *, output: IO[bytes], errors: IO[bytes]) -> None:
        """Start it. `output` and `errors` are files that take what it prints. Raises OSError."""
        self._output, self._errors = output, errors
        self._late_at = time.monotonic() + LATE_S
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )

    def poll(self) -> Done | None:
        """Return its end, or None while it runs. One that is late is killed."""
        code = self._process.poll()
        if code is None:
            if time.monotonic() > self._late_at:
                self._process.kill()
            return None
        done = Done(code, _read(self._output), _read(self._errors))
        self._output.close()
        self._errors.close()
        return done

    def kill(self) -> None:
        """End it now."""
        self._process.kill()
        self._process.wait(10)
        self._output.close()
        self._errors.close()


def run(words: Sequence[str], *, given: str = "", timeout_s: float = START_S) -> Done:
    """Run a command to its end, with `given` as its input.

    Raises:
        LaunchError: there is no such command, or it takes longer than `timeout_s`.
    """
    try:
        done = subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{words[0]} did not answer within {timeout_s:g} s; check that its servers run") from None
    except OSError as error:
        raise LaunchError(f"{words[0]} cannot be run here ({error.strerror}); install it, or set PATH") from None
    return Done(done.returncode, done.stdout, done.stderr)


def last_line(text: str) -> str:
    """Return the last line of what a command printed, for a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT_BYTES).decode("utf-8", "replace")
