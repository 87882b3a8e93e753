"""Settings that may change in a running job, and what they are as of which step.

A change is in force from a step on: the policies get it with that step, all together; rollouts with the next group.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

Value = float | int | bool | str


@dataclass(frozen=True)
class DynamicSetting:
    """One setting: its range, in words and as a test, and who applies it."""

    key: str
    holds: Callable[[float], bool]
    wanted: str
    of_policy: bool = False
    """It travels with each step; others are the controller's own, or travel with each group."""
    is_whole: bool = False


DYNAMIC: dict[str, DynamicSetting] = {
    setting.key: setting
    for setting in (
        DynamicSetting("policy.optimizer.learning_rate", lambda v: v > 0, "greater than 0", of_policy=True),
        DynamicSetting("policy.optimizer.max_grad_norm", lambda v: v >= 0, "0 or more", of_policy=True),
        DynamicSetting("policy.algorithm.kl_coefficient", lambda v: v >= 0, "0 or more", of_policy=True),
        DynamicSetting(
            "policy.algorithm.clip_low", lambda v: 0 < v <= 1, "greater than 0 and at most 1", of_policy=True
        ),
        DynamicSetting("policy.algorithm.clip_high", lambda v: v > 0, "greater than 0", of_policy=True),
        DynamicSetting("sampling.temperature", lambda v: v > 0, "greater than 0"),
        DynamicSetting("sampling.top_p", lambda v: 0 < v <= 1, "greater than 0 and at most 1"),
        DynamicSetting("sampling.top_k", lambda v: v >= 0, "a whole number, 0 or more", is_whole=True),
        DynamicSetting("sampling.max_tokens", lambda v: v >= 1, "a whole number, 1 or more", is_whole=True),
        DynamicSetting("rl.max_staleness", lambda v: v >= 0, "a whole number, 0 or more", is_whole=True),
        DynamicSetting("rl.max_tries", lambda v: v >= 0, "a whole number, 0 or more", is_whole=True),
        DynamicSetting("evaluation.every", lambda v: v >= 0, "a whole number, 0 or more", is_whole=True),
        DynamicSetting("controller.save_every", lambda v: v >= 0, "a whole number, 0 or more", is_whole=True),
    )
}

FIXED = {
    "rl.prompts_per_step": "the journal counts groups by it",
    "rl.group_size": "groups of two sizes would meet in one step",
    "rl.num_steps": "schedules of the learning rate are laid out over it",
    "run.seed": "it decided what was sampled already",
    "model.path": "the replicas have loaded it",
}
"""Why some that users ask for may not change."""


def check(key: str, value: Value) -> float:
    """Return `value` as a number that `key` may have.

    Raises:
        ValueError: one sentence: it may not change, is unknown, or has no such value.
    """
    setting = DYNAMIC.get(key)
    if setting is None:
        if key in FIXED:
            raise ValueError(f"{key} may not change in a running job: {FIXED[key]}; start another run")
        near = difflib.get_close_matches(key, DYNAMIC, 1)
        hint = f"did you mean {near[0]}?" if near else f"these may: {', '.join(DYNAMIC)}"
        raise ValueError(f"{key} may not change in a running job; {hint}")
    if isinstance(value, bool | str):
        raise ValueError(f"{key} = {value!r} is no number; it must be {setting.wanted}")
    number = float(value)
    if not math.isfinite(number) or (setting.is_whole and number != int(number)) or not setting.holds(number):
        raise ValueError(f"{key} = {value} is out of range; it must be {setting.wanted}")
    return number


@dataclass
class SettingChanges:
    """What operators changed, in order."""

    _changes: list[tuple[str, float, int]] = field(default_factory=list)
    _now: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    """Requests that were granted, and from which step on: each counts once, however often it arrives."""

    def add(self, key: str, value: float, step: int, request: str) -> None:
        """Note that from `step` on `key` has `value`."""
        # Of several changes from the same step on, the last one counts.
        if self._changes and self._changes[-1][::2] == (key, step):
            self._changes.pop()
        self._changes.append((key, value, step))
        self._now[key] = value
        self.requests.setdefault(request, step)

    def as_of(self, step: int) -> dict[str, float]:
        """Return everything that was changed for `step` or an earlier one."""
        return {key: value for key, value, first in self._changes if first <= step}

    def of_policy(self, step: int) -> dict[str, float]:
        """Return what the policies must know for `step`."""
        return {key: value for key, value in self.as_of(step).items() if DYNAMIC[key].of_policy}

    def all(self) -> dict[str, float]:
        """Return everything that was changed, as it is now."""
        return dict(self._now)

    def now(self, key: str, otherwise: float) -> float:
        """Return what `key` is now, or `otherwise` when nobody changed it."""
        return self._now.get(key, otherwise)
