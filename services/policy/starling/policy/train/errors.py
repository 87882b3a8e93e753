"""Errors of a training step. Importable without torch."""

from __future__ import annotations

from starling.common.errors import ConfigError


class StepBrokenError(ConfigError):
    """A step failed after some of its optimizer updates: the weights are not a version."""
