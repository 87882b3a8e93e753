"""Supervised examples and preference pairs: token ids from prompts of the wire, and the packing of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from starling.algo.text import encode_prompt, encode_response
from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import IntArray, check_prompt
from starling.policy.train.data.packing import Index, Layout, PackedBatch, PromptBlock, check_lengths, pack_sequences


@dataclass(frozen=True, slots=True, eq=False)
class SftExample:
    """A prompt and the response to learn."""

    prompt_ids: IntArray
    """Token ids, [prompt], at least one."""
    response_ids: IntArray
    """Token ids, [response], the end-of-sequence token included."""
    prompt_id: str = ""
    """Names the example in errors."""

    def __post_init__(self) -> None:
        check_prompt(self.prompt_ids, self.prompt_id)
        if not len(self.response_ids):
            raise ConfigError(f"example {self.prompt_id!r} has an empty response: give at least one token to learn")


@dataclass(frozen=True, slots=True, eq=False)
class PreferencePair:
    """A prompt with a chosen and a rejected response."""

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
                f"pair {self.prompt_id!r} has equal responses: chosen and rejected are the same tokens, so remove the "
                "pair"
            )


def examples_of(tokenizer: Any, prompts: Sequence[Prompt]) -> list[SftExample]:
    """Encode `prompts` with their references. Raises ConfigError naming one without a reference."""
    return [
        SftExample(_ids(encode_prompt(tokenizer, prompt)), _ids(encode_response(tokenizer, prompt)), prompt.id)
        for prompt in prompts
    ]


def pairs_of(tokenizer: Any, prompts: Sequence[Prompt]) -> list[PreferencePair]:
    """Encode `prompts` with their references, which are the chosen responses, and their rejected responses.

    Raises:
        ConfigError: names a prompt that lacks one of the two, or whose two responses are equal.
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


@dataclass(frozen=True, slots=True, eq=False)
class PackedPairs:
    """The pairs of a step, packed: responses 2i and 2i + 1 are the chosen and the rejected one of pair i."""

    batch: PackedBatch
    sequence: Index
    """int64 [C]: the response of each token."""
    num_pairs: int
    num_tokens: int
    """Response tokens, without closing tokens."""


def pack_pairs(
    pairs: Sequence[PreferencePair],
    settings: PolicySettings,
    *,
    longest: int | None,
    layout: Layout = "forest",
    closing: int = 0,
) -> PackedPairs:
    """Pack the responses of `pairs`, both of a pair into one microbatch.

    Args:
        pairs: those of the step.
        settings: the token budget of a microbatch.
        longest: maximum number of tokens of a sequence.
        layout: of the microbatches.
        closing: tokens to append to each response, so that its own last token is an input of the model.

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
    blocks = [
        PromptBlock(pair.prompt_ids, (spans[2 * index], spans[2 * index + 1])) for index, pair in enumerate(pairs)
    ]
    check_lengths(blocks, longest + closing if longest is not None else None)
    return PackedPairs(
        batch=pack_sequences(
            blocks,
            np.concatenate(closed),
            settings.tokens_per_microbatch,
            layout=layout,
            share=settings.share_prompts,
            together=True,
        ),
        sequence=np.repeat(np.arange(len(closed), dtype=np.int64), [len(ids) for ids in closed]),
        num_pairs=len(pairs),
        num_tokens=sum(len(ids) for ids in responses),
    )


def _rejected(prompt: Prompt) -> Prompt:
    if not prompt.rejected:
        raise ConfigError(f"pair {prompt.id!r} has no rejected response; name its column in data.rejected_column")
    return msgspec.structs.replace(prompt, reference=prompt.rejected)


def _ids(tokens: Sequence[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)
