"""Algorithm settings: the loss of reinforcement learning, its corrections, and distillation from a teacher."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from starling.algo.algorithm import Correction
from starling.common.ranges import MAX_COEFFICIENT, MAX_COUNT, MAX_GROUPS, MAX_STEPS, MAX_TOKENS
from starling.common.settings import SettingsSection


class CorrectionSettings(SettingsSection):
    """An off-policy correction: a factor on each token's loss; several multiply. See `docs/reference/algorithms.md`."""

    kind: Literal["truncate", "mask", "sequence_mask"]
    """`truncate` (TIS) bounds the ratio of training to sampling probability at `high`; `mask` (MIS, icepop) drops
    ratios outside [`low`, `high`]; `sequence_mask` drops completions of negative advantage that drifted by more than
    `high` (nats per token)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Ratio to bound: each token's, the product over its completion, or the geometric mean over its completion."""
    low: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Minimum ratio that `mask` keeps."""
    high: float = Field(gt=0.0, le=MAX_COEFFICIENT)
    """Maximum ratio."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.to_algo()
        return self

    def to_algo(self) -> Correction:
        """Return the correction for `starling.algo`. Raises ValueError if its bounds are inconsistent."""
        return Correction(**self.model_dump())


class AlgorithmSettings(SettingsSection):
    """The loss of a reinforcement-learning step. Unset values are those of the named algorithm."""

    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, rloo_sequence, reinforce_pp, reinforce_pp_baseline, gdpo, aipo,
    dual_clip, decoupled_ppo; the name registered by an installed package; or your own as `module:attribute` or
    `file.py:attribute`."""
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0)
    """Lower clipping of the importance ratio, at 1 - `clip_low`."""
    clip_high: float | None = Field(default=None, gt=0.0, le=MAX_COEFFICIENT)
    """Upper clipping of the importance ratio, at 1 + `clip_high`."""
    dual_clip: float | None = Field(default=None, ge=0.0, le=MAX_COEFFICIENT)
    """Bound on the ratio where the advantage is negative (more than 1); 0 for none."""
    max_ratio: float | None = Field(default=None, gt=0.0, le=MAX_COEFFICIENT)
    """Maximum importance weight of one-sided algorithms (AIPO)."""
    advantage_scale: Literal["std", "batch", "none"] | None = None
    """Divisor of advantages: the standard deviation of the rewards of their group (`std`), that of all rewards of the
    step (`batch`), or none."""
    options: dict[str, float | int | bool | str] = Field(default_factory=dict)
    """Further options of the loss and the advantage, by argument name."""
    aggregate: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] | None = None
    """Aggregation of a step's loss: mean over tokens; mean over completions of the mean or the sum of their tokens; or
    of the sum divided by the constant `aggregate_tokens`."""
    aggregate_tokens: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Tokens by which `constant` divides a completion's sum; 0 for `sampling.max_tokens`."""
    old: Literal["rollout", "proximal"] | None = None
    """Denominator of the importance ratio: the probabilities at sampling, or those of the weights at the start of the
    step, which take another forward pass if the step has several updates."""
    num_minibatches: int = Field(default=1, ge=1, le=MAX_GROUPS)
    """Optimizer updates per step, each on a part of the groups. The step still makes one weight version."""
    num_passes: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Passes of a step over its groups."""
    corrections: tuple[CorrectionSettings, ...] | None = None
    """Off-policy corrections. All but `sequence_mask` weight by the ratio of `old` to the rollout's probabilities, so
    they need `old = "proximal"`."""
    mask_truncated: bool | None = None
    """Exclude completions that reached their token limit from the loss (overlong filtering of DAPO)."""
    kl_coefficient: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the KL divergence from the reference, the model at the start of reinforcement; 0 keeps no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """Estimator of the KL divergence."""
    reference_reset_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps after which the present model becomes the reference; 0 for never."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the entropy bonus."""
    positive_nll_coefficient: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the negative log-likelihood of completions with a positive advantage."""
    skip_zero_advantage: bool = True
    """Exclude completions with an advantage of 0 from the forward pass: they do not change the gradient.

    The mean still counts their tokens, so the step is the same. No effect if another term trains them too.
    """


class DistillSettings(SettingsSection):
    """Use of a teacher's log-probabilities in a step (runs with `launch.num_teachers` above 0)."""

    loss: Literal["reverse_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: the advantage of a sampled token is its log-probability under the teacher minus the student's.
    `jsd`: the generalised Jensen-Shannon divergence over the teacher's likeliest tokens (`teacher.top_k` above 0)."""
    coefficient: float = Field(default=1.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the teacher's term."""
    reward_coefficient: float = Field(default=1.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the advantages from rewards; without scorers these are 0."""
    discount: float = Field(default=0.0, ge=0.0, le=1.0)
    """Discount of the teacher's advantages of later tokens that a token is credited with (`reverse_kl`); 0 for none."""
    beta: float = Field(default=0.5, ge=0.0, le=1.0)
    """Interpolates between KL(teacher || student) at 0, which covers the teacher's modes, and KL(student || teacher) at
    1, which seeks its main mode (`jsd`)."""
