"""Memory that a model's blocks take for a microbatch, read off their own code without computing anything.

Which activations a block saves, and which temporaries it makes, follows from its code, and from which of its parameters
are trained. So one block of each kind runs forward and backward over a microbatch of tensors without memory
(`FakeTensorMode`), with the trainer's own attention and checkpointing, and `PeakMemory` counts what would exist. This
takes as long for 128k tokens as for one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from starling.algo.attention.forest import Forest
from starling.common.errors import ConfigError
from starling.policy.settings.memory import MemorySettings
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.memory.blocks import block_list
from starling.policy.train.memory.checkpointing import checkpoint_block
from starling.policy.train.memory.estimate import ActivationMemory, BlockMemory
from starling.policy.train.memory.offload import MIN_ACTIVATION_BYTES, is_whole_storage
from starling.policy.train.memory.peak import PeakMemory
from starling.policy.train.model.attention import model_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

MIN_TOKENS: Final = 1024
"""Tokens of the smallest microbatch that is observed: attention gathers the parts of shorter ones, by indices that it
keeps, and fake ones would be of no use to others."""


def observe_activations(
    model: PreTrainedModel, settings: MemorySettings, num_tokens: int, *, shares: bool = False
) -> ActivationMemory:
    """Return the memory of a microbatch's activations in `model`, which is not changed.

    Args:
        model: on any device, `meta` included; its values do not matter, its types and trained parameters do.
        settings: checkpointing.
        num_tokens: of the microbatch.
        shares: whether sequences of the microbatch share prefixes, whose attention is merged in float32.

    Raises:
        ConfigError: the model's code needs values, so its memory cannot be known without computing.
    """
    kinds = _kinds(model, settings)
    firsts = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    # Before each is another block, and after it: what it adds is then what it adds in the middle of a model.
    numbers = [0, *firsts.values(), 0]
    part = outline_of(model, numbers)
    for block, number in zip(block_list(part), numbers, strict=True):
        if settings.checkpointing != "none" and kinds[number].is_checkpointed:
            checkpoint_block(block, settings.checkpointing)
    num_tokens = max(num_tokens, MIN_TOKENS)
    half = num_tokens // 2
    forest = Forest((half, num_tokens - half), (-1, 0)) if shares else Forest((num_tokens,), (-1,))
    spans, tail, embedding_peak = _observe(part, num_tokens, forest)
    memories = {
        kind: BlockMemory(
            saved=following.before - span.before, working=max(0, span.peak - following.before), movable=span.movable
        )
        for kind, span, following in zip(firsts, spans[1:-1], spans[2:], strict=True)
    }
    return ActivationMemory(
        inputs=spans[0].before,
        blocks=tuple(memories[kind] for kind in kinds),
        tail_saved=max(0, tail.before - spans[-1].before - (spans[1].before - spans[0].before)),
        tail_working=max(0, tail.peak - tail.before),
        embedding_working=max(0, embedding_peak - spans[0].before),
    )


def _observe(part: PreTrainedModel, num_tokens: int, forest: Forest) -> tuple[list[_Span], _Span, int]:
    """Return the result of `_run`; models that cannot attend by segments have a row without them."""
    reasons = []
    for structure in (forest, None):
        try:
            with FakeTensorMode():
                _make_fake(part)
                return _run(part, num_tokens, structure)
        except Exception as error:  # noqa: BLE001 - the code of a model raises anything
            reasons.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
    raise ConfigError(f"the memory of a {type(part).__name__} cannot be observed without its values ({reasons[-1]})")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Everything about a block that its memory depends on."""

    of: type
    parameters: tuple[tuple[str, tuple[int, ...], torch.dtype, bool], ...]
    is_checkpointed: bool


def _kinds(model: PreTrainedModel, settings: MemorySettings) -> list[_Kind]:
    """Return the kind of each block."""
    every = settings.checkpoint_every if settings.checkpointing != "none" else 0
    return [
        _Kind(
            type(block),
            tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in block.named_parameters()),
            bool(every) and number % every == 0,
        )
        for number, block in enumerate(block_list(model))
    ]


def outline_of(model: PreTrainedModel, numbers: Sequence[int]) -> PreTrainedModel:
    """Return a copy of `model` with copies of these of its blocks only, on the device `meta`."""
    blocks = block_list(model)
    layers = torch.nn.ModuleList()
    memo: dict[int, Any] = {**_outlines(model), id(blocks): layers}
    part = copy.deepcopy(model, memo)
    for number in numbers:  # each with parameters of its own, also the second copy of a block
        layers.append(copy.deepcopy(blocks[number], {**memo, **_outlines(blocks[number])}))
    config: Any = part.config.get_text_config()
    config.num_hidden_layers = len(numbers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in numbers]
    return part


def _outlines(module: torch.nn.Module) -> dict[int, Tensor]:
    """Return tensors like those of `module` without memory, by the `id` of each."""
    found: dict[int, Tensor] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        outline = torch.empty_like(tensor, device="meta", requires_grad=False)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        found[id(tensor)] = torch.nn.Parameter(outline, tensor.requires_grad) if is_parameter else outline
    return found


def _make_fake(model: torch.nn.Module) -> None:
    """Replace the tensors of `model` by fake ones of the CPU."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in fakes:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                fakes[id(parameter)] = torch.nn.Parameter(empty, parameter.requires_grad)
            if parameter is not None:
                module._parameters[name] = fakes[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@dataclass(slots=True)
class _Span:
    """A part of the model: bytes held before its forward pass, and the most in either pass."""

    before: int
    peak: int = 0
    movable: int = 0


def _run(model: PreTrainedModel, num_tokens: int, forest: Forest | None) -> tuple[list[_Span], _Span, int]:
    """Run the body of `model` forward and backward. Returns its blocks, its end, and the peak of its embedding."""
    row, numbers = torch.zeros(1, num_tokens, dtype=torch.int64), torch.arange(num_tokens)
    nothing = np.zeros(0, dtype=np.int64)
    inputs = MicrobatchInputs(
        input_ids=row,
        position_ids=row,
        structure=forest,
        source=numbers,
        targets=numbers,
        tokens=nothing,
        segments=nothing,
        sequences=nothing,
        extra={},
    )
    arguments = model_arguments(model, inputs)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with PeakMemory(outside=[*model.parameters(), *model.buffers(), *gradients, row, numbers]) as memory:
        observer = _Observer(model, memory)
        with observer.observing():
            hidden = model.base_model(**arguments)[0]
        trained = hidden.flatten(0, 1).index_select(0, numbers)
        del hidden
        tail = _Span(memory.held_bytes)
        observer.begin_backward(tail)
        trained.backward(torch.empty_like(trained))
    return observer.spans, tail, memory.peak_bytes


class _Observer:
    """Records the memory at the borders of a model's blocks, forward and backward."""

    def __init__(self, model: PreTrainedModel, memory: PeakMemory) -> None:
        self.spans: list[_Span] = []
        self._model, self._memory = model, memory
        self._open: _Span | None = None
        """The part whose peak is being measured."""

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe a forward pass, and prepare for its backward pass."""
        weights = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        known = set[int]()

        def save(tensor: Tensor) -> Tensor:
            key = tensor.untyped_storage()._cdata
            if self.spans and tensor.nbytes >= MIN_ACTIVATION_BYTES and key not in weights | known:
                self.spans[-1].movable += tensor.nbytes
                known.update((key,) if is_whole_storage(tensor) else ())
            return tensor

        handles = [one.register_forward_pre_hook(self._begin, with_kwargs=True) for one in block_list(self._model)]
        handles.append(block_list(self._model)[-1].register_forward_hook(self._end))
        try:
            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_backward(self, tail: _Span) -> None:
        """Begin with what comes after the last block."""
        self._close()
        self._open = tail

    def _begin(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._close()
        self.spans.append(_Span(self._memory.held_bytes))
        self._open = self.spans[-1]
        hidden = args[0] if args else kwargs["hidden_states"]
        before = self.spans[-2] if len(self.spans) > 1 else None
        self._at_gradient(hidden, before)

    def _end(self, _: torch.nn.Module, args: Any, output: Any) -> None:
        self._at_gradient(output[0] if isinstance(output, tuple) else output, self.spans[-1])

    def _at_gradient(self, hidden: Tensor, following: _Span | None) -> None:
        """When the gradient of `hidden` is there, the backward pass of the part before it begins."""

        def change(_: Tensor) -> None:
            self._close()
            self._open = following

        if hidden.requires_grad:
            hidden.register_hook(change)  # type: ignore[no-untyped-call]

    def _close(self) -> None:
        if self._open is not None:
            self._open.peak = max(self._open.peak, self._memory.peak_bytes)
        self._open = None
        self._memory.restart()
