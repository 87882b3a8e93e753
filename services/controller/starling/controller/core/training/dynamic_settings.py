"""Settings that may change in a running job, and their values from each step on.

A change takes effect with a step: all policies get it with that step, and rollouts with their next group.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field

from starling.common.ranges import (
    MAX_COEFFICIENT,
    MAX_COUNT,
    MAX_LEARNING_RATE,
    MAX_STALENESS,
    MAX_STEPS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
    MAX_WHOLE,
    MIN_TEMPERATURE,
)

Value = float | int | bool | str


@dataclass(frozen=True)
class DynamicSetting:
    """One setting: its range, which is that of the recipe, and where it is applied."""

    key: str
    low: float
    high: float
    of_policy: bool = False
    """Sent to the policies with each step. Others are of the controller, or sent to the rollouts with each group."""
    is_whole: bool = False
    above_low: bool = False
    """The value must be greater than `low`."""

    def takes(self, number: float) -> bool:
        """Return whether the setting may be `number`, which may be infinite or NaN."""
        if self.is_whole and not number.is_integer():
            return False
        return self.low <= number <= self.high and not (self.above_low and number == self.low)

    @property
    def valid_range(self) -> str:
        """The range in words."""
        if self.above_low:
            return f"greater than {self.low:g} and at most {self.high:.10g}"
        return f"{'a whole number ' if self.is_whole else ''}from {self.low:g} to {self.high:.10g}"

    @property
    def short_range(self) -> str:
        """The range for a narrow table."""
        return f"{'whole, ' if self.is_whole else ''}{'above ' if self.above_low else ''}{self.low:g} to {self.high:g}"


DYNAMIC: dict[str, DynamicSetting] = {
    setting.key: setting
    for setting in (
        DynamicSetting("policy.optimizer.learning_rate", 0.0, MAX_LEARNING_RATE, of_policy=True, above_low=True),
        DynamicSetting("policy.optimizer.max_grad_norm", 0.0, MAX_COEFFICIENT, of_policy=True),
        DynamicSetting("policy.algorithm.kl_coefficient", 0.0, MAX_COEFFICIENT, of_policy=True),
        DynamicSetting("policy.algorithm.clip_low", 0.0, 1.0, of_policy=True, above_low=True),
        DynamicSetting("policy.algorithm.clip_high", 0.0, MAX_COEFFICIENT, of_policy=True, above_low=True),
        DynamicSetting("policy.diffusion.nft_beta", 0.0, MAX_COEFFICIENT, of_policy=True, above_low=True),
        DynamicSetting("policy.diffusion.advantage_bound", 0.0, MAX_COEFFICIENT, of_policy=True, above_low=True),
        DynamicSetting("sampling.temperature", MIN_TEMPERATURE, MAX_TEMPERATURE),
        DynamicSetting("sampling.top_p", 0.0, 1.0, above_low=True),
        DynamicSetting("sampling.top_k", 0, MAX_WHOLE, is_whole=True),
        DynamicSetting("sampling.min_p", 0.0, 1.0),
        DynamicSetting("sampling.max_tokens", 1, MAX_TOKENS, is_whole=True),
        DynamicSetting("rl.max_staleness", 0, MAX_STALENESS, is_whole=True),
        DynamicSetting("rl.max_tries", 0, MAX_COUNT, is_whole=True),
        DynamicSetting("evaluation.every", 0, MAX_STEPS, is_whole=True),
        DynamicSetting("controller.save_every", 0, MAX_STEPS, is_whole=True),
    )
}

FIXED = {
    "rl.prompts_per_step": "the journal counts groups by it",
    "rl.group_size": "groups of two sizes would meet in one step",
    "rl.num_steps": "schedules of the learning rate are laid out over it",
    "sampling.logprobs": "all log-probabilities of a run have one meaning",
    "sampling.routing": "the groups of a step would train with experts of two origins",
    "run.seed": "it decided what was sampled already",
    "model.path": "the replicas have loaded it",
}
"""Settings that users ask to change, and why they may not."""


def check(key: str, value: Value) -> float:
    """Return `value` as a number that `key` may have.

    Raises:
        ValueError: `key` is unknown or may not change, or `value` is out of range; one sentence.
    """
    setting = DYNAMIC.get(key)
    if setting is None:
        if key in FIXED:
            raise ValueError(f"{key} may not change during a run: {FIXED[key]}; start another run")
        near = difflib.get_close_matches(key, DYNAMIC, 1)
        hint = f"did you mean {near[0]}?" if near else f"these may: {', '.join(DYNAMIC)}"
        raise ValueError(f"there is no setting {key} that may change during a run; {hint}")
    if isinstance(value, bool | str):
        raise ValueError(f"{key} = {value!r} is not a number; it must be {setting.valid_range}")
    number = float(value)
    if not setting.takes(number):
        raise ValueError(f"{key} = {value} is out of range; it must be {setting.valid_range}")
    return number


@dataclass
class SettingChanges:
    """The changes of operators, in order."""

    _changes: list[tuple[str, float, int]] = field(default_factory=list)
    _now: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    """Granted requests, and the step of each: a request that arrives again changes nothing."""

    def add(self, key: str, value: float, step: int, request: str) -> None:
        """Set `key` to `value` from `step` on."""
        # Of several changes from the same step on, the last one counts.
        if self._changes and self._changes[-1][::2] == (key, step):
            self._changes.pop()
        self._changes.append((key, value, step))
        self._now[key] = value
        self.requests.setdefault(request, step)

    def in_order(self) -> tuple[tuple[str, float, int], ...]:
        """Return all changes, in order: key, value, and the first step."""
        return tuple(self._changes)

    def as_of(self, step: int) -> dict[str, float]:
        """Return all changed settings with their values in `step`."""
        return {key: value for key, value, first in self._changes if first <= step}

    def for_policies(self, step: int) -> dict[str, float]:
        """Return the changed settings of the policies with their values in `step`."""
        return {key: value for key, value in self.as_of(step).items() if DYNAMIC[key].of_policy}

    def all(self) -> dict[str, float]:
        """Return all changed settings with their present values."""
        return dict(self._now)

    def now(self, key: str, default: float) -> float:
        """Return the present value of `key`, or `default` when it was not changed."""
        return self._now.get(key, default)
