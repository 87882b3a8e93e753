"""The learning rate of each step."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` of `total_steps`, counted from 1.

    Warm-up step s of w has s / w of the highest rate. What falls then starts at the highest rate and would reach
    `final_share` of it one step after the last, so that with a share of 0 no step is in vain. ``linear`` and ``cosine``
    (SGDR, arXiv:1608.03983, equation 5) fall from the warm-up on; ``wsd`` (arXiv:2404.06395, its ``sqrt`` shape
    arXiv:2405.18392) over the last `decay_steps`, or over what the warm-up leaves where that is less.
    """
    peak, share = settings.learning_rate, settings.final_share
    if step <= settings.warmup_steps:
        return peak * step / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    begin = settings.warmup_steps
    if settings.schedule == "wsd":
        begin = max(begin, total_steps - settings.decay_steps)
    left = total_steps - begin
    progress = min(max((step - 1 - begin) / left, 0.0), 1.0) if left > 0 else 1.0
    return peak * (share + (1.0 - share) * _height(settings, progress))


def _height(settings: OptimizerSettings, progress: float) -> float:
    """Return what is left of the fall, from 1 to 0 as `progress` goes from 0 to 1."""
    if settings.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if settings.schedule == "wsd" and settings.decay_shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    return 1.0 - progress


# JOINED from starling.policy.train.patterns: Regular expressions that choose parameters by name.


def first_matches(patterns: Sequence[str], names: Iterable[str], setting: str) -> dict[str, str]:
    """Return, for each of `names` in which one of `patterns` is found, the first such.

    Args:
        patterns: regular expressions.
        names: of parameters.
        setting: whose patterns these are, for the error.

    Raises:
        ConfigError: a pattern chooses nothing, which names it and the names most like it.
    """
    names = list(names)
    found: dict[str, str] = {}
    for name in names:
        pattern = next((pattern for pattern in patterns if re.search(pattern, name)), None)
        if pattern is not None:
            found[name] = pattern
    chosen = set(found.values())
    for pattern in patterns:
        if pattern in chosen:
            continue
        if any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"{setting} has {pattern!r} after patterns that match all that it matches: put it before them"
            )
        near = ", ".join(_near(pattern, names))
        raise ConfigError(
            f"{setting} has {pattern!r}, which matches no trainable parameter; "
            + (f"names like it: {near}" if near else f"they are {names[0]} and so on")
        )
    return found


def _near(pattern: str, names: Sequence[str], num: int = 3) -> list[str]:
    """Return the names that have a part like `pattern`, one for all layers, best first."""
    parts: dict[str, str] = {}
    for name in {re.sub(r"\d+", "0", name): name for name in reversed(names)}.values():
        words = name.split(".")
        spans = ((first, last) for first in range(len(words)) for last in range(first + 1, len(words) + 1))
        for first, last in spans:
            parts.setdefault(".".join(words[first:last]), name)
    like = difflib.get_close_matches(pattern.replace("\\", ""), list(parts), n=10 * num)
    return list(dict.fromkeys(parts[part] for part in like))[:num]
