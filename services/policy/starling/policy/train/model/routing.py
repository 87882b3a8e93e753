"""Replay of routing: the routers of a mixture are made to choose recorded experts (arXiv:2510.11370).

A router runs as it is, but for the choice itself. Where it takes the largest of the scores of all experts
(`torch.topk`), it gets the recorded experts, with its own scores of them. What it makes of these is the model's own
code: a softmax before or after, a bias for the choice alone, a normalisation, a factor. So the weights of the experts
are differentiable, and the router's own choice, replayed, gives the same bits.

Whether a model routes like this is not looked up but observed: its routers are made to choose others than their own on
some tokens, and what arrives at the experts is compared.

What is replayed is a context of the forward pass. A block that is recomputed in the backward pass, perhaps in another
thread or after the forward pass of another microbatch, is recomputed in the context in which it was computed.

Legend of shapes: T tokens, E experts of a layer, K experts of a token, M layers with experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import structlog
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from starling.algo.experts import find_experts, mixture_name, num_experts
from starling.common.wire.messages import ModelExperts
from starling.policy.train.data.replay import UNRECORDED, Replay

log = structlog.get_logger(__name__)

_REPLAY: ContextVar[Replay | None] = ContextVar("replay", default=None)
_FOUND: Final[WeakKeyDictionary[torch.nn.Module, ModelExperts | None]] = WeakKeyDictionary()
_CHOOSES: Final = (torch.topk, Tensor.topk)
_PROBE_TOKENS: Final = 5
_LEAST_PROBABILITY: Final = 1e-20
"""Of all recorded experts of a token together: a model may divide by it, and by its square in the backward pass."""


@contextmanager
def replaying(replay: Replay | None) -> Iterator[None]:
    """Make the routers choose the experts of `replay` in the forward passes of the context; their own if it is None."""
    token = _REPLAY.set(replay)
    try:
        yield
    finally:
        _REPLAY.reset(token)


def in_present_replay(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, to be called now and perhaps again, such that it is always called in the replay of now."""
    replay = _REPLAY.get()
    if replay is None:
        return function
    first = [replay]

    def call(*args: Any, **kwargs: Any) -> Any:
        with replaying(first.pop() if first else replay.uncounted):
            return function(*args, **kwargs)

    return call


def own_choice() -> Tensor | None:
    """Return the experts that the router of the present mixture would have chosen for each token, [..., K].

    None outside of a mixture, and where none are replayed.
    """
    modes = _MODES.get()
    return modes[-1].own if modes else None


def find_routing(model: torch.nn.Module) -> ModelExperts | None:
    """Return the sizes of the experts of `model`, whose routers `replaying` then affects.

    None for a model without experts, and for one whose routers cannot be made to choose others. The first call runs it
    on a few tokens; the result is cached for the lifetime of the model.
    """
    if model not in _FOUND:
        _FOUND[model] = None
        reason = (_prepare(model) or _observe(model)) if find_experts(model) else ""
        if reason:
            log.info("recorded experts cannot be replayed", model=type(model).__name__, reason=reason)
    return _FOUND[model]


def declared_experts(model: torch.nn.Module) -> ModelExperts | None:
    """Return the sizes of the experts of `model`, which may have no memory, by what its routers say of themselves.

    None for a model without experts. Whether others can be replayed is only observed with memory, by `find_routing`.
    """
    layers = find_experts(model)
    if not layers:
        return None
    name, experts = next(iter(layers.items()))
    mixture = model.get_submodule(mixture_name(name))
    declared: list[Any] = [getattr(one, "top_k", None) for one in mixture.modules()]
    num_chosen = next((one for one in declared if isinstance(one, int)), 1)
    return ModelExperts(num_layers=len(layers), num_experts=num_experts(experts), num_chosen=num_chosen)


def copy_routing(sample: torch.nn.Module, model: torch.nn.Module) -> None:
    """Let `find_routing` return for `model`, with more blocks, what it has found for a sample of it."""
    sizes = _FOUND[sample]
    if sizes is not None and not _prepare(model):
        layers = len(find_experts(model))
        sizes = ModelExperts(num_layers=layers, num_experts=sizes.num_experts, num_chosen=sizes.num_chosen)
    _FOUND[model] = sizes


def _prepare(model: torch.nn.Module) -> str:
    """Let `replaying` affect the mixtures of `model`; return why it cannot, empty if it can."""
    layers = find_experts(model)
    numbers = sorted({num_experts(one) for one in layers.values()})
    if len(numbers) != 1:
        return "its layers have different numbers of experts"
    for layer, name in enumerate(layers):
        mixture = model.get_submodule(mixture_name(name))
        mixture.register_forward_pre_hook(partial(_enter, layer, numbers[0]))
        mixture.register_forward_hook(_leave, always_call=True)
    return ""


class NotReplayedError(RuntimeError):
    """A router did not choose by `torch.topk` among the scores of all experts, for as many tokens as were recorded."""


class _Choice(TorchFunctionMode):
    """The pass of one mixture, in which the largest of the scores of all experts are the recorded ones."""

    def __init__(self, replay: Replay, layer: int, num_experts: int) -> None:
        super().__init__()
        self._replay, self._layer, self._num_experts = replay, layer, num_experts
        self.own: Tensor | None = None
        """The experts that the router would have chosen, once it has."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = func(*args, **(kwargs or {}))
        if func not in _CHOOSES:
            return own
        scores: Tensor = args[0] if args else (kwargs or {})["input"]
        recorded = self._replay.experts[:, self._layer]
        is_choice = scores.shape[:-1] == own.indices.shape[:-1] and scores.shape[-1] == self._num_experts
        if not is_choice or own.indices.numel() != recorded.numel() or own.indices.shape[-1] != recorded.shape[-1]:
            return own
        self.own = own.indices
        return self._chosen(scores, own.indices, recorded)

    def check(self) -> None:
        """Raise `NotReplayedError` if the pass has ended without a choice of recorded experts."""
        if self.own is None:
            num_slots, _, num_chosen = self._replay.experts.shape
            raise NotReplayedError(
                f"the router of layer {self._layer} does not choose by the largest of {self._num_experts} scores, or"
                f" not {num_chosen} experts for each of {num_slots} tokens: recorded experts cannot be replayed"
            )

    def _chosen(self, scores: Tensor, own: Tensor, recorded: Tensor) -> Any:
        """Return the recorded experts of each token in place of its `own`, and their scores."""
        recorded = recorded.to(own.dtype).view_as(own)
        is_recorded = recorded != UNRECORDED
        chosen = torch.where(is_recorded & ~_are_impossible(scores.detach(), recorded), recorded, own)
        among_own = (recorded[..., None] == own[..., None, :]).any(-1)
        self._replay.differing[self._layer] = (is_recorded & ~among_own).sum()
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _are_impossible(scores: Tensor, experts: Tensor) -> Tensor:
    """Say of which tokens `experts` [T, K] have no probability, [T, 1], where `scores` are those of a softmax.

    Models that divide by the sum of these probabilities would compute NaN, and the step could not be trained. A rollout
    with nearly the same weights chooses no such experts, and one that sends others must not stop the training.
    """
    are_probabilities = (scores >= 0).all(-1, keepdim=True) & ((scores.sum(-1, keepdim=True) - 1).abs() < 1e-5)
    of_experts = scores.gather(-1, experts.clamp(min=0)).sum(-1, keepdim=True)
    return are_probabilities & (of_experts < _LEAST_PROBABILITY)


_MODES: ContextVar[tuple[_Choice, ...]] = ContextVar("modes", default=())


def _enter(layer: int, num_experts: int, _: torch.nn.Module, __: Any) -> None:
    replay = _REPLAY.get()
    if replay is None:
        return
    mode = _Choice(replay, layer, num_experts)
    mode.__enter__()  # type: ignore[no-untyped-call]
    _MODES.set((*_MODES.get(), mode))


def _leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
    if _REPLAY.get() is None:
        return
    *outer, mode = _MODES.get()
    _MODES.set(tuple(outer))
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    mode.check()


@torch.no_grad()
def _observe(model: torch.nn.Module) -> str:
    """Make the routers of `model` choose certain experts on some tokens, and note its sizes.

    Returns why they did not, empty if they did.
    """
    try:
        own = _arrived(model, None)
        sizes = {tuple(chosen.shape) for chosen, _ in own}
        if len(sizes) != 1 or len(own) != len(find_experts(model)):
            return "its routers choose different numbers of experts, or of tokens"
        ((num_tokens, num_chosen),) = sizes
        number = num_experts(next(iter(find_experts(model).values())))
        wanted = _others(num_tokens, len(own), num_chosen, number).to(own[0][0].device)
        for layer, (chosen, weights) in enumerate(_arrived(model, Replay(wanted))):
            if not torch.equal(chosen.to(torch.int16), wanted[:, layer]):
                return "its routers do not choose by the largest scores of all experts"
            if not (weights.isfinite() & (weights != 0)).all():
                return "its routers give no weight to experts outside of certain groups"
    except torch.OutOfMemoryError:
        raise
    except NotReplayedError:
        return "its routers do not choose by the largest scores of all experts"
    except Exception as error:  # noqa: BLE001 - the code of a model raises anything
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    _FOUND[model] = ModelExperts(num_layers=len(own), num_experts=number, num_chosen=num_chosen)
    return ""


def _arrived(model: Any, replay: Replay | None) -> list[tuple[Tensor, Tensor]]:
    """Return the experts [T, K] and their weights [T, K] that arrive at each layer's experts in a pass over a few
    tokens."""
    found: list[tuple[Tensor, Tensor]] = []

    def observe(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
        found.append((given["top_k_index"], given["top_k_weights"]))

    handles = [one.register_forward_pre_hook(observe, with_kwargs=True) for one in find_experts(model).values()]
    try:
        tokens = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=model.device)
        with replaying(replay):
            model.base_model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _others(num_tokens: int, num_layers: int, num_chosen: int, num_experts: int) -> Tensor:
    """Return experts of tokens, in no order of preference and from all groups of experts: int16 [T, M, K]."""
    step = max(1, num_experts // num_chosen)
    first = torch.arange(num_tokens)[:, None, None] + torch.arange(num_layers)[:, None]
    return ((first + step * torch.arange(num_chosen)) % num_experts).to(torch.int16)
