"""The learning rate of each step."""

from __future__ import annotations

import math

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
