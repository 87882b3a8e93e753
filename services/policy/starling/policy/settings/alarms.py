"""When a step's numbers are a cause for alarm."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from starling.common.settings import SettingsSection
from starling.policy.core.alarms import AlarmRule

AlarmName = Literal[
    "not_finite", "mismatch", "weights_still", "zero_advantage", "entropy", "effective_sample", "clip", "staleness"
]
"""What each is about is in `docs/reference/metrics.md`."""

_SAYS: Final[dict[AlarmName, str]] = {
    "not_finite": "the loss or the gradient was not finite, so the step left the weights as they were; "
    "lower the learning rate or max_grad_norm, and look for rewards or log-probabilities that are out of range",
    "mismatch": "rollout and trainer disagree about tokens of the same weights, so importance ratios are off; "
    "compare their dtypes, kernels, temperature and chat template, or add a correction",
    "weights_still": "no sampled weight changes any more; raise the learning rate, train in float32, "
    "or see whether all advantages are 0",
    "zero_advantage": "nearly all completions have the advantage 0, so there is nothing to learn from them; "
    "take prompts that are neither solved nor hopeless, a larger group, or dynamic sampling",
    "entropy": "the policy hardly explores any more; lower the learning rate, raise clip_high, or add an entropy bonus",
    "effective_sample": "few tokens carry nearly all of the importance weight; lower rl.max_staleness, "
    "or add a correction that truncates the ratios",
    "clip": "most tokens are clipped and teach nothing; lower the learning rate, the updates of a step, "
    "or rl.max_staleness",
    "staleness": "tokens are older than the bound; lower rl.max_staleness, or take an algorithm that stands it "
    "(aipo, decoupled_ppo) and raise policy.alarms.staleness",
}


class AlarmSettings(SettingsSection):
    """Bounds on what a step measures. An alarm is told when it begins and when it is over; see
    `docs/reference/metrics.md`."""

    mismatch_kl: float = Field(default=0.02, gt=0.0)
    """Most nats per token (k3) between rollout and trainer for tokens of the same weights (`mismatch`)."""
    still_steps: int = Field(default=3, ge=1)
    """Steps in a row in which no sampled weight changes (`weights_still`)."""
    zero_advantage_share: float = Field(default=0.95, gt=0.0, le=1.0)
    """Greatest share of completions whose advantage is 0, for `zero_advantage_steps` (`zero_advantage`)."""
    zero_advantage_steps: int = Field(default=5, ge=1)
    """Steps in a row above it."""
    entropy: float = Field(default=0.005, gt=0.0)
    """Least mean entropy of a token, in nats, for `entropy_steps` (`entropy`)."""
    entropy_steps: int = Field(default=5, ge=1)
    """Steps in a row below it."""
    effective_sample: float = Field(default=0.3, gt=0.0, le=1.0)
    """Least effective sample size of the tokens, as a share of their number, for 2 steps (`effective_sample`)."""
    clip_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Greatest share of clipped tokens, for 3 steps (`clip`)."""
    staleness: int = Field(default=8, ge=0)
    """Most versions that a trained token may be behind (`staleness`); `rl.max_staleness` is what bounds it."""
    off: tuple[AlarmName, ...] = ()
    """Alarms that are not wanted."""
    fail_on: tuple[AlarmName, ...] = ()
    """Alarms that end the run, with their sentence as the reason."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in self.fail_on:
            if name in self.off:
                raise ValueError(f"fail_on and off both name {name!r}; remove it from one")
        return self

    def rules(self) -> tuple[AlarmRule, ...]:
        """Return what to watch, in the order in which alarms are told."""
        return tuple(rule for rule in self._all() if rule.name not in self.off)

    def _all(self) -> tuple[AlarmRule, ...]:
        return (
            _rule("not_finite", "skipped_step", 0.0),
            _rule("mismatch", "mismatch_kl", self.mismatch_kl),
            _rule("weights_still", "weights_changed_share", 0.0, is_floor=True, num_steps=self.still_steps),
            _rule(
                "zero_advantage",
                "zero_advantage_share",
                self.zero_advantage_share,
                num_steps=self.zero_advantage_steps,
            ),
            # Supervised steps have an entropy too, and are to make it small.
            _rule(
                "entropy",
                "entropy",
                self.entropy,
                is_floor=True,
                num_steps=self.entropy_steps,
                beside="zero_advantage_share",
            ),
            _rule("effective_sample", "ess_token", self.effective_sample, is_floor=True, num_steps=2),
            _rule("clip", "clip_fraction", self.clip_fraction, num_steps=3),
            _rule("staleness", "staleness_max", float(self.staleness)),
        )


def _rule(name: AlarmName, metric: str, bound: float, **how: Any) -> AlarmRule:
    return AlarmRule(name=name, metric=metric, bound=bound, says=_SAYS[name], **how)
