"""What supervised steps are made of: prompts of the wire become token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from starling.algo.text import encode_prompt, encode_response
from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import IntArray, SftExample
from starling.policy.train.data.packing import PackedBatch, PromptBlock, check_lengths, pack_sequences


def examples_of(tokenizer: Any, prompts: Sequence[Prompt]) -> list[SftExample]:
    """Encode `prompts` with their references. Raises ConfigError that names one without."""
    return [
        SftExample(_ids(encode_prompt(tokenizer, prompt)), _ids(encode_response(tokenizer, prompt)), prompt.id)
        for prompt in prompts
    ]


def pairs_of(tokenizer: Any, prompts: Sequence[Prompt]) -> list[PreferencePair]:
    """Encode `prompts` with their references, the chosen responses, and the rejected ones.

    Raises:
        ConfigError: names a prompt that lacks one of the two, or has twice the same.
    """
    return [
        PreferencePair(
            _ids(encode_prompt(tokenizer, prompt)),
            _ids(encode_response(tokenizer, prompt)),
            _ids(encode_response(tokenizer, _rejected(prompt))),
            prompt.id,
        )
        for prompt in prompts
    ]


def _rejected(prompt: Prompt) -> Prompt:
    if not prompt.rejected:
        raise ConfigError(f"pair {prompt.id!r} has no rejected response; name its column in data.rejected_column")
    return msgspec.structs.replace(prompt, reference=prompt.rejected)


def _ids(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


# JOINED from starling.policy.train.pairs: Preferences: pairs of a chosen and a rejected response to a prompt,
# laid out so that both share a microbatch.


@dataclass(frozen=True, slots=True, eq=False)
class PreferencePair:
    """A prompt with a better and a worse response."""

    prompt_ids: IntArray
    """Token ids, [prompt], at least one."""
    chosen_ids: IntArray
    """Token ids of the better response, the end-of-sequence token included."""
    rejected_ids: IntArray
    """Token ids of the worse one, likewise."""
    prompt_id: str = ""
    """Names the pair in errors."""

    def __post_init__(self) -> None:
        for name, ids in (("prompt", self.prompt_ids), ("chosen", self.chosen_ids), ("rejected", self.rejected_ids)):
            if not len(ids):
                raise ConfigError(f"pair {self.prompt_id!r} has no {name} tokens: give at least one")
        if np.array_equal(self.chosen_ids, self.rejected_ids):
            raise ConfigError(
                f"pair {self.prompt_id!r} prefers a response to itself: chosen and rejected are the same tokens, so "
                "remove the pair"
            )


@dataclass(frozen=True, slots=True, eq=False)
class PackedPairs:
    """The pairs of a step, P of them: response 2p is the chosen one of pair p, and 2p + 1 the rejected one."""

    batch: PackedBatch
    token_ids: IntArray
    """Of all responses, end to end."""
    sequence: npt.NDArray[np.int64]
    """The response that holds each token."""
    num_pairs: int
    num_tokens: int
    """Response tokens, without those that `closing` added."""


def pack_pairs(
    pairs: Sequence[PreferencePair],
    settings: PolicySettings,
    *,
    longest: int | None,
    pair_cost: float,
    closing: int = 0,
) -> PackedPairs:
    """Lay out the responses of `pairs`, both of a pair in one block behind their prompt.

    Args:
        pairs: those of the step.
        settings: the budget of a microbatch.
        longest: most tokens of a sequence.
        pair_cost: see `starling.algo.packing.PAIR_COST`.
        closing: tokens to add at the end of each response, so that its own last token is an input of the model.

    Raises:
        ConfigError: there are no pairs, or a sequence is too long.
    """
    if not pairs:
        raise ConfigError("a step of preferences has no pairs: there is nothing to train")
    tail = np.zeros(closing, dtype=np.int32)
    responses = [ids for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)]
    closed = [np.concatenate([ids, tail]).astype(np.int32) for ids in responses]
    ends = np.cumsum([len(ids) for ids in closed]).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    prompted = [
        PromptBlock(pair.prompt_ids, (spans[2 * index], spans[2 * index + 1])) for index, pair in enumerate(pairs)
    ]
    check_lengths(prompted, longest + closing if longest is not None else None)
    return PackedPairs(
        batch=pack_sequences(prompted, settings.tokens_per_microbatch, together=True, pair_cost=pair_cost),
        token_ids=np.concatenate(closed),
        sequence=np.repeat(np.arange(len(closed), dtype=np.int64), [len(ids) for ids in closed]),
        num_pairs=len(pairs),
        num_tokens=sum(len(ids) for ids in responses),
    )
