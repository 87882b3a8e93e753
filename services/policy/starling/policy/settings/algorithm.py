"""The algorithm of reinforcement learning: a named one, and what a recipe wants otherwise."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from starling.algo.algorithm import Correction
from starling.common.settings import SettingsSection


class CorrectionSettings(SettingsSection):
    """One off-policy correction: a factor on each token's loss; several multiply. See
    `docs/reference/algorithms.md`."""

    kind: Literal["truncate", "mask", "sequence_mask"]
    """`truncate` (TIS) bounds the ratio of training to sampling probability at `high`; `mask` (MIS, icepop) drops what
    lies outside [`low`, `high`]; `sequence_mask` drops completions of negative advantage that drifted further than
    `high` (nats per token)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose ratio: each token's, the product over its completion, or the geometric mean over its completion."""
    low: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Least ratio that `mask` keeps."""
    high: float = Field(gt=0.0, allow_inf_nan=False)
    """Greatest ratio."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.to_algo()
        return self

    def to_algo(self) -> Correction:
        """Return it as the loss takes it. ValueError when its bounds make no sense."""
        return Correction(**self.model_dump())


class AlgorithmSettings(SettingsSection):
    """The loss of a reinforcement-learning step. What is not set here is as the named algorithm has it."""

    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, reinforce_pp_baseline, aipo, dual_clip, decoupled_ppo; the
    name that an installed package registers; or `module:attribute` or `file.py:attribute` of your own."""
    clip_low: float | None = Field(default=None, gt=0.0, le=1.0)
    """How far below 1 the importance ratio may count."""
    clip_high: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """How far above 1 the importance ratio may count."""
    dual_clip: float | None = Field(default=None, ge=0.0, allow_inf_nan=False)
    """Bound on the ratio where the advantage is negative (more than 1); 0 for none."""
    max_ratio: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Greatest importance weight of one-sided algorithms (AIPO)."""
    advantage_scale: Literal["std", "none"] | None = None
    """Divide advantages by the standard deviation of their group, or do not."""
    options: dict[str, float | int | bool | str] = Field(default_factory=dict)
    """Further options of the loss and the advantage, by the names of their arguments."""
    aggregate: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] | None = None
    """What weighs the same in a step's loss: each token, or each completion with the mean or the sum of its tokens; or
    each token by the constant `aggregate_tokens`."""
    aggregate_tokens: int = Field(default=0, ge=0)
    """Tokens by which `constant` divides a completion's sum; 0 for `sampling.max_tokens`."""
    old: Literal["rollout", "proximal"] | None = None
    """Denominator of the importance ratio: the probabilities under which a token was sampled, or those of the weights
    with which the step began, which costs a forward pass where a step has several updates."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates of one step, each on its part of the groups. The step makes one weight version all the same."""
    num_passes: int = Field(default=1, ge=1)
    """How often a step goes through its groups."""
    corrections: tuple[CorrectionSettings, ...] | None = None
    """Off-policy corrections. All but `sequence_mask` weigh by what `old` has over the rollout's probabilities, so they
    need `old = "proximal"`."""
    mask_truncated: bool | None = None
    """Leave completions that reached their token limit out of the loss (overlong filtering of DAPO)."""
    kl_coefficient: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the divergence from the reference, the model that reinforcement began with; 0 keeps no such model."""
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = "k3"
    """How the divergence is estimated."""
    reference_reset_every: int = Field(default=0, ge=0)
    """Steps after which the reference becomes the present model; 0 for never."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the entropy that is added to the objective."""
    positive_nll_coefficient: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the negative log-likelihood of completions with a positive advantage."""
    skip_zero_advantage: bool = True
    """Leave completions whose advantage is 0 out of the forward pass: they add nothing to the gradient.

    Their tokens still count in the mean, so the step is the same. Has no effect where another term trains them too.
    """


# JOINED from starling.policy.settings.distill: Learning from a teacher, in runs that have one.


class DistillSettings(SettingsSection):
    """What the teacher's log-probabilities count in a step, and how (runs with `launch.num_teachers` above 0)."""

    loss: Literal["reverse_kl", "jsd"] = "reverse_kl"
    """`reverse_kl`: each sampled token has as its advantage how much likelier the teacher finds it. `jsd`: the
    generalised Jensen-Shannon divergence over the teacher's likeliest tokens (`teacher.top_k` above 0)."""
    coefficient: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Weight of the teacher."""
    reward_coefficient: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Weight of the advantages that come from rewards, beside it; without scorers these are 0."""
    discount: float = Field(default=0.0, ge=0.0, le=1.0)
    """How much a token answers for the teacher's view of the tokens after it (`reverse_kl`): 0 not at all."""
    beta: float = Field(default=0.5, ge=0.0, le=1.0)
    """Between KL(teacher || student) at 0, which covers what the teacher does, and KL(student || teacher) at 1, which
    seeks what it does most (`jsd`)."""
