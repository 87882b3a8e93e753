"""A step that broke off between two of its updates."""

from __future__ import annotations

from starling.common.errors import ConfigError


class StepBrokenError(ConfigError):
    """A step failed after some of its updates were made: the weights are no version any more."""
