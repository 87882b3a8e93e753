"""The forward passes of the embedded engine: tokens in, logits out, with the keys and values of the rows that run.

Vision-language models of the Qwen family are prefilled with the pixels of a prompt's images and three-dimensional
positions; from there on a row is like any other, with positions that count on from the prompt's last.
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
"""Most tokens, padding included, of sequences prefilled together: bounds the mask's memory and the pause."""

FULL, SLIDING = "full_attention", "sliding_attention"


class Forward:
    """A model that decodes rows of different lengths together. Its attention function is replaced.

    Used under `torch.inference_mode`, by one thread.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Make ready to decode with `model`, without any row.

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
        """Feed every row its newest token, which stands at `position`; return the logits of the next.

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

    def prefill(self, lines: Sequence[PrefillSequence], version: int) -> torch.Tensor:
        """Compute `lines`, and add their rows to the cache, in order; return the logits behind each row's last token.

        Groups that want their prompts scored have it done, by the weights of `version`.

        Returns:
            [new rows, vocabulary].
        """
        parts = [self._prefill(chunk, version) for chunk in _chunks(lines)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def recompute(self, lines: Sequence[PrefillSequence], version: int) -> None:
        """Compute the keys and values of all rows anew; `lines` has one row each, in the order of the batch."""
        self.cache = RowCache(self._dtype, self._window)  # the old one goes first: there may be no room for both
        self.prefill(lines, version)

    def to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Return `values` as a tensor beside the model."""
        return torch.from_numpy(values).to(self.device)

    def _prefill(self, lines: Sequence[PrefillSequence], version: int) -> torch.Tensor:
        if len(lines[0].ids) > PREFILL_TOKENS and lines[0].group.wants_scores and not lines[0].group.request.tensors:
            return self._prefill_in_parts(lines[0], version)
        lengths = np.array([len(line.ids) for line in lines])
        counts = np.array([len(line.indices) for line in lines])
        limits = np.array([line.group.most_cached for line in lines])
        columns = int(lengths.max())
        ids = np.zeros((len(lines), columns), np.int64)
        for row, line in zip(ids, lines, strict=True):
            row[columns - len(line.ids) :] = line.ids
        starts = columns - lengths
        prefilled = DynamicCache()
        scored = [number for number, line in enumerate(lines) if line.group.wants_scores]
        keep = max((len(lines[number].ids) for number in scored), default=1)
        extra = {"logits_to_keep": keep} if self._takes_logits_to_keep else {}
        logits = self._model(
            input_ids=self.to_device(ids),
            position_ids=self.to_device(_positions(lines, starts, columns)),
            attention_mask=self._prefill_mask(starts, columns) if starts.any() else None,
            past_key_values=prefilled,
            use_cache=True,
            **{name: self.to_device(array) for name, array in _pixels(lines).items()},
            **extra,
        ).logits
        for number in scored:
            group, first = lines[number].group, logits.shape[1] - len(lines[number].ids)
            prompt = group.request.prompt_ids
            group.scores = score_prompt_tokens(logits[number, first : first + len(prompt) - 1], prompt, version)
        which = np.repeat(np.arange(len(lines)), counts)
        self.cache.join(prefilled, which, lengths[which], limits[which])
        return _last(logits).index_select(0, self.to_device(which))

    def _prefill_in_parts(self, line: PrefillSequence, version: int) -> torch.Tensor:
        """Compute a long line whose prompt is to be scored: all its logits at once would take gigabytes."""
        ids, prefilled, columns = np.array([line.ids], np.int64), DynamicCache(), len(line.ids)
        found: list[PromptLogprobs] = []
        for begin in range(0, columns, PREFILL_TOKENS):
            some = np.arange(begin, min(begin + PREFILL_TOKENS, columns))
            logits = self._model(
                input_ids=self.to_device(ids[:, some]),
                position_ids=self.to_device(some[None]),
                past_key_values=prefilled,
                use_cache=True,
            ).logits
            prompt = line.group.request.prompt_ids[begin : begin + PREFILL_TOKENS + 1]
            found.append(score_prompt_tokens(logits[0, : len(prompt) - 1], prompt, version))
        line.group.scores = join_prompt_logprobs(found)
        which = np.zeros(len(line.indices), np.int64)
        self.cache.join(prefilled, which, np.full(len(which), columns), np.full(len(which), line.group.most_cached))
        return _last(logits).index_select(0, self.to_device(which))

    def _prefill_mask(
        self, starts: npt.NDArray[np.int64], columns: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the additive masks of sequences aligned right, [sequences, 1, columns, columns]."""
        at = torch.arange(columns, device=self.device)
        behind = at[:, None] - at
        # A padding position sees itself: a row of the softmax without any term would be NaN, and stay in the cache.
        seen = (behind >= 0) & (at >= self.to_device(starts)[:, None, None, None]) | (behind == 0)

        def additive(visible: torch.Tensor) -> torch.Tensor:
            return torch.zeros(visible.shape, dtype=self._dtype, device=self.device).masked_fill_(~visible, -torch.inf)

        sliding = additive(seen & (behind < self._window)) if self._window else None
        return self._by_kind(additive(seen), sliding)

    def _by_kind(
        self, full: torch.Tensor, sliding: torch.Tensor | None
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Give the model its masks in the form that it takes: by layer type where it mixes types."""
        if self._sliding == "some":
            return {FULL: full, SLIDING: sliding}
        return full if sliding is None else sliding


def _chunks(lines: Sequence[PrefillSequence]) -> Iterator[Sequence[PrefillSequence]]:
    """Cut `lines` into runs of at most `PREFILL_TOKENS` each, or of one line."""
    begin, longest = 0, 0
    for end, line in enumerate(lines):
        longest = max(longest, len(line.ids))
        if end > begin and longest * (end - begin + 1) > PREFILL_TOKENS:
            yield lines[begin:end]
            begin, longest = end, len(line.ids)
    yield lines[begin:]


def _positions(lines: Sequence[PrefillSequence], starts: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.int64]:
    """Return the positions of sequences aligned right: [sequences, columns]; with images [3, sequences, columns]."""
    positions: npt.NDArray[np.int64] = np.maximum(np.arange(columns) - starts[:, None], 0)
    if not any(line.group.request.tensors for line in lines):
        return positions
    positions = np.repeat(positions[None], 3, axis=0)
    for row, line in enumerate(lines):
        request = line.group.request
        if request.tensors:
            sampled = starts[row] + len(request.prompt_ids)
            positions[:, row, starts[row] : sampled] = request.tensors["position_ids"]
            positions[:, row, sampled:] = last_position(request) + 1 + np.arange(columns - sampled)
    return positions


def _pixels(lines: Sequence[PrefillSequence]) -> dict[str, npt.NDArray[Any]]:
    """Return what the model takes of all images and videos, in the order of the lines, as it looks for them."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for line in lines:
        for name, array in line.group.request.tensors.items():
            if name != "position_ids":
                named.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


def _last(logits: torch.Tensor) -> torch.Tensor:
    """Return the logits behind the last position, [rows, vocabulary]."""
    return logits[:, -1]


def _attention_kinds(model: PreTrainedModel) -> str:
    """Return which layers slide: "" for none, "some" or "all".

    Raises:
        ConfigError: the model cannot be decoded with explicit positions, masks and a cache of keys and values.
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
