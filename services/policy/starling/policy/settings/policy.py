"""All settings of the policy: loading its model, training, publishing, saving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from starling.common.errors import ConfigError, WeightsError
from starling.common.ranges import MAX_COEFFICIENT, MAX_COUNT, MAX_WHOLE
from starling.common.settings import (
    ModelSettings,
    NetworkSettings,
    Seconds,
    SettingsSection,
    WeightsSettings,
    shown,
    validate,
)
from starling.policy.settings.alarms import AlarmSettings
from starling.policy.settings.algorithm import AlgorithmSettings, DistillSettings
from starling.policy.settings.diffusion import DiffusionSettings
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.precision import PrecisionSettings
from starling.policy.settings.saving import SavingSettings
from starling.policy.settings.supervised import DpoSettings, RewardModelSettings, SftStepSettings
from starling.weightsync.offers.offer import TransportChoice
from starling.weightsync.transports.endpoints import choose_transport, is_loopback

CHANGEABLE: Final = (
    "policy.algorithm.clip_high",
    "policy.algorithm.clip_low",
    "policy.algorithm.kl_coefficient",
    "policy.diffusion.advantage_bound",
    "policy.diffusion.nft_beta",
    "policy.optimizer.learning_rate",
    "policy.optimizer.max_grad_norm",
    "policy.sft.optimizer.learning_rate",
    "policy.sft.optimizer.max_grad_norm",
)
"""Settings that operators may change from one step to the next."""


class PolicySettings(SettingsSection):
    """Training and publication of weights."""

    init: Literal["pretrained", "random"] = "pretrained"
    """Load the weights from the model's folder, or draw random ones from its configuration and `run.seed`."""
    weights_from: str = ""
    """Folder or URL supported by fsspec, such as ``s3://bucket/models/Qwen3-8B``, of the model whose weights the policy
    loads; `model.path` then needs only the configuration and the tokenizer. Options are those of
    `saving.storage_options`. Empty: `model.path`."""
    tokens_per_microbatch: int = Field(default=8192, ge=1, le=MAX_WHOLE)
    """Maximum token slots of a microbatch, shared tokens counted once; bounds the memory of activations."""
    share_prompts: bool = True
    """Compute once what sequences of a microbatch begin with in common: prompts, turns of a conversation, documents."""
    attention: Literal["auto", "segments", "flex", "varlen"] = "auto"
    """Computation of attention: `segments`, fused kernels on parts of a row, on every device; `varlen`,
    variable-length flash attention, and `flex`, FlexAttention, both on CUDA devices. `auto`: the first that computes
    the model, of `varlen`, `flex` and `segments` on CUDA devices; `segments` elsewhere."""
    transport: TransportChoice = "auto"
    """Transport of weights to the rollouts: `ucx` or `tcp` between any hosts, `local` through memory of this host,
    `nccl` between GPUs where NCCL is tuned, `gloo` between CPUs, `nixl` where it is installed at both ends. `auto`:
    `ucx` if `network.host` is of this machine only, or if `network.encrypt_weights = false` and this host has an active
    RDMA port that UCX can use; else `tcp`, encrypted. The others are for private networks: anyone who can connect to a
    port of UCX can take over the process (`docs/explanation/security.md`)."""
    delta_versions: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Versions back from which a rollout can be sent only the changes; 0 sends every version in full.

    Unset, it is 2, or 0 if all rollouts are on this host: there sending weights is faster than comparing them.
    """
    snapshots: Literal["auto", "device", "pinned", "host"] = "auto"
    """Where weights are copied while training waits for a publication: `device`, into memory of the model's device,
    from where they move to the host while training goes on; `pinned`, into page-locked memory of the host; `host`,
    into any. `auto`: `host` on CPUs; on GPUs `device` while four copies fit into the free memory, else `pinned`.

    With `device` and the transports `local`, `ucx` and `nixl` two versions stay on the device, also while a colocated
    policy sleeps: rollouts that pull in place on a GPU (`rollout.double_buffer = false`) get them from there."""
    publish_timeout_s: Seconds = 30.0
    """Time that a publication waits for rollouts that still read both snapshots, before it revokes the older one.

    One that was late three times within an hour is waited for no more. With `parallel.elastic`, less than
    `parallel.replica_timeout_s`.
    """
    peak_tflops: float | None = Field(default=None, gt=0.0, le=MAX_COEFFICIENT)
    """Dense TFLOP/s of one device in the dtype of training, for the reported utilisation (MFU); unset, the GPU's
    data-sheet value for bfloat16."""
    router_aux_coefficient: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the load-balancing loss of a mixture of experts' routers, in every kind of step; 0 for none."""
    router_bias_rate: float = Field(default=0.0, ge=0.0, le=1.0)
    """Change in each step, towards an even load, of the bias by which routers such as DeepSeek-V3's choose experts; 0
    for none."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer of reinforcement learning."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """Loss of reinforcement learning."""
    diffusion: DiffusionSettings = DiffusionSettings()
    """Steps of diffusion models."""
    distill: DistillSettings = DistillSettings()
    """Distillation, in runs with a teacher."""
    sft: SftStepSettings = SftStepSettings()
    """Supervised steps."""
    dpo: DpoSettings = DpoSettings()
    """Steps on preference pairs."""
    reward_model: RewardModelSettings = RewardModelSettings()
    """Steps that train a reward model."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained: regular expressions, each matching the name of at least one."""
    liger: bool = False
    """Use Liger's fused kernels; needs a CUDA device and `starling-policy[liger]`."""
    memory: MemorySettings = MemorySettings()
    """Recomputation, offload and compilation."""
    precision: PrecisionSettings = PrecisionSettings()
    """Precision of matrix products."""
    parallel: ParallelSettings = ParallelSettings()
    """Mesh of the ranks of a replica."""
    saving: SavingSettings = SavingSettings()
    """States and checkpoints: their location, and which to keep."""
    alarms: AlarmSettings = AlarmSettings()
    """Bounds on metrics that raise alarms."""

    @property
    def uses_torchao(self) -> bool:
        """Whether a part of training is torchao's."""
        sections = (self, self.sft, self.dpo, self.reward_model)
        return self.precision.kind != "none" or any(one.optimizer.kind == "adamw_8bit" for one in sections)

    @model_validator(mode="after")
    def _weights_are_read(self) -> Self:
        if self.weights_from and self.init == "random":
            raise ValueError(
                f"weights_from = {shown(self.weights_from)} with init = 'random' would not be read; remove one of the "
                "two"
            )
        return self

    @model_validator(mode="after")
    def _products_are_whole(self) -> Self:
        if self.precision.kind in ("mxfp8", "mxfp4") and self.parallel.tp > 1:
            raise ValueError(
                f'precision.kind = "{self.precision.kind}" is not available with parallel.tp = {self.parallel.tp}: set '
                'tp = 1, or kind = "fp8_rowwise"'
            )
        return self

    @model_validator(mode="after")
    def _codes_are_gathered(self) -> Self:
        if self.precision.fsdp_all_gather and self.parallel.num_shards == 1:
            raise ValueError(
                "precision.fsdp_all_gather = true has no effect where no rank shards weights: set it to false, or "
                "parallel.dp_shard or parallel.cp above 1"
            )
        return self

    @model_validator(mode="after")
    def _routers_are_recorded(self) -> Self:
        for name in ("router_aux_coefficient", "router_bias_rate"):
            if getattr(self, name) and self.memory.compile:
                raise ValueError(
                    f"{name} = {getattr(self, name):g} reads the routers inside each block, which memory.compile = "
                    "true replaces by compiled code: set one of them to its default"
                )
        return self


def check_adapters(model: ModelSettings, policy: PolicySettings, weights: WeightsSettings) -> None:
    """Check that the other settings are compatible with adapters, if `model` has any.

    Raises:
        ValueError: a setting changes the base weights, which every replica must read from the model's folder, or
            trains other parameters than adapters.
    """
    if model.lora is None:
        return
    if policy.init == "random":
        raise ValueError(
            "policy.init = 'random' is not compatible with [model.lora]: adapters are published without their base "
            "weights, so every replica must read those from model.path"
        )
    if policy.weights_from:
        raise ValueError(
            f"policy.weights_from = {shown(policy.weights_from)} is not compatible with [model.lora]: every replica "
            "reads the base weights from model.path, so they have to be there; remove it"
        )
    if policy.frozen:
        raise ValueError(
            "policy.frozen is not compatible with [model.lora], where everything but the adapters is frozen: "
            "choose their layers by model.lora.targets and model.lora.exclude"
        )
    if policy.precision.kind != "none":
        raise ValueError(
            f"policy.precision.kind = {policy.precision.kind!r} is not compatible with [model.lora]: its layers would "
            "compute gradients of the frozen base weights, too; set it to 'none'"
        )
    if weights.quantise:
        raise ValueError(
            f"weights.quantise = {weights.quantise!r} is not compatible with [model.lora]: adapters are published "
            "without their base weights, which every replica holds unquantised; leave weights.quantise empty"
        )


def check_transport(policy: PolicySettings, network: NetworkSettings) -> None:
    """Check that the transport of a policy suits the network of its run.

    Raises:
        ValueError: it cannot encrypt weights that must be encrypted, or rollouts on other machines cannot use it.
    """
    try:
        choose_transport(policy.transport, network.host, encrypt=network.encrypt_weights)
    except WeightsError as error:
        raise ValueError(f"policy.transport with network.encrypt_weights = true: {error}") from error
    if policy.transport == "local" and not is_loopback(network.host):
        raise ValueError(
            f"policy.transport = 'local' is memory of this machine, and network.host = {network.host!r} is for "
            "replicas on others, which could not read it: set policy.transport = 'auto', or network.host = '127.0.0.1'"
        )


def check_elastic(policy: PolicySettings, network: NetworkSettings) -> None:
    """Check that replicas can make steps together: their time limits, and the network of their gradients and states.

    Raises:
        ValueError: a rank or a replica would give up before the one that it waits for; or what leaves the machine must
            be encrypted, and torch's process groups are not.
    """
    parallel = policy.parallel
    if parallel.elastic and parallel.replica_timeout_s >= parallel.timeout_s:
        raise ValueError(
            f"policy.parallel.replica_timeout_s = {parallel.replica_timeout_s:g} must be less than "
            f"policy.parallel.timeout_s = {parallel.timeout_s:g}: the ranks of a replica wait for the one among them "
            "that waits for other replicas"
        )
    if parallel.elastic and 2 * policy.publish_timeout_s > parallel.replica_timeout_s:
        raise ValueError(
            f"policy.publish_timeout_s = {policy.publish_timeout_s:g} must be at most a half of "
            f"policy.parallel.replica_timeout_s = {parallel.replica_timeout_s:g}: other policies wait for the one that "
            "waits for readers of a snapshot"
        )
    if parallel.elastic and network.encrypt_weights and not is_loopback(network.host):
        raise ValueError(
            f"policy.parallel.elastic with network.host = {network.host!r} would send gradients between hosts "
            "unencrypted, and anyone on that network could join: on a private one set network.encrypt_weights = false"
        )


def changed(settings: PolicySettings, changes: Mapping[str, float]) -> PolicySettings:
    """Return `settings` with `changes`, by key of the recipe.

    Raises:
        ConfigError: a key cannot change from one step to the next, or a value is invalid.
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
