"""Forward passes of the embedded engine: prefill and decode over the KV cache of the running rows.

Vision-language models of the Qwen family are prefilled with the pixels of a prompt's images and three-dimensional
positions; afterwards their rows decode like those of text prompts, with positions continuing from the prompt's last.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from starling.common.errors import ConfigError
from starling.rollout.engine.base import PromptLogprobs
from starling.rollout.engine.embedded.attention import GROUPED_DECODE, use_grouped_decode
from starling.rollout.engine.embedded.batch import PrefillSequence, last_position
from starling.rollout.engine.embedded.cache import RowCache
from starling.rollout.engine.embedded.sampling import join_prompt_logprobs, score_prompt_tokens

PREFILL_TOKENS: Final = 4096
"""Maximum number of tokens of one prefill, with padding: bounds the mask's memory and the gap between decode steps."""

FULL, SLIDING = "full_attention", "sliding_attention"


class Forward:
    """A model and the KV cache of its rows, which may have different lengths. The attention function is replaced.

    Used under `torch.inference_mode`, by one thread.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare `model` for decoding, with no rows.

        Raises:
            ConfigError: the model cannot be decoded this way.
        """
        self._sliding = _attention_kinds(model)
        use_grouped_decode(model)
        self._model = model
        first = next(model.parameters())
        self.device, self._dtype = first.device, first.dtype
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._window: int | None = model.config.get_text_config().sliding_window if self._sliding else None
        self.cache = RowCache(self._dtype, self._window)

    def decode(self, last: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> torch.Tensor:
        """Feed every row its newest token, at `position`; return the logits of the next token.

        Args:
            last, position: int64 [rows].

        Returns:
            [rows, vocabulary].
        """
        self.cache.begin()
        full, sliding = self.cache.masks(self.device)
        logits = self._model(
            input_ids=self.to_device(last)[:, None],
            position_ids=self.to_device(position)[:, None],
            attention_mask=self._by_kind(full, sliding),
            past_key_values=self.cache,
            use_cache=True,
        ).logits
        self.cache.advance()
        return _last(logits)

    def prefill(self, sequences: Sequence[PrefillSequence], version: int) -> torch.Tensor:
        """Prefill `sequences` and add their rows to the cache, in order; return the logits after each row's last token.

        Sets `prompt_logprobs`, with `version`, of the groups that need it.

        Returns:
            [new rows, vocabulary].
        """
        parts = [self._prefill(chunk, version) for chunk in _chunks(sequences)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def recompute(self, sequences: Sequence[PrefillSequence], version: int) -> None:
        """Recompute the KV cache of all rows; `sequences` has one row each, in batch order."""
        self.cache = RowCache(self._dtype, self._window)  # frees the old one first: both may not fit into memory
        self.prefill(sequences, version)

    def to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Return `values` as a tensor on the model's device."""
        return torch.from_numpy(values).to(self.device)

    def _prefill(self, sequences: Sequence[PrefillSequence], version: int) -> torch.Tensor:
        first = sequences[0].group
        if len(sequences[0].ids) > PREFILL_TOKENS and first.needs_prompt_logprobs and not first.request.tensors:
            return self._prefill_in_parts(sequences[0], version)
        lengths = np.array([len(sequence.ids) for sequence in sequences])
        counts = np.array([len(sequence.indices) for sequence in sequences])
        limits = np.array([sequence.group.max_cached_tokens for sequence in sequences])
        columns = int(lengths.max())
        ids = np.zeros((len(sequences), columns), np.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[columns - len(sequence.ids) :] = sequence.ids
        starts = columns - lengths
        prefilled = DynamicCache()
        scored = [number for number, sequence in enumerate(sequences) if sequence.group.needs_prompt_logprobs]
        keep = max((len(sequences[number].ids) for number in scored), default=1)
        extra = {"logits_to_keep": keep} if self._takes_logits_to_keep else {}
        logits = self._model(
            input_ids=self.to_device(ids),
            position_ids=self.to_device(_positions(sequences, starts, columns)),
            attention_mask=self._prefill_mask(starts, columns) if starts.any() else None,
            past_key_values=prefilled,
            use_cache=True,
            **{name: self.to_device(array) for name, array in _pixels(sequences).items()},
            **extra,
        ).logits
        for number in scored:
            group, start = sequences[number].group, logits.shape[1] - len(sequences[number].ids)
            prompt = group.request.prompt_ids
            group.prompt_logprobs = score_prompt_tokens(
                logits[number, start : start + len(prompt) - 1], prompt, version
            )
        which = np.repeat(np.arange(len(sequences)), counts)
        self.cache.join(prefilled, which, lengths[which], limits[which])
        return _last(logits).index_select(0, self.to_device(which))

    def _prefill_in_parts(self, sequence: PrefillSequence, version: int) -> torch.Tensor:
        """Prefill a long sequence that needs prompt log-probabilities: all its logits at once would take gigabytes."""
        ids, prefilled, columns = np.array([sequence.ids], np.int64), DynamicCache(), len(sequence.ids)
        found: list[PromptLogprobs] = []
        for begin in range(0, columns, PREFILL_TOKENS):
            some = np.arange(begin, min(begin + PREFILL_TOKENS, columns))
            logits = self._model(
                input_ids=self.to_device(ids[:, some]),
                position_ids=self.to_device(some[None]),
                past_key_values=prefilled,
                use_cache=True,
            ).logits
            prompt = sequence.group.request.prompt_ids[begin : begin + PREFILL_TOKENS + 1]
            found.append(score_prompt_tokens(logits[0, : len(prompt) - 1], prompt, version))
        sequence.group.prompt_logprobs = join_prompt_logprobs(found)
        which = np.zeros(len(sequence.indices), np.int64)
        self.cache.join(
            prefilled, which, np.full(len(which), columns), np.full(len(which), sequence.group.max_cached_tokens)
        )
        return _last(logits).index_select(0, self.to_device(which))

    def _prefill_mask(
        self, starts: npt.NDArray[np.int64], columns: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the additive masks of sequences aligned right, [sequences, 1, columns, columns]."""
        at = torch.arange(columns, device=self.device)
        behind = at[:, None] - at
        # A padding position attends to itself: a softmax over nothing would be NaN, and stay in the cache.
        seen = (behind >= 0) & (at >= self.to_device(starts)[:, None, None, None]) | (behind == 0)

        def additive(visible: torch.Tensor) -> torch.Tensor:
            return torch.zeros(visible.shape, dtype=self._dtype, device=self.device).masked_fill_(~visible, -torch.inf)

        sliding = additive(seen & (behind < self._window)) if self._window else None
        return self._by_kind(additive(seen), sliding)

    def _by_kind(
        self, full: torch.Tensor, sliding: torch.Tensor | None
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the masks in the form that the model takes: by layer type if it mixes layer types."""
        if self._sliding == "some":
            return {FULL: full, SLIDING: sliding}
        return full if sliding is None else sliding


def _chunks(sequences: Sequence[PrefillSequence]) -> Iterator[Sequence[PrefillSequence]]:
    """Split `sequences` into chunks of at most `PREFILL_TOKENS` padded tokens, or of one sequence."""
    begin, longest = 0, 0
    for end, sequence in enumerate(sequences):
        longest = max(longest, len(sequence.ids))
        if end > begin and longest * (end - begin + 1) > PREFILL_TOKENS:
            yield sequences[begin:end]
            begin, longest = end, len(sequence.ids)
    yield sequences[begin:]


def _positions(
    sequences: Sequence[PrefillSequence], starts: npt.NDArray[np.int64], columns: int
) -> npt.NDArray[np.int64]:
    """Return the positions of sequences aligned right: [sequences, columns]; with images [3, sequences, columns]."""
    positions: npt.NDArray[np.int64] = np.maximum(np.arange(columns) - starts[:, None], 0)
    if not any(sequence.group.request.tensors for sequence in sequences):
        return positions
    positions = np.repeat(positions[None], 3, axis=0)
    for row, sequence in enumerate(sequences):
        request = sequence.group.request
        if request.tensors:
            sampled = starts[row] + len(request.prompt_ids)
            positions[:, row, starts[row] : sampled] = request.tensors["position_ids"]
            positions[:, row, sampled:] = last_position(request) + 1 + np.arange(columns - sampled)
    return positions


def _pixels(sequences: Sequence[PrefillSequence]) -> dict[str, npt.NDArray[Any]]:
    """Return the model's arguments for all images and videos by name, in the order of the sequences."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for sequence in sequences:
        for name, array in sequence.group.request.tensors.items():
            if name != "position_ids":
                named.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


def _last(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last position, [rows, vocabulary]."""
    return logits[:, -1]


def _attention_kinds(model: PreTrainedModel) -> str:
    """Return which layers use sliding-window attention: "" for none, "some" or "all".

    Raises:
        ConfigError: the model cannot be decoded with explicit positions, masks and a KV cache.
    """
    name = type(model).__name__
    missing = {"position_ids", "attention_mask", "past_key_values"} - set(inspect.signature(model.forward).parameters)
    if missing:
        raise ConfigError(f"{name} takes no {', '.join(sorted(missing))}; choose another engine for this model")
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager", GROUPED_DECODE):
        raise ConfigError(f"{name} uses attention {attention!r}; load it with sdpa or eager attention")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {FULL, SLIDING}:
        raise ConfigError(f"{name} has {', '.join(sorted(unknown))} layers; choose another engine for this model")
    if not kinds:
        return "all" if getattr(config, "sliding_window", None) else ""
    if SLIDING not in kinds:
        return ""
    return "some" if FULL in kinds else "all"
