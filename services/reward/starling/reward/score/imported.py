"""The user's own scorers: `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import inspect

from starling.common.errors import ConfigError
from starling.common.imported import load
from starling.reward.score.scorers import Scorer


def import_scorer(name: str) -> Scorer:
    """Import the function that `name` names. ConfigError when it cannot be had, or is none that can score."""
    found = load(name, "Scorer")
    if not callable(found):
        raise ConfigError(f"Scorer {name!r} is a {type(found).__name__}, not a function.")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigError(f"Scorer {name!r} must be a plain function that returns a number, not async or a generator.")
    scorer: Scorer = found
    return scorer
