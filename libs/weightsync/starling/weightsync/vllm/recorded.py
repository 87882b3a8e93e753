"""The layout of one vLLM worker, recorded from the model's own weight loader: for any architecture that vLLM loads.

The policy publishes the parameters of the transformers class. Here they are tensors without values: transformers' own
conversion turns them into the tensors of a checkpoint, and `load_weights` of a second model without memory, built as
the worker's own, copies these into its parameters. What the recorder saw is the layout.

Where vLLM changes parameters after loading, the module is *processed*: at an adoption it gets back the parameters that
it was created with; they are filled, and processed as after loading. Where the loader computes, the module is *whole*:
the worker receives the tensors that it is loaded from whole, and vLLM's layerwise reload puts them in. Both happen one
module, or one group of modules, at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from vllm.config import CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from starling.algo.architecture import auto_class, kept_in_float32, turn_off_router_logits
from starling.common.errors import WeightsError
from starling.weightsync.layouts.strided import row_major
from starling.weightsync.plan.layout import Box, Layout, RankLayout, Shard, TensorSpec, check_layout, item_bytes
from starling.weightsync.tensors.modules import detect_place
from starling.weightsync.tensors.recording import ComputedError, Recorder, Recording, StandIn
from starling.weightsync.vllm.layers import layer_to_fill

WHOLE: Final = "whole:"
"""Prefix of the storages of tensors that are received whole."""

UNUSED: Final = ("input_scale", "w13_input_scale", "w2_input_scale")
"""Parameters for static activation scales from a checkpoint; vLLM drops them if there are none."""

TRANSPOSED: Final = {"qwen3_vl_moe": re.compile(r"\.experts\.(gate_up_proj|down_proj)$")}
"""By model type, tensors that published files have transposed and vLLM expects so, while transformers writes them as
its parameters have them."""


class Published(Protocol):
    """What a policy publishes of a model."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """The published tensors by name, in the order of a layout."""

    @property
    def quantised(self) -> Set[str]:
        """Names of those that are codes or scales."""

    def in_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some of the tensors as a checkpoint that vLLM loads has them."""


class PublishedModel:
    """The tensors that a policy publishes of a model in full precision, and their form in a checkpoint."""

    quantised: Set[str] = frozenset()

    def __init__(self, folder: str | Path, dtype: torch.dtype, *, trusted: bool = False) -> None:
        """Make the outline of a model, its names and shapes.

        Args:
            folder: holds ``config.json``.
            dtype: the element type in which vLLM computes.
            trusted: whether to run Python code from the folder.
        """
        from transformers import AutoConfig

        described = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
        turn_off_router_logits(described)
        with torch.device("meta"):
            made = auto_class(described).from_config(described, dtype=dtype, trust_remote_code=trusted)
        self._outline: Any = made
        self._transposed = TRANSPOSED.get(described.model_type)
        named = dict(made.named_parameters())
        saved = made.state_dict().keys()
        named.update((name, buffer) for name, buffer in made.named_buffers() if name in saved)
        kept = kept_in_float32(made, dtype)
        self.tensors: dict[str, TensorSpec] = {
            name: TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype="float32" if kept(name) else str(tensor.dtype).removeprefix("torch."),
            )
            for name, tensor in named.items()
        }
        """Parameters and persistent buffers by their names in the module; of tied ones the first."""
        self.tied = {name for name, _ in made.named_parameters(remove_duplicate=False)} - named.keys()
        """The other names of tied ones."""

    @classmethod
    def of(cls, config: VllmConfig) -> PublishedModel:
        """Make the outline of the model of an engine, in one of its processes."""
        model = config.model_config
        # vLLM may compute with the classes of transformers, and has them compile themselves in this process.
        with set_current_vllm_config(_uncompiled(config)):
            return cls(model.model, model.dtype, trusted=model.trust_remote_code)

    def in_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return some of the tensors as a checkpoint has them: other names, and perhaps taken apart or joined."""
        from transformers.core_model_loading import revert_weight_conversion

        converted: dict[str, Tensor] = revert_weight_conversion(self._outline, dict(tensors))
        if self._transposed is not None:
            for name in filter(self._transposed.search, converted):
                converted[name] = converted[name].transpose(-1, -2)
        return converted


@dataclass(frozen=True)
class WholeGroup:
    """Modules that are loaded together from whole tensors."""

    modules: tuple[str, ...]
    tensors: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RecordedWorker:
    """What one worker receives."""

    layout: Layout
    """Of one rank. Storages have the names of parameters, or `WHOLE` and the name of a tensor."""
    processed: Mapping[str, tuple[str, ...]]
    """By module that vLLM changes after loading, its parameters in the layout, without the module's name."""
    whole: tuple[WholeGroup, ...]
    padded: tuple[str, ...]
    """Parameters with elements that no tensor fills."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the parameters as they were made for loading."""


def record_worker(model: torch.nn.Module, config: VllmConfig, published: Published, replica: str) -> RecordedWorker:
    """Record the layout of one worker.

    Args:
        model: the worker's part of the model, as vLLM computes with it. It is not changed.
        config: vLLM's configuration.
        published: the model that the policy publishes.
        replica: name of the replica in the layout.

    Raises:
        WeightsError: a parameter that the loader fills with no published tensor.
    """
    live = loadable(model)
    fresh = _without_memory(model, config)
    with set_current_vllm_config(config):  # some loaders read it
        recording, refused = _record(fresh, published)
    made = loadable(fresh)
    changed = {name for name, tensor in made.items() if not _is_same(tensor, live.get(name))}
    # Kernels may pack codes and scales in their old shapes.
    changed |= {name for name, copies in recording.copies.items() if copies.keys() & published.quantised}
    processed = _processed(fresh, recording, changed)
    whole = _whole_groups(recording, refused, changed, processed, published)
    _check_filled(fresh, recording, whole, has_defaults=bool(published.quantised))
    of_whole = {name for group in whole for name in group.tensors}
    modules = {module for group in whole for module in group.modules}
    index = {name: i for i, name in enumerate(published.tensors)}
    shards: list[Shard] = []
    padded = sorted(recording.zeros)
    for parameter, copies in recording.copies.items():
        if parameter.rpartition(".")[0] in modules:
            continue
        element_bytes = made[parameter].element_size()
        num_filled = 0
        for tensor, boxes in copies.items():
            for box, place in boxes:
                shards.append(
                    Shard(
                        tensor=index[tensor],
                        box=box,
                        storage=parameter,
                        offset_bytes=place.offset * element_bytes,
                        strides=place.strides,
                    )
                )
                num_filled += box.volume
        if num_filled < made[parameter].numel() and parameter.rpartition(".")[0] not in processed:
            padded.append(parameter)
    for name in published.tensors:
        if name in of_whole:
            shards.append(_whole_shard(index[name], published.tensors[name]))
    ranks = (RankLayout(place=detect_place(live.values()), shards=tuple(shards)),)
    layout = Layout(replica=replica, tensors=tuple(published.tensors.values()), ranks=ranks)
    check_layout(layout)
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    return RecordedWorker(layout, processed, tuple(whole), tuple(padded), shapes)


def loadable(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by name, shared ones once."""
    found: dict[str, Tensor] = {name: parameter.data for name, parameter in model.named_parameters()}
    found.update(model.named_buffers())
    return found


def _without_memory(model: torch.nn.Module, config: VllmConfig) -> torch.nn.Module:
    """Return a model like `model`, as it was before loading, without memory for its parameters.

    A few classes read tensors when they are built. `model` itself then serves: recording does not write.
    """
    try:
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            fresh: torch.nn.Module = initialize_model(_uncompiled(config))
            return fresh
    except NotImplementedError:  # torch's error for values of a tensor on `meta`
        return model


def _uncompiled(config: VllmConfig) -> VllmConfig:
    """Return `config` for a further model, which is not compiled: its layers register themselves by name, once."""
    own = copy.copy(config)
    own.compilation_config = copy.copy(config.compilation_config)
    own.compilation_config.mode = CompilationMode.NONE
    own.compilation_config.static_forward_context = {}
    own.compilation_config.static_all_moe_layers = []
    return own


def _is_same(fresh: Tensor, live: Tensor | None) -> bool:
    """Whether a parameter is still as it was made for loading."""
    if live is None:
        return False
    as_made = (fresh.shape, fresh.dtype, fresh.stride())
    return as_made == (live.shape, live.dtype, live.stride())


def _record(fresh: torch.nn.Module, published: Published) -> tuple[Recording, dict[str, str]]:
    """Record the loader; also return the tensors that it refuses without values, with its reasons.

    A loader that refuses one tensor is called again without it, and without those of other layers of the same kind.
    """
    refused: dict[str, str] = {}
    while True:
        recorder = Recorder(loadable(fresh))
        last = _Last()
        with recorder:
            stand_ins = {name: recorder.stand_in(spec) for name, spec in published.tensors.items()}
            tensors = published.in_checkpoint(stand_ins)
            try:
                fresh.load_weights(last.of(tensors, refused))  # type: ignore[operator]
                return recorder.recording(), refused
            except ComputedError as error:
                names, reason = error.tensors, str(error)
            except Exception as error:  # a loader of vLLM may raise anything
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
                if "data pointer" not in reason and not isinstance(error, NotImplementedError):
                    raise WeightsError(
                        f"vLLM's loader of {type(fresh).__name__} does not take what transformers would save at "
                        f"{', '.join(sorted(last.sources))}: {reason}"
                    ) from error
                names = last.sources
        kinds = {_kind(name) for name in names}
        new = {name: reason for name in published.tensors if _kind(name) in kinds and name not in refused}
        if not new:
            raise WeightsError(f"vLLM's loader of {type(fresh).__name__} cannot be recorded: {reason}")
        refused |= new


class _Last:
    """The published tensors of the checkpoint's tensor that a loader took last."""

    def __init__(self) -> None:
        self.sources: frozenset[str] = frozenset()

    def of(self, tensors: Mapping[str, Tensor], refused: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that do not come from `refused` ones."""
        for name, tensor in tensors.items():
            assert isinstance(tensor, StandIn)
            self.sources = tensor.buffer.tensors()
            if not self.sources & refused.keys():
                yield name, tensor


def _kind(name: str) -> str:
    """Return a name without the numbers of layers and experts."""
    return re.sub(r"\d+", "*", name)


def _processed(fresh: torch.nn.Module, recording: Recording, changed: set[str]) -> dict[str, tuple[str, ...]]:
    """Return the modules whose own method changes what is only copied into them, and their recorded parameters."""
    found: dict[str, list[str]] = {}
    for name in recording.copies:
        found.setdefault(name.rpartition(".")[0], []).append(name.rpartition(".")[2])
    modules = {name.rpartition(".")[0] for name in changed & recording.copies.keys()}
    computed = {name.rpartition(".")[0] for name in recording.computed}
    return {
        name: tuple(found[name])
        for name in sorted(modules - computed)
        if _has(fresh.get_submodule(name), QuantizeMethodBase)
    }


def _whole_groups(
    recording: Recording,
    refused: Mapping[str, str],
    changed: set[str],
    processed: Mapping[str, Sequence[str]],
    published: Published,
) -> list[WholeGroup]:
    """Return the groups of modules that are loaded whole."""
    fed: dict[str, set[str]] = {}  # tensors by module
    for name, copies in recording.copies.items():
        fed.setdefault(name.rpartition(".")[0], set()).update(copies)
    for name, tensors in recording.computed.items():
        fed.setdefault(name.rpartition(".")[0], set()).update(tensors)
    reasons: dict[str, str] = {}
    for name, reason in recording.reasons.items():
        reasons.setdefault(name.rpartition(".")[0], f"the loader of {name} {reason}")
    for name in changed & (recording.copies.keys() | recording.computed.keys()):
        if name.rpartition(".")[0] not in processed:
            reasons.setdefault(name.rpartition(".")[0], f"vLLM changes {name} after loading it")
    groups = [_Group({module}, fed[module], reason) for module, reason in reasons.items()]
    groups += [_Group(set(), {name}, reason) for name, reason in refused.items()]
    joined: list[_Group] = []
    together = _sources(published) if groups else []
    for group in groups:
        for names in together:
            if names & group.tensors:
                group.tensors |= names
        others = [other for other in joined if other.tensors & group.tensors]
        for other in others:
            group.modules |= other.modules
            group.tensors |= other.tensors
            joined.remove(other)
        joined.append(group)
    order = {name: i for i, name in enumerate(published.tensors)}
    return [
        WholeGroup(tuple(sorted(group.modules)), tuple(sorted(group.tensors, key=order.__getitem__)), group.reason)
        for group in joined
    ]


@dataclass
class _Group:
    """A `WholeGroup` that grows."""

    modules: set[str]
    tensors: set[str]
    reason: str


def _sources(published: Published) -> list[set[str]]:
    """Return disjoint sets of published tensors: those that come together in a tensor of the checkpoint."""
    recorder = Recorder({})
    with recorder:
        stand_ins = {name: recorder.stand_in(spec) for name, spec in published.tensors.items()}
        converted = published.in_checkpoint(stand_ins)
    joined: list[set[str]] = []
    for tensor in converted.values():
        assert isinstance(tensor, StandIn)
        names = set(tensor.buffer.tensors())
        if len(names) > 1:
            others = [other for other in joined if other & names]
            joined = [other for other in joined if not other & names] + [names.union(*others)]
    return joined


def _has(layer: torch.nn.Module, kind: type[QuantizeMethodBase]) -> bool:
    return isinstance(getattr(layer, "quant_method", None), kind)


def _check_filled(
    fresh: torch.nn.Module, recording: Recording, whole: Sequence[WholeGroup], *, has_defaults: bool
) -> None:
    """Check that versions fill every parameter: others would keep what vLLM was started with.

    With `has_defaults`, scales of activations and of the KV cache need not be filled: see `record_quantised`.
    """
    if any(not group.modules for group in whole):
        return  # which parameters the loader fills from refused tensors is not known
    filled = recording.copies.keys() | recording.computed.keys() | recording.zeros
    defaults = _with_defaults(fresh) if has_defaults else set[str]()
    empty = [
        name for name, parameter in fresh.named_parameters() if name not in filled | defaults and parameter.numel()
    ]
    if empty:
        raise WeightsError(
            f"vLLM's loader of {type(fresh).__name__} fills {empty[0]} ({len(empty)} such) with no tensor of the "
            "transformers class, so no version would; use another engine."
        )


def _with_defaults(fresh: torch.nn.Module) -> set[str]:
    """Return the parameters for scales without which vLLM computes: with 1 for those of the KV cache."""
    found = {name for name, _ in fresh.named_parameters() if name.rpartition(".")[2] in UNUSED}
    for path, layer in fresh.named_modules():
        if _has(layer, BaseKVCacheMethod):
            found.update(f"{path}.{name}" for name, _ in layer.named_parameters())
    return found


def _whole_shard(index: int, spec: TensorSpec) -> Shard:
    box = Box(offset=(0,) * len(spec.shape), size=spec.shape)
    return Shard(tensor=index, box=box, storage=WHOLE + spec.name, offset_bytes=0, strides=row_major(spec.shape))


class PartLoader:
    """Puts the parts of a version that are not copied into live parameters into the modules of one worker."""

    def __init__(
        self, model: torch.nn.Module, config: VllmConfig, published: Published, recorded: RecordedWorker
    ) -> None:
        self._model, self._config, self._published, self._recorded = model, config, published, recorded
        sizes = [self._size(group.tensors) for group in recorded.whole]
        shards, specs = recorded.layout.ranks[0].shards, recorded.layout.tensors
        self._dtypes = {shard.storage: getattr(torch, specs[shard.tensor].dtype) for shard in shards}
        for module, names in recorded.processed.items():
            storages = {f"{module}.{name}" for name in names}
            held = (shard for shard in shards if shard.storage in storages)
            sizes.append(sum(shard.box.volume * item_bytes(recorded.layout.tensors[shard.tensor]) for shard in held))
        self.part_bytes = max(sizes, default=0)
        """Bytes of the largest part: the memory that loading needs besides the staging area."""

    def _size(self, names: Iterable[str]) -> int:
        specs = (self._published.tensors[name] for name in names)
        return sum(torch.Size(spec.shape).numel() * item_bytes(spec) for spec in specs)

    def parts_to_fill(self) -> Iterator[Mapping[str, Tensor]]:
        """Yield tensors to fill, by storage: the live parameters, and then part after part.

        A part is loaded when the next one is requested.
        """
        yield self._live()
        for module, names in self._recorded.processed.items():
            for layer in layer_to_fill(self._model.get_submodule(module), self._config):
                for name, parameter in layer.named_parameters(recurse=False):
                    parameter.data.fill_(float("nan") if name in UNUSED else 0)  # what nothing fills is padding
                yield {f"{module}.{name}": self._typed(f"{module}.{name}", layer.get_parameter(name)) for name in names}
        for group in self._recorded.whole:
            specs = [self._published.tensors[name] for name in group.tensors]
            tensors = {spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs}
            yield {WHOLE + name: tensor for name, tensor in tensors.items()}
            self._load(group, tensors)

    def _typed(self, storage: str, parameter: Tensor) -> Tensor:
        """Return the bits of a parameter in the element type in which they are published."""
        return parameter.data.view(self._dtypes.get(storage, parameter.dtype))

    def _live(self) -> dict[str, Tensor]:
        """Return the tensors that are filled as they are."""
        apart = {f"{module}.{name}" for module, names in self._recorded.processed.items() for name in names}
        return {name: tensor for name, tensor in loadable(self._model).items() if name not in apart}

    @torch.no_grad()
    def _load(self, group: WholeGroup, tensors: Mapping[str, Tensor]) -> None:
        only = _Modules(self._model.get_submodule(name) for name in group.modules)
        with set_current_vllm_config(self._config):
            initialize_layerwise_reload(only)
            try:
                self._model.load_weights(self._published.in_checkpoint(tensors).items())  # type: ignore[operator]
            finally:
                finalize_layerwise_reload(only, self._config.model_config)


class _Modules(torch.nn.Module):
    """Some modules, for functions of vLLM that go through all modules of a model."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.__dict__["listed"] = list(modules)

    def modules(self, *_: Any, **__: Any) -> Iterator[torch.nn.Module]:
        """Yield the modules, without those inside them."""
        return iter(self.__dict__["listed"])


def renew_derived(model: torch.nn.Module, config: VllmConfig) -> None:
    """Renew what latent attention computes from its parameters after loading; call it after each version."""
    with set_current_vllm_config(config), torch.no_grad():
        for module in model.modules():
            if isinstance(module, MLAAttention):
                module.process_weights_after_loading(config.model_config.dtype)
