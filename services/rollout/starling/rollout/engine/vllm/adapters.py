"""Adapters on vLLM, on the replica's side: checks, layout, and the arguments that vLLM is started with.

vLLM loads the base weights from the model's folder; they never change. It gets one slot for adapters, which all
requests use; `worker/adapters.py` fills that slot in each worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.rollout.engine.base import EngineSpec

if TYPE_CHECKING:
    from starling.weightsync.plan.layout import Layout

ADAPTER_ID: Final = 1
"""vLLM's id of the only adapters."""
FULLY_TRAINED: Final = "modules_to_save"
"""The part of a tensor's name that marks a fully trained module in peft."""


def check(lora: LoraSettings) -> None:
    """Reject adapter settings that vLLM does not support.

    Raises:
        ConfigError: naming the setting.
    """
    for key, what in (("dora", "DoRA"), ("parameters", "adapters on weights that are no layer of their own")):
        if getattr(lora, key):
            raise ConfigError(
                f"model.lora.{key} needs rollout.engine = 'transformers': vllm has no {what}; set that, or remove it"
            )


def read(spec: EngineSpec) -> Layout:
    """Return the layout of the adapters, with the digest of the base weights below them.

    The model is loaded once for this, as the policy loads it, into host memory, and freed again.

    Raises:
        ConfigError: the folder cannot be read, or the adapters do not fit its model or vLLM.
    """
    from starling.rollout.engine.embedded.model import build_model, live_tensors
    from starling.weightsync.tensors.adapters import adapted_layers, base_digest, base_name
    from starling.weightsync.tensors.modules import layout_of

    lora = spec.model.lora
    assert lora is not None
    model = build_model(
        spec.path,
        dtype=spec.model.dtype,
        device="cpu",
        weights=True,
        lora=lora,
        trust_remote_code=spec.model.trust_remote_code,
    )
    for name, layer in adapted_layers(model):
        if hasattr(layer, "parameter_name"):
            raise ConfigError(
                f"[model.lora] adapts {base_name(name)}.{layer.parameter_name}, which is not a layer; vllm has "
                "adapters on layers only: list those of attention in model.lora.targets, or set rollout.engine = "
                "'transformers'"
            )
    layout = layout_of(live_tensors(model), spec.name, base=base_digest(model, lora))
    _check_fully_trained([tensor.name for tensor in layout.tensors])
    return layout


def arguments(layout: Layout) -> dict[str, Any]:
    """Return the arguments of `AsyncEngineArgs` for the adapters of `layout`.

    Raises:
        ConfigError: a rank is larger than vLLM supports.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = [tensor.shape[0] for tensor in layout.tensors if ".lora_A." in tensor.name]
    largest, possible = max(ranks, default=1), sorted(get_args(MaxLoRARanks))
    if largest > possible[-1]:
        raise ConfigError(
            f"[model.lora] has adapters of rank {largest}, and vllm computes with ranks up to {possible[-1]}; set "
            "model.lora.rank and model.lora.rank_pattern lower, or rollout.engine = 'transformers'"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in possible if rank >= largest),
        # vLLM would compute other layers with adapters of zeros in every pass.
        "lora_target_modules": _endings(tensor.name for tensor in layout.tensors),
    }


def as_peft(lora: LoraSettings) -> dict[str, Any]:
    """Return the adapter configuration for vLLM, under peft's names.

    vLLM takes the target layers from the names of the tensors.
    """
    return {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [],
        "rank_pattern": dict(lora.rank_pattern),
        "alpha_pattern": dict(lora.alpha_pattern),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
    }


def lora_request() -> Any:
    """Return the `LoRARequest` that makes vLLM use the adapters in the slot.

    vLLM would load the folder only if it had no adapters of this id.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapters of the version in use", ADAPTER_ID, "/nowhere")


def check_computed(missing: Sequence[Iterable[str]]) -> None:
    """Check that each adapted layer exists in some worker, given the layers `missing` in each.

    Raises:
        ConfigError: naming a layer that no worker has.
    """
    nowhere = set.intersection(*(set(layers) for layers in missing))
    if nowhere:
        raise ConfigError(
            f"[model.lora] adapts {min(nowhere)}, where vllm has no adapters; leave it out by model.lora.exclude, or "
            "set rollout.engine = 'transformers'"
        )


def layer_of(name: str) -> str:
    """Return the layer of the adapter tensor `name`."""
    return name.partition(".lora_")[0]


def _endings(names: Iterable[str]) -> list[str]:
    """Return the last name parts of the layers with adapters.

    Numbers are left out: they are list indices of whole blocks, which vLLM would try to adapt; see `check_computed`.
    """
    endings = {layer_of(name).rpartition(".")[2] for name in names if f".{FULLY_TRAINED}." not in name}
    return sorted(ending for ending in endings if not ending.isdigit())


def _check_fully_trained(names: Sequence[str]) -> None:
    """Check that no fully trained module is among the layers for which vLLM enables adapters."""
    endings = _endings(names)
    for name in names:
        module = name.partition(f".{FULLY_TRAINED}.")[0]
        if module != name and module.rpartition(".")[2] in endings:
            raise ConfigError(
                f"model.lora.modules_to_save names {module}, and other layers of that ending have adapters, which vllm "
                "cannot tell apart; leave it out, or set rollout.engine = 'transformers'"
            )
