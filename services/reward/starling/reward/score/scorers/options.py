"""Checks of the options of built-in scorers, with one sentence for each kind of mistake."""

from __future__ import annotations

import math
from collections.abc import Collection

from starling.common.errors import ConfigError


def check_choices(scorer: str, **options: tuple[object, Collection[str]]) -> None:
    """Raise ConfigError unless each option, given with the known values, is one of them."""
    for name, (value, known) in options.items():
        if value not in known:
            raise ConfigError(f"Scorer {scorer!r}: {name} must be one of {', '.join(known)}, not {value!r}.")


def check_positive(scorer: str, **options: object) -> None:
    """Raise ConfigError unless each option is a finite number above 0."""
    for name, value in options.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ConfigError(f"Scorer {scorer!r}: {name} must be a number above 0, not {value!r}.")
