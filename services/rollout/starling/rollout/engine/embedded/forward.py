"""Forward passes of the embedded engine: packed prefill, and decode over the paged KV cache of the running rows.

A prefill is one row of tokens without padding or mask: the prompt of each group once, followed by the partial
completions that resume it (decision 0034). Models that cannot compute such a row prefill one sequence after the other.
With a `PlainDecoder` the newest tokens of the running rows are in the same row, so that one pass computes both.

Vision-language models of the Qwen family are prefilled with the pixels of a prompt's images and three-dimensional
positions; afterwards their rows decode like those of text prompts, with positions continuing from the prompt's last.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import structlog
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from starling.algo.attention.forest import Forest
from starling.algo.attention.probe import FULL, WINDOWED
from starling.common.errors import ConfigError
from starling.rollout.engine.base import PromptLogprobs
from starling.rollout.engine.embedded.attention import (
    PAGED,
    attends_to_cached,
    unread_mask,
    use_paged_attention,
    why_unpacked,
)
from starling.rollout.engine.embedded.batch import PrefillSequence
from starling.rollout.engine.embedded.cache import CachedSequence, LayerShape, PagedCache, PrefillCache
from starling.rollout.engine.embedded.decoder import plain_decoder
from starling.rollout.engine.embedded.packing import Packing, Places, token_spans
from starling.rollout.engine.embedded.routing import ExpertRecorder
from starling.rollout.engine.embedded.sampling import join_prompt_logprobs, score_prompt_tokens

log = structlog.get_logger(__name__)

PREFILL_TOKENS: Final = 4096
"""Maximum number of tokens of one prefill: bounds its memory and the gap between decode steps."""
_NO_TOKENS: Final = np.zeros(0, np.int64)


class Forward:
    """A model and the KV cache of its rows, which may have different lengths. The attention function is replaced.

    Used under `torch.inference_mode`, by one thread.
    """

    def __init__(self, model: PreTrainedModel, max_cache_bytes: int = 0) -> None:
        """Prepare `model` for decoding, with no rows.

        Args:
            model: the model.
            max_cache_bytes: limit on the KV cache; 0 for none.

        Raises:
            ConfigError: the model cannot be decoded this way.
        """
        self._sliding = _attention_kinds(model)
        use_paged_attention(model)
        self._model = model
        first = next(model.parameters())
        self.device, self._dtype = first.device, first.dtype
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._window: int | None = model.config.get_text_config().sliding_window if self._sliding else None
        self._max_cache_bytes = max_cache_bytes
        self.recorder = ExpertRecorder(model)
        with self.recorder.recording():
            self._shapes = _layer_shapes(model, self.device)
        self.experts = self.recorder.sizes()
        """Of the model; None if it has none."""
        reason = why_unpacked(model)
        if reason is not None:
            log.info(
                "prompts are prefilled one after the other: the model cannot compute packed ones",
                model=type(model).__name__,
                reason=reason,
            )
        self._packs = reason is None
        self._reads_blocks = self._packs and attends_to_cached(model, self._shapes)
        self._plain = plain_decoder(model) if self._packs else None
        self.cache = self._new_cache()

    def begin(self) -> None:
        """Make room for the newest token of every row, which `decode` or `mix` computes next.

        Raises:
            CacheFullError: the KV cache reaches its limit; nothing has changed.
        """
        self.cache.begin(replaceable=self._reads_blocks)

    def decode(self, last: npt.NDArray[np.int64], position: npt.NDArray[np.int64]) -> torch.Tensor:
        """Feed every row its newest token, at `position`; return the logits of the next token.

        Args:
            last, position: int64 [rows].

        Returns:
            [rows, vocabulary].
        """
        ids, positions = self.to_device(last), self.to_device(position)
        if self._plain is not None:
            return self._plain.logits(self._plain.hidden(ids, positions, self.cache.attend_newest))
        arguments: dict[str, Any]
        if self._reads_blocks:
            arguments = {"blocks": self.cache, "attention_mask": unread_mask(self._model)}
        else:
            arguments = {"attention_mask": self._by_kind(*self.cache.masks(self._dtype))}
        logits = self._model(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
            **arguments,
        ).logits
        found: torch.Tensor = logits[:, -1]
        return found

    def mixes(self, sequences: Sequence[PrefillSequence]) -> bool:
        """Return whether `mix` can compute `sequences`."""
        one_row = len(list(_chunks(sequences))) == 1 and not _needs_parts(sequences[0])
        return self._plain is not None and one_row

    def mix(
        self,
        last: npt.NDArray[np.int64],
        position: npt.NDArray[np.int64],
        sequences: Sequence[PrefillSequence],
        version: int,
    ) -> torch.Tensor:
        """Do what `decode` and then `prefill` do, in one pass of the model; `mixes` tells for which `sequences`.

        Returns:
            The logits of both, [rows + new rows, vocabulary].

        Raises:
            CacheFullError: the KV cache reaches its limit; no row has joined.
        """
        packing = Packing(sequences, self.cache.join([_cached(sequence) for sequence in sequences]))
        logits = self._packed_logits(packing, last, position)
        decoded, joined = logits[: len(last)], logits[len(last) :]
        self._score_prompts(packing, joined, version)
        return torch.cat((decoded, joined.index_select(0, self._sequence_of_row(sequences))))

    def num_blocks_of(self, sequences: Sequence[PrefillSequence]) -> int:
        """Return the blocks of the KV cache that `prefill` needs."""
        return self.cache.num_blocks_of([_cached(sequence) for sequence in sequences])

    def prefill(self, sequences: Sequence[PrefillSequence], version: int, *, records: bool = True) -> torch.Tensor:
        """Prefill `sequences` and add their rows to the cache, in order; return the logits after each row's last token.

        Sets `prompt_logprobs`, with `version`, of the groups that need it; and, with `records`, the experts of the
        tokens of the groups that record them.

        Returns:
            [new rows, vocabulary].

        Raises:
            CacheFullError: the KV cache reaches its limit; nothing has changed.
        """
        places = self.cache.join([_cached(sequence) for sequence in sequences])
        parts = []
        for some in _chunks(sequences):
            routed = records and any(sequence.group.is_routed for sequence in sequences[some])
            with self.recorder.recording() if routed else nullcontext():
                parts.append(self._prefill(sequences[some], places[some], version))
            if routed:
                self._keep_experts(sequences[some])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def recompute(self, sequences: Sequence[PrefillSequence], version: int) -> None:
        """Recompute the KV cache of all rows; `sequences` has one row each, in batch order."""
        self.cache = self._new_cache()  # frees the old one first: both may not fit into memory
        self.prefill(sequences, version, records=False)

    def _keep_experts(self, sequences: Sequence[PrefillSequence]) -> None:
        """Note the experts of the tokens of `sequences`, which have just been prefilled."""
        experts = self.recorder.take()
        for sequence, (prompt, own) in zip(sequences, self._spans(sequences), strict=True):
            group = sequence.group
            if group.is_routed and group.prompt_routing is None:
                group.prompt_routing = experts[prompt]
            if group.is_routed and own.stop > own.start:
                group.prefilled_routing |= dict.fromkeys(sequence.indices, experts[own])

    def _spans(self, sequences: Sequence[PrefillSequence]) -> Iterator[tuple[slice, slice]]:
        """Yield where the tokens of each prompt, and those after it, are among the tokens of a prefill."""
        if self._packs:
            yield from token_spans(sequences)
            return
        begin = 0
        for sequence in sequences:
            middle, end = begin + len(sequence.group.request.prompt_ids), begin + len(sequence.ids)
            yield slice(begin, middle), slice(middle, end)
            begin = end

    def to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        """Return `values` as a tensor on the model's device."""
        return torch.from_numpy(values).to(self.device)

    def _new_cache(self) -> PagedCache:
        return PagedCache(self._shapes, self.device, window=self._window, max_bytes=self._max_cache_bytes)

    def _prefill(self, sequences: Sequence[PrefillSequence], places: Places, version: int) -> torch.Tensor:
        if _needs_parts(sequences[0]):
            last = self._prefill_in_parts(sequences[0], places[0], version)
        elif self._packs:
            last = self._prefill_packed(Packing(sequences, places), version)
        else:
            last = torch.cat([self._prefill_alone(*one, version) for one in zip(sequences, places, strict=True)])
        return last.index_select(0, self._sequence_of_row(sequences))

    def _sequence_of_row(self, sequences: Sequence[PrefillSequence]) -> torch.Tensor:
        """Return which of `sequences` each of their rows continues: int64 [new rows]."""
        which = np.repeat(np.arange(len(sequences)), [len(sequence.indices) for sequence in sequences])
        return self.to_device(which)

    def _prefill_packed(self, packing: Packing, version: int) -> torch.Tensor:
        """Prefill one packed row; return the logits after the last token of each sequence."""
        logits = self._packed_logits(packing, _NO_TOKENS, _NO_TOKENS)
        self._score_prompts(packing, logits, version)
        return logits[: len(packing.sequences)]

    def _score_prompts(self, packing: Packing, logits: torch.Tensor, version: int) -> None:
        """Set the log-probabilities of the prompts that need them; `logits` are those of `packing.logit_tokens`."""
        begin = len(packing.sequences)
        for sequence in packing.scored:
            prompt = sequence.group.request.prompt_ids
            rows = logits[begin : begin + len(prompt) - 1]
            sequence.group.prompt_logprobs = score_prompt_tokens(rows, prompt, version)
            begin += len(rows)

    def _packed_logits(
        self, packing: Packing, last: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Write the keys and values of a packed row into the cache, after those of the newest tokens of `last`.

        Returns:
            The logits after each of `last`, which only a plain decoder computes, and after `packing.logit_tokens`.
        """
        prefilled, rows = PrefillCache(self.cache, packing.places), len(last)
        if self._plain is not None:
            ids = np.concatenate((last, packing.ids))
            positions = np.concatenate((position, packing.positions()[0]))
            tokens = np.concatenate((np.arange(rows), rows + packing.logit_tokens()))
            attend = partial(self._attend, prefilled, packing.forest, rows)
            hidden = self._plain.hidden(self.to_device(ids), self.to_device(positions), attend)
            return self._plain.logits(hidden.index_select(0, self.to_device(tokens)))
        chosen = self.to_device(packing.logit_tokens())
        pixels = {name: self.to_device(array) for name, array in _pixels(packing.sequences).items()}
        extra = {"logits_to_keep": chosen} if self._takes_logits_to_keep else {}
        logits: torch.Tensor = self._model(
            input_ids=self.to_device(packing.ids)[None],
            position_ids=self.to_device(packing.positions()),
            past_key_values=prefilled,
            use_cache=True,
            structure=packing.forest,
            attention_mask=unread_mask(self._model),
            **pixels,
            **extra,
        ).logits[0]
        return logits if extra else logits.index_select(0, chosen)

    def _attend(
        self,
        prefilled: PrefillCache,
        forest: Forest,
        rows: int,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Attend from the newest tokens of `rows` rows, and then from the tokens of `forest`; see `Attend`."""
        joined = prefilled.attend(forest, layer, query[rows:], key[rows:], value[rows:], scale, window)
        if not rows:
            return joined
        newest = self.cache.attend_newest(layer, query[:rows], key[:rows], value[:rows], scale, window)
        return torch.cat((newest, joined))

    def _prefill_alone(
        self,
        sequence: PrefillSequence,
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        version: int,
    ) -> torch.Tensor:
        """Prefill one sequence as transformers does; return the logits after its last token, [1, vocabulary]."""
        packing, prefilled, group = Packing([sequence], [places]), DynamicCache(), sequence.group
        prompt = group.request.prompt_ids
        extra = {"logits_to_keep": len(prompt) if group.needs_prompt_logprobs else 1}
        logits = self._model(
            input_ids=self.to_device(packing.ids)[None],
            position_ids=self.to_device(packing.positions()),
            past_key_values=prefilled,
            use_cache=True,
            **{name: self.to_device(array) for name, array in _pixels([sequence]).items()},
            **(extra if self._takes_logits_to_keep else {}),
        ).logits[0]
        if group.needs_prompt_logprobs:
            group.prompt_logprobs = score_prompt_tokens(logits[-len(prompt) : -1], prompt, version)
        self._write(prefilled, packing.places)
        found: torch.Tensor = logits[-1:]
        return found

    def _prefill_in_parts(
        self,
        sequence: PrefillSequence,
        places: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]],
        version: int,
    ) -> torch.Tensor:
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
        self._write(prefilled, np.concatenate(places))
        last: torch.Tensor = logits[:, -1]
        return last

    def _write(self, prefilled: DynamicCache, places: npt.NDArray[np.int64]) -> None:
        """Copy the keys and values of one sequence into the cache."""
        for number, layer in enumerate(prefilled.layers):
            keys, values = (states[0].transpose(0, 1) for states in (layer.keys, layer.values))
            self.cache.write(number, self.cache.targets_of(places, keys.shape[1]), keys, values)

    def _by_kind(
        self, full: torch.Tensor, sliding: torch.Tensor | None
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the masks in the form that the model takes: by layer type if it mixes layer types."""
        if self._sliding == "some":
            return {FULL: full, WINDOWED: sliding}
        return full if sliding is None else sliding


def _cached(sequence: PrefillSequence) -> CachedSequence:
    """Return the description of a sequence for the cache."""
    prompt = len(sequence.group.request.prompt_ids)
    return CachedSequence(sequence.group.number, prompt, len(sequence.ids) - prompt, len(sequence.indices))


def _needs_parts(sequence: PrefillSequence) -> bool:
    """Return whether the logits of a sequence, which is a chunk of its own then, are computed part by part."""
    group = sequence.group
    return len(sequence.ids) > PREFILL_TOKENS and group.needs_prompt_logprobs and not group.request.tensors


def _chunks(sequences: Sequence[PrefillSequence]) -> Iterator[slice]:
    """Divide `sequences` into chunks of at most `PREFILL_TOKENS` packed tokens, or of one sequence."""
    begin = total = 0
    groups: set[int] = set()
    for end, sequence in enumerate(sequences):
        prompt = len(sequence.group.request.prompt_ids)
        new = len(sequence.ids) - (prompt if sequence.group.number in groups else 0)
        if end > begin and total + new > PREFILL_TOKENS:
            yield slice(begin, end)
            begin, total, new = end, 0, len(sequence.ids)
            groups.clear()
        total += new
        groups.add(sequence.group.number)
    yield slice(begin, len(sequences))


def _pixels(sequences: Sequence[PrefillSequence]) -> dict[str, npt.NDArray[Any]]:
    """Return the model's arguments for all images and videos by name, in the order of the groups."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for group in {sequence.group.number: sequence.group for sequence in sequences}.values():
        for name, array in group.request.tensors.items():
            if name != "position_ids":
                named.setdefault(name, []).append(array)
    return {name: np.concatenate(arrays) for name, arrays in named.items()}


@torch.inference_mode()
def _layer_shapes(model: PreTrainedModel, device: torch.device) -> list[LayerShape]:
    """Return the shapes of the keys and values of each layer, observed on one token."""
    token, observed = torch.zeros(1, 1, dtype=torch.int64, device=device), DynamicCache()
    model(input_ids=token, position_ids=token, past_key_values=observed, use_cache=True)
    return [
        LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)
        for layer in observed.layers
    ]


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
    if attention not in ("sdpa", "eager", PAGED):
        raise ConfigError(f"{name} uses attention {attention!r}; load it with sdpa or eager attention")
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {FULL, WINDOWED}:
        raise ConfigError(f"{name} has {', '.join(sorted(unknown))} layers; choose another engine for this model")
    if not kinds:
        return "all" if getattr(config, "sliding_window", None) else ""
    if WINDOWED not in kinds:
        return ""
    return "some" if FULL in kinds else "all"
