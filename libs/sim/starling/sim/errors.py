"""Violations: the errors that a simulated run ends with when an invariant or a guarantee does not hold."""

from __future__ import annotations


class Violation(AssertionError):
    """An invariant of the controller, or a guarantee of the run, was violated."""


def require(condition: bool, problem: str) -> None:
    """Raise Violation with `problem` unless `condition` holds."""
    if not condition:
        raise Violation(problem)
