"""Child processes of tests, forked from a server that has imported torch, transformers and the services already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

DEADLINE_S = 120.0
"""Longer than anything here takes on a busy machine."""


@dataclass(frozen=True)
class Child:
    """A child process, and this end of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def received(self) -> Iterator[Any]:
        """Yield what the child sends, until it closes its end or has died."""
        while self.pipe.poll(DEADLINE_S):
            try:
                yield self.pipe.recv()
            except EOFError:
                return
        raise AssertionError("the child process neither reports anything nor ends")

    def exit_code(self) -> int | None:
        """Wait for the end of the process, and return its exit code."""
        self.process.join(DEADLINE_S)
        return self.process.exitcode


@contextmanager
def forked(target: Callable[..., object], *arguments: object) -> Iterator[Child]:
    """Run `target(*arguments, pipe)` in a child process, which is killed at the end if it has not ended."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(process, pipe)
    finally:
        process.kill()
        process.join(DEADLINE_S)
        pipe.close()
