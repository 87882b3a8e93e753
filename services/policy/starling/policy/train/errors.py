"""Errors of a training step. Importable without torch."""

from __future__ import annotations

from collections.abc import Sequence

from starling.common.errors import ConfigError, StarlingError, WireError


class StepBrokenError(ConfigError):
    """A step failed after some of its optimizer updates: the weights are not a version."""


class PeersLostError(StarlingError):
    """A policy cannot make a step with the others: they have left, or do not answer. Its weights are as before."""


class RejectedGroupsError(WireError):
    """Some groups of a step cannot be trained, whatever else is in the step."""

    def __init__(self, text: str, prompts: Sequence[str]) -> None:
        super().__init__(text)
        self.prompts = tuple(prompts)
        """Prompts of these groups, by id."""
