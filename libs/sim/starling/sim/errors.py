"""What a simulated run may end with when a promise is broken."""

from __future__ import annotations


class Violation(AssertionError):
    """The run broke a promise."""


def demand(holds: bool, problem: str) -> None:
    """Complain about `problem` unless the promise `holds`."""
    if not holds:
        raise Violation(problem)
