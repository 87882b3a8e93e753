"""The policy's settings: how it loads its model and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from starling.common.errors import ConfigError
from starling.common.settings import validate

CHANGEABLE: Final = (
    "policy.grpo.clip_high",
    "policy.grpo.clip_low",
    "policy.grpo.kl_coefficient",
    "policy.optimizer.learning_rate",
    "policy.optimizer.max_grad_norm",
    "policy.sft.optimizer.learning_rate",
    "policy.sft.optimizer.max_grad_norm",
)
"""What a step may be told to do otherwise than the recipe says."""

_FROZEN = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class OptimizerSettings(BaseModel):
    """AdamW, its learning-rate schedule, and the bound on the gradient."""

    model_config = _FROZEN

    learning_rate: float = Field(default=1e-6, gt=0.0, allow_inf_nan=False)
    """Highest learning rate, reached at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises in equal parts; 0 starts at the highest."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What the learning rate does after the warm-up: stay, or fall towards 0 until the last step."""
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Decoupled weight decay of the matrices; vectors (norms, biases) are never decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    """Added to AdamW's denominator."""
    max_grad_norm: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Largest Euclidean norm of the whole gradient, which is scaled down to it; 0 leaves the gradient alone."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: each must be at least 0 and less than 1")
        return self


class GrpoSettings(BaseModel):
    """The loss of a reinforcement-learning step."""

    model_config = _FROZEN

    clip_low: float = Field(default=0.2, gt=0.0, le=1.0)
    """How far below 1 the importance ratio may count."""
    clip_high: float = Field(default=0.2, gt=0.0, allow_inf_nan=False)
    """How far above 1 the importance ratio may count."""
    kl_coefficient: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the divergence from the model that reinforcement began with; 0 keeps no such model."""
    advantage_scale: Literal["std", "none"] = "std"
    """Divide advantages by the standard deviation of their group (GRPO), or do not (Dr. GRPO)."""
    skip_zero_advantage: bool = True
    """Leave completions whose advantage is 0 out of the forward pass: they add nothing to the gradient.

    Their tokens still count in the mean, so the step is the same. Has no effect with a KL term.
    """


class SftSettings(BaseModel):
    """The supervised steps, with an optimizer of their own."""

    model_config = _FROZEN

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """The optimizer of the supervised steps; reinforcement learning starts with a fresh one."""


class PolicySettings(BaseModel):
    """Everything the policy decides for itself."""

    model_config = _FROZEN

    init: Literal["pretrained", "random"] = "pretrained"
    """Take the weights from the model's folder, or draw them from its configuration and `run.seed`."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's folder."""
    tokens_per_microbatch: int = Field(default=8192, ge=1)
    """Most cells (rows x row length) of one forward and backward pass; bounds the memory of activations."""
    share_prompts: bool = True
    """Compute a prompt once for several completions of its group where that makes the step cheaper."""
    transport: Literal["ucx", "tcp", "local", "nccl", "gloo", "nixl"] = "ucx"
    """How weights travel to the rollouts: `ucx` or `tcp` between any hosts, `local` through memory on this host, `nccl`
    between GPUs where NCCL is what is tuned, `gloo` the same between CPUs, `nixl` where both ends have it installed."""
    delta_versions: int | None = Field(default=None, ge=0)
    """For so many versions back the policy knows what changed, and sends only that; 0 sends every version whole.

    Unset, it is 2, and 0 where all rollouts are on this host: there weights are sooner sent than compared.
    """
    publish_timeout_s: float = Field(default=30.0, gt=0.0)
    """How long a publication waits for rollouts that still read both snapshots, before it revokes the older one."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of reinforcement learning."""
    grpo: GrpoSettings = GrpoSettings()
    """The loss of reinforcement learning."""
    sft: SftSettings = SftSettings()
    """The supervised steps."""


def changed(settings: PolicySettings, changes: Mapping[str, float]) -> PolicySettings:
    """Return `settings` with `changes`, whose keys are those of a recipe.

    Raises:
        ConfigError: names a key that no step can change, or a value that its setting does not take.
    """
    tree = settings.model_dump()
    for key, value in changes.items():
        if key not in CHANGEABLE:
            raise ConfigError(f"{key} = {value:g} cannot be changed from one step to the next, only {_LISTED}")
        *sections, name = key.split(".")[1:]
        section: dict[str, Any] = tree
        for part in sections:
            section = section[part]
        section[name] = value
    try:
        return validate(PolicySettings, tree) if changes else settings
    except ConfigError as error:
        raise ConfigError(f"policy.{error}") from None


_LISTED: Final = f"{', '.join(CHANGEABLE[:-1])} and {CHANGEABLE[-1]}"
