"""Recorded routing: the experts that the routers of a mixture chose for each token, so that training can use the same.

Rollout and trainer have different logits, by rounding and by some updates, and their routers would choose other
experts: a token's log-probability would be that of other parameters than those that sampled it. The trainer therefore
gets the rollout's choice, and computes the weights of those experts from its own logits. (Rollout routing replay,
arXiv:2510.11370.)

Legend of shapes: P tokens of the prompt, T of all completions end to end, M layers with experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Experts = npt.NDArray[Any]
"""Ids of experts, uint8 or uint16 [tokens, M, K]; `unrecorded` everywhere for a token of which none were recorded."""


class ExpertSizes(Protocol):
    """Sizes of a model with experts; see `starling.common.wire.messages.ModelExperts`."""

    @property
    def num_layers(self) -> int:
        """M."""

    @property
    def num_experts(self) -> int:
        """Experts of each of these layers."""

    @property
    def num_chosen(self) -> int:
        """K."""


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The recorded experts of a group."""

    prompt: Experts
    """Of the prompt's tokens, [P, M, K]."""
    completions: Experts
    """Of the completions' tokens, [T, M, K]."""


def expert_dtype(num_experts: int) -> np.dtype[Any]:
    """Return the element type of the ids of so many experts, in which one more number is free."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def unrecorded(dtype: np.dtype[Any]) -> int:
    """Return the number that stands for the experts of a token for which none were recorded."""
    return int(np.iinfo(dtype).max)


def no_experts(num_tokens: int, like: Experts) -> Experts:
    """Return what stands for tokens without recorded experts."""
    return np.full((num_tokens, *like.shape[1:]), unrecorded(like.dtype), like.dtype)


def is_recorded(experts: Experts) -> npt.NDArray[np.bool_]:
    """Say of which tokens experts were recorded, [tokens]."""
    found: npt.NDArray[np.bool_] = experts[:, 0, 0] != unrecorded(experts.dtype)
    return found


def fill(experts: Experts, further: Experts) -> Experts:
    """Return `experts`, with those of `further` for tokens for which none were recorded."""
    return np.where(is_recorded(experts)[:, None, None], experts, further).astype(experts.dtype, copy=False)


def join_experts(parts: Iterable[tuple[Experts | None, int]]) -> Experts | None:
    """Return the experts of consecutive parts, each with its number of tokens; None if no part has any."""
    given = list(parts)
    known = next((experts for experts, _ in given if experts is not None), None)
    if known is None:
        return None
    return np.concatenate([experts if experts is not None else no_experts(num, known) for experts, num in given])


def routing_problem(routing: Routing, num_prompt: int, num_tokens: int, sizes: ExpertSizes | None) -> str:
    """Return what is wrong with the experts of a group, as the end of a sentence; empty if nothing is.

    Args:
        routing: from another process.
        num_prompt: tokens of the prompt.
        num_tokens: tokens of the completions.
        sizes: of the model; None if they are not known.
    """
    if len(routing.prompt) != num_prompt:
        return f"experts of {len(routing.prompt)} tokens came with a prompt of {num_prompt}"
    if routing.prompt.shape[1:] != routing.completions.shape[1:] or routing.prompt.dtype != routing.completions.dtype:
        return (
            f"the experts of its prompt are {_form(routing.prompt)}, and those of its completions "
            f"{_form(routing.completions)}"
        )
    return experts_problem(routing.completions, num_tokens, sizes) or experts_problem(routing.prompt, num_prompt, sizes)


def experts_problem(experts: Experts, num_tokens: int, sizes: ExpertSizes | None) -> str:
    """Return what is wrong with the experts of some tokens; see `routing_problem`."""
    if len(experts) != num_tokens:
        return f"experts of {len(experts)} tokens came with {num_tokens} tokens"
    if sizes is not None:
        wanted = sizes.num_layers, sizes.num_chosen, expert_dtype(sizes.num_experts)
        if (*experts.shape[1:], experts.dtype) != wanted:
            return (
                f"its experts are {_form(experts)}, and the model chooses {sizes.num_chosen} of {sizes.num_experts} in "
                f"each of {sizes.num_layers} layers"
            )
    if 0 in experts.shape[1:]:
        return f"its experts are {_form(experts)}: none of a layer"
    none = unrecorded(experts.dtype)
    flat, has_some = experts.reshape(len(experts), experts.shape[1] * experts.shape[2]), is_recorded(experts)
    known = flat[has_some]
    largest = int(known.max(initial=0))
    if largest == none or (flat[~has_some] != none).any():
        return "only some of a token's experts were recorded"
    if sizes is not None and largest >= sizes.num_experts:
        return f"a token has expert {largest}, and the model has {sizes.num_experts}"
    ordered = np.sort(known.reshape(-1, experts.shape[2]), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        return "a token has the same expert twice in a layer"
    return ""


def routing_bytes(sizes: ExpertSizes, num_tokens: int) -> int:
    """Return how many bytes the experts of so many tokens take."""
    return num_tokens * sizes.num_layers * sizes.num_chosen * expert_dtype(sizes.num_experts).itemsize


def pieces(routing: Routing, lengths: Iterable[int]) -> Iterator[Experts]:
    """Yield the experts of each completion, by their lengths."""
    begin = 0
    for length in lengths:
        yield routing.completions[begin : begin + length]
        begin += length


def _form(experts: Experts) -> str:
    return f"{experts.dtype}{list(experts.shape)}"
