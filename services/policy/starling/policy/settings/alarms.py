"""Alarm settings: bounds on the metrics of a step."""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COEFFICIENT, MAX_STEPS, MAX_WHOLE
from starling.common.settings import SettingsSection
from starling.policy.core.alarms import AlarmRule

AlarmName = Literal[
    "not_finite", "mismatch", "weights_still", "zero_advantage", "entropy", "effective_sample", "clip", "staleness"
]
"""`docs/reference/metrics.md` describes each."""

_TEXTS: Final[dict[AlarmName, str]] = {
    "not_finite": "the loss or the gradient was not finite, or too large and not clipped, so the step left the weights "
    "unchanged; lower the learning rate or max_grad_norm, set the latter above 0, and check for rewards or "
    "log-probabilities out of range",
    "mismatch": "rollout and trainer disagree about the log-probabilities of the same weights, so importance ratios "
    "are wrong; compare their dtypes, kernels, temperature and chat template, or add a correction",
    "weights_still": "no sampled weight changed; raise the learning rate, train in float32, "
    "or check whether all advantages are 0",
    "zero_advantage": "nearly all completions have an advantage of 0, so there is little to learn from them; "
    "use prompts of medium difficulty, a larger group, or dynamic sampling",
    "entropy": "the policy hardly explores; lower the learning rate, raise clip_high, or add an entropy bonus",
    "effective_sample": "few tokens carry nearly all of the importance weight; lower rl.max_staleness, "
    "or add a correction that truncates the ratios",
    "clip": "most tokens are clipped and have no gradient; lower the learning rate, the updates of a step, "
    "or rl.max_staleness",
    "staleness": "tokens are older than the bound; lower rl.max_staleness, or use an algorithm that tolerates it "
    "(aipo, decoupled_ppo) and raise policy.alarms.staleness",
}


class AlarmSettings(SettingsSection):
    """Bounds on the metrics of a step. An alarm is reported when it is raised and when it clears."""

    mismatch_kl: float = Field(default=0.02, gt=0.0, le=MAX_COEFFICIENT)
    """Alarm `mismatch`: maximum divergence (k3, nats per token) between rollout and trainer for equal weights."""
    still_steps: int = Field(default=3, ge=1, le=MAX_STEPS)
    """Alarm `weights_still`: consecutive steps in which no sampled weight changes."""
    zero_advantage_share: float = Field(default=0.95, gt=0.0, le=1.0)
    """Alarm `zero_advantage`: maximum share of completions with an advantage of 0."""
    zero_advantage_steps: int = Field(default=5, ge=1, le=MAX_STEPS)
    """Consecutive steps above `zero_advantage_share` that raise the alarm."""
    entropy: float = Field(default=0.005, gt=0.0, le=MAX_COEFFICIENT)
    """Alarm `entropy`: minimum mean entropy of a token, in nats."""
    entropy_steps: int = Field(default=5, ge=1, le=MAX_STEPS)
    """Consecutive steps below `entropy` that raise the alarm."""
    effective_sample: float = Field(default=0.3, gt=0.0, le=1.0)
    """Alarm `effective_sample`: minimum effective sample size, as a share of the number of tokens, for 2 steps."""
    clip_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Alarm `clip`: maximum share of clipped tokens, for 3 steps."""
    staleness: int = Field(default=8, ge=0, le=MAX_WHOLE)
    """Alarm `staleness`: maximum age of a trained token, in versions; the bound itself is `rl.max_staleness`."""
    off: tuple[AlarmName, ...] = ()
    """Alarms to disable."""
    fail_on: tuple[AlarmName, ...] = ()
    """Alarms that end the run, with their text as the reason."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in self.fail_on:
            if name in self.off:
                raise ValueError(f"fail_on and off both name {name!r}; remove it from one")
        return self

    def rules(self) -> tuple[AlarmRule, ...]:
        """Return the rules of the enabled alarms, in the order in which alarms are reported."""
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
            # Supervised steps have an entropy too, and are meant to reduce it.
            _rule(
                "entropy",
                "entropy",
                self.entropy,
                is_floor=True,
                num_steps=self.entropy_steps,
                requires="zero_advantage_share",
            ),
            _rule("effective_sample", "ess_token", self.effective_sample, is_floor=True, num_steps=2),
            _rule("clip", "clip_fraction", self.clip_fraction, num_steps=3),
            _rule("staleness", "staleness_max", float(self.staleness)),
        )


def _rule(name: AlarmName, metric: str, bound: float, **how: Any) -> AlarmRule:
    return AlarmRule(name=name, metric=metric, bound=bound, text=_TEXTS[name], **how)
