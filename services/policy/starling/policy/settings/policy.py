"""The whole of the policy's settings: how it loads its model and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field

from starling.common.errors import ConfigError
from starling.common.settings import ModelSettings, SettingsSection, WeightsSettings, validate
from starling.policy.settings.alarms import AlarmSettings
from starling.policy.settings.algorithm import AlgorithmSettings, DistillSettings
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.saving import SavingSettings
from starling.policy.settings.supervised import DpoSettings, RewardModelSettings, SftStepSettings

CHANGEABLE: Final = (
    "policy.algorithm.clip_high",
    "policy.algorithm.clip_low",
    "policy.algorithm.kl_coefficient",
    "policy.optimizer.learning_rate",
    "policy.optimizer.max_grad_norm",
    "policy.sft.optimizer.learning_rate",
    "policy.sft.optimizer.max_grad_norm",
)
"""What a step may be told to do otherwise than the recipe says."""


class PolicySettings(SettingsSection):
    """Everything the policy decides for itself."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Take the weights from the model's folder, or draw them from its configuration and `run.seed`."""
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
    peak_tflops: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Dense TFLOP/s of one device in the dtype of training, against which the utilisation (MFU) is told; unset, what is
    known of the GPU by its name, in bfloat16."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """The optimizer of reinforcement learning."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """The loss of reinforcement learning."""
    distill: DistillSettings = DistillSettings()
    """What a teacher counts, in runs that have one."""
    sft: SftStepSettings = SftStepSettings()
    """The supervised steps."""
    dpo: DpoSettings = DpoSettings()
    """Steps that learn preferences."""
    reward_model: RewardModelSettings = RewardModelSettings()
    """Steps that teach a model to score."""
    frozen: tuple[str, ...] = ()
    """Parameters that stay as they are: regular expressions, each found somewhere in the name of at least one."""
    liger: bool = False
    """Compute with Liger's fused kernels; needs a CUDA device and `starling-policy[liger]`."""
    memory: MemorySettings = MemorySettings()
    """What is computed again or kept elsewhere to need less memory."""
    saving: SavingSettings = SavingSettings()
    """Where states and checkpoints go, and which stay."""
    alarms: AlarmSettings = AlarmSettings()
    """When a step's numbers are a cause for alarm."""


def check_adapters(model: ModelSettings, policy: PolicySettings, weights: WeightsSettings) -> None:
    """Check that adapters, if `model` has any, go with the rest.

    Raises:
        ValueError: every replica must find the base weights in the model's folder, as they are, and nothing but
            adapters is trained.
    """
    if model.lora is None:
        return
    if policy.init == "random":
        raise ValueError(
            "policy.init = 'random' does not go with [model.lora]: adapters travel without the weights they are for, "
            "so every replica must read those from model.path"
        )
    if policy.frozen:
        raise ValueError(
            "policy.frozen does not go with [model.lora], where all is frozen but the adapters: "
            "choose their layers by model.lora.targets and model.lora.exclude"
        )
    if weights.quantise:
        raise ValueError(
            f"weights.quantise = {weights.quantise!r} does not go with [model.lora]: adapters travel without the "
            "weights they are for, which every replica holds as they are; leave weights.quantise empty"
        )


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
