"""Learning rate and weight decay of each parameter: the schedule over steps, and factors by name pattern."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.optimizer import OptimizerSettings


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """Return the learning rate of step `step` of `total_steps`, counted from 1.

    Warm-up step s of w has s / w of the peak rate. A decay starts at the peak and would reach `final_share` of it one
    step after the last, so with a share of 0 no step has a rate of 0. ``linear`` and ``cosine`` (SGDR,
    arXiv:1608.03983, equation 5) decay from the warm-up on; ``wsd`` (arXiv:2404.06395, its ``sqrt`` shape
    arXiv:2405.18392) over the last `decay_steps`, or over all steps after the warm-up if these are fewer.
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
    """Return the share of the decay that remains, from 1 to 0 as `progress` goes from 0 to 1."""
    if settings.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if settings.schedule == "wsd" and settings.decay_shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    return 1.0 - progress


def rate_factors(
    trained: Mapping[str, Tensor],
    settings: OptimizerSettings,
    key: str = "optimizer",
    *,
    names: Iterable[str] | None = None,
) -> dict[str, float]:
    """Return the factor on the learning rate of each parameter.

    `key` names the settings in errors, `names` are those of all parameters where `trained` has not all of them. Raises
    ConfigError as `first_matches` does.
    """
    patterns = first_matches([*settings.rates], _joined(trained, names), f"{key}.rates")
    return {name: settings.rates[patterns[name]] if name in patterns else 1.0 for name in trained}


def weight_decays(
    trained: Mapping[str, Tensor],
    settings: OptimizerSettings,
    key: str = "optimizer",
    *,
    names: Iterable[str] | None = None,
) -> dict[str, float]:
    """Return the weight decay of each parameter: 0 for vectors, biases (stacked ones too), and `no_decay` patterns.

    For `key` and `names` see `rate_factors`. Raises ConfigError as `first_matches` does.
    """
    known = _joined(trained, names)
    spared = {name for pattern in settings.no_decay for name in first_matches([pattern], known, f"{key}.no_decay")}
    return {
        name: 0.0 if tensor.dim() < 2 or name.endswith("bias") or name in spared else settings.weight_decay
        for name, tensor in trained.items()
    }


def _joined(trained: Mapping[str, Tensor], names: Iterable[str] | None) -> list[str]:
    return list(trained) if names is None else list(dict.fromkeys([*names, *trained]))


def first_matches(patterns: Sequence[str], names: Iterable[str], setting: str) -> dict[str, str]:
    """Return the first matching pattern of each name; names without a match are left out.

    Args:
        patterns: regular expressions, searched for in the names.
        names: of parameters.
        setting: that holds the patterns, for errors.

    Raises:
        ConfigError: a pattern matches nothing; lists the names most like it.
    """
    names = list(names)
    found: dict[str, str] = {}
    for name in names:
        pattern = next((pattern for pattern in patterns if re.search(pattern, name)), None)
        if pattern is not None:
            found[name] = pattern
    used = set(found.values())
    for pattern in patterns:
        if pattern in used:
            continue
        if any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"{setting} has {pattern!r} after patterns that match everything it matches: put it before them"
            )
        similar = ", ".join(_similar(pattern, names))
        raise ConfigError(
            f"{setting} has {pattern!r}, which matches no trainable parameter; "
            + (f"similar names: {similar}" if similar else f"the first of {len(names)} is {names[0]}")
        )
    return found


def _similar(pattern: str, names: Sequence[str], num: int = 3) -> list[str]:
    """Return the names that have a part like `pattern`, one for all layers, best first."""
    parts: dict[str, str] = {}
    for name in {re.sub(r"\d+", "0", name): name for name in reversed(names)}.values():
        words = name.split(".")
        spans = ((first, last) for first in range(len(words)) for last in range(first + 1, len(words) + 1))
        for first, last in spans:
            parts.setdefault(".".join(words[first:last]), name)
    like = difflib.get_close_matches(pattern.replace("\\", ""), list(parts), n=10 * num)
    return list(dict.fromkeys(parts[part] for part in like))[:num]
