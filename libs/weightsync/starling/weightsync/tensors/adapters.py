"""Low-rank adapters: adds the same adapters to every replica's model, and selects the tensors that are published.

The base weights never change, so they are not transferred: each replica reads them from files. Layouts carry a digest
of the base weights, so that planning between two replicas proves that both have read the same ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

import msgspec
import torch
import xxhash
from torch import Tensor

from starling.common.errors import ConfigError

ADAPTER: Final = "default"
"""Name that peft gives to a model's only adapter."""
_INIT: Final[dict[str, bool | str]] = {"kaiming": True, "gaussian": "gaussian", "orthogonal": "orthogonal"}
_SCALING: Final = {"rank", "alpha", "rank_pattern", "alpha_pattern", "rslora", "dora"}


class AdapterSpec(Protocol):
    """Layers of a model that get adapters, and the form of these; names and values as in peft's `LoraConfig`."""

    @property
    def rank(self) -> int: ...
    @property
    def alpha(self) -> float: ...
    @property
    def targets(self) -> str | tuple[str, ...]: ...
    @property
    def exclude(self) -> str | tuple[str, ...]: ...
    @property
    def parameters(self) -> tuple[str, ...]: ...
    @property
    def rank_pattern(self) -> Mapping[str, int]: ...
    @property
    def alpha_pattern(self) -> Mapping[str, float]: ...
    @property
    def rslora(self) -> bool: ...
    @property
    def dora(self) -> bool: ...
    @property
    def modules_to_save(self) -> tuple[str, ...]: ...
    @property
    def init(self) -> str: ...

    def model_dump_json(self, *, include: set[str]) -> str:
        """Return the fields in `include` as JSON, in the order above."""


def add_adapters(model: torch.nn.Module, spec: AdapterSpec, *, seed: int) -> None:
    """Add new adapters to `model`, in place. They are neutral at first, and only they require gradients.

    The adapters are float32 for base weights of any type: they are small, and bfloat16 would round updates away.
    `model` keeps its identity and class; only its layers with an adapter are replaced by peft's.

    Args:
        model: of transformers or diffusers, on the CPU, so that every device gets the same adapters.
        spec: the layers with adapters, and their form.
        seed: seed of the initial adapters; the global generator is not changed.

    Raises:
        ConfigError: `spec` names a layer that does not exist or cannot have an adapter.
    """
    from peft import LoraConfig, get_peft_model

    tied = _tied_embeddings(model)
    names = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters()]
    config = LoraConfig(**_arguments(spec))
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="peft")  # errors are checked below
            torch.manual_seed(seed)
            get_peft_model(model, config)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f"[model.lora] does not fit the model: {reason}; correct its targets") from error
    _check_named(spec, config, names, weights)
    _check_patterns(spec, model)
    _check_embeddings(model, tied=tied)


def is_adapted(model: torch.nn.Module) -> bool:
    """Whether `model` has adapters."""
    return hasattr(model, "peft_config")


def is_adapter(name: str) -> bool:
    """Whether the parameter `name` of an adapted model belongs to an adapter or to a fully trained module."""
    return any(part == "modules_to_save" or part.startswith("lora_") for part in name.split("."))


def published_tensors(model: torch.nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `named` that form a version of `model`: all, or only adapters if it has any."""
    adapted = is_adapted(model)
    return {name: tensor for name, tensor in named.items() if not adapted or is_adapter(name)}


def base_digest(model: torch.nn.Module, spec: AdapterSpec | None) -> str:
    """Return the digest of the base weights of `model` and of the adapters' scaling; empty without adapters.

    Reads all weights once, tensor by tensor, through host memory.
    """
    return digest_of_base(base_tensors(model), spec)


def base_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `model` that belong to no adapter, sorted by name."""
    for name, tensor in sorted(model.state_dict().items()):
        if not is_adapter(name):
            yield name, tensor


def digest_of_base(named: Iterable[tuple[str, Tensor]], spec: AdapterSpec | None) -> str:
    """Return what `base_digest` does, from the `base_tensors` of a model; nothing is read without adapters."""
    if spec is None:
        return ""
    state = xxhash.xxh3_128(spec.model_dump_json(include=_SCALING).encode())
    for name, tensor in named:
        whole = tensor.detach().cpu().contiguous()
        kind = (base_name(name), str(whole.dtype), tuple(whole.shape))
        state.update(msgspec.msgpack.encode(kind))
        content: Any = whole.flatten().view(torch.uint8).numpy()
        state.update(content)
    return state.hexdigest()


def base_name(name: str) -> str:
    """Return the name in the base model of the module or tensor `name` of an adapted model."""
    parts = (part for part in name.split(".") if part not in ("base_layer", "original_module"))
    return ".".join(parts)


def adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers of `model` that have adapters or are fully trained, with their names.

    A module with adapters on several of its parameters has nested layers, one per parameter.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            yield name, module


def _arguments(spec: AdapterSpec) -> dict[str, Any]:
    """Return the arguments of peft's `LoraConfig`."""
    return {
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "target_modules": _as_peft(spec.targets),
        "exclude_modules": _as_peft(spec.exclude) or None,
        "target_parameters": list(spec.parameters) or None,
        "rank_pattern": dict(spec.rank_pattern),
        "alpha_pattern": dict(spec.alpha_pattern),
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "modules_to_save": list(spec.modules_to_save) or None,
        "init_lora_weights": _INIT[spec.init],
    }


def _as_peft(targets: str | tuple[str, ...]) -> str | list[str]:
    return targets if isinstance(targets, str) else list(targets)


def _check_named(spec: AdapterSpec, config: Any, modules: list[str], weights: list[str]) -> None:
    """Check that each listed suffix matches a name; peft accepts a list of which only one matches.

    Suffixes that peft has converted into others (those of experts that were layers in earlier models) it has checked.
    """
    targets = () if isinstance(spec.targets, str) else spec.targets
    unconverted = [ending for ending in targets if ending in (config.target_modules or ())]
    excluded = () if isinstance(spec.exclude, str) else spec.exclude
    listed = (
        ("targets", unconverted, modules),
        ("exclude", excluded, modules),
        ("modules_to_save", spec.modules_to_save, modules),
        ("parameters", spec.parameters, weights),
    )
    for key, endings, names in listed:
        for ending in endings:
            if not any(name == ending or name.endswith(f".{ending}") for name in names):
                raise ConfigError(
                    f"model.lora.{key} lists {ending!r}, and nothing in the model has a name that ends so; "
                    "correct or remove it"
                )


def _check_patterns(spec: AdapterSpec, model: torch.nn.Module) -> None:
    """Check that each pattern matches a layer with an adapter."""
    from peft.utils.other import get_pattern_key

    names = {base_name(name) for name, _ in adapted_layers(model)}
    names |= {
        f"{base_name(name)}.{layer.parameter_name}"
        for name, layer in adapted_layers(model)
        if hasattr(layer, "parameter_name")
    }
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(spec, key):
            if all(get_pattern_key([pattern], name) != pattern for name in names):
                raise ConfigError(
                    f"model.lora.{key} has {pattern!r}, which matches the end of no adapted layer's name; "
                    "correct or remove it"
                )


def _check_embeddings(model: torch.nn.Module, *, tied: bool) -> None:
    from peft.tuners.lora import Embedding

    adapted = {id(layer): name for name, layer in adapted_layers(model)}
    for name, layer in adapted_layers(model):
        if isinstance(layer, Embedding):
            raise ConfigError(
                f"model.lora.targets include {name}, an embedding: list it in model.lora.modules_to_save instead"
            )
    for end in _ends(model) if tied else ():
        if id(end) in adapted:
            raise ConfigError(
                f"[model.lora] names {adapted[id(end)]}, whose weights are both the model's input and its output "
                "layer; leave it out, or untie them in the model's folder"
            )


def _tied_embeddings(model: torch.nn.Module) -> bool:
    first, last = _ends(model)
    return last is not None and getattr(first, "weight", None) is getattr(last, "weight", first)


def _ends(model: torch.nn.Module) -> tuple[Any, Any]:
    """Return the layers that a language model begins and ends with; None for those that it does not have."""
    found = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
    first, last = (None if get is None else get() for get in found)
    return first, last
