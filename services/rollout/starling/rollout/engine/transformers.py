"""The embedded engine: any Hugging Face causal language model that takes explicit positions, on any torch device.

Vision-language models of the Qwen family are prefilled with the pixels of a prompt's images and three-dimensional
positions; from there on a row is like any other, with positions that count on from the prompt's last.

Batching is continuous. A prompt is prefilled once per group and its keys and values are shared out to the group's
rows; rows of different lengths then decode together, one token per step, and leave as soon as they end.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from starling.common.errors import ConfigError
from starling.common.wire.messages import Status
from starling.rollout.engine.attention import GROUPED_DECODE, use_grouped_decode
from starling.rollout.engine.base import GroupFailed, GroupRequest, GroupResult, RequestError
from starling.rollout.engine.cache import RowCache
from starling.rollout.engine.lora import keep_lengths
from starling.rollout.engine.model import context_length, live_tensors
from starling.rollout.engine.request import check_request, check_tensors
from starling.rollout.engine.rows import Group, RunningRows
from starling.rollout.engine.sampling import SamplingRows, draw, sampling_rows, uniforms
from starling.rollout.engine.vision import cells_per_token, placeholders

PREFILL_TOKENS: Final = 4096
"""Most tokens, padding included, of prompts prefilled together: bounds the mask's memory and the pause."""

FULL, SLIDING = "full_attention", "sliding_attention"


class TransformersEngine:
    """An `Engine` (see `base`) over a transformers model, which it owns: its attention function is replaced."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        max_rows: int = 64,
        max_model_len: int | None = None,
        exclusive: bool = False,
        version: int = 0,
    ) -> None:
        """Make an engine without work.

        Args:
            model: in eval mode, without gradients (`build_model` makes such a one).
            eos_token_ids: the tokens that end every completion.
            max_rows: most sequences that run at a time; groups wait until all their rows fit.
            max_model_len: most tokens of a sequence; None takes what the model declares.
            exclusive: generate each group in a batch of its own, so that its result depends, to the bit, on weights,
                prompt and sampling alone.
            version: of the weights that are in place.

        Raises:
            ConfigError: the model cannot be decoded this way, or a setting is impossible.
        """
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; give at least 1")
        self._sliding = _attention_kinds(model)
        length = max_model_len if max_model_len is not None else context_length(model.config)
        if length is None:
            raise ConfigError("the model declares no context length; give max_model_len")
        if length < 2:
            raise ConfigError(f"max_model_len is {length}; give at least 2, a prompt token and a sampled one")
        use_grouped_decode(model)
        self._model = model
        self._kept_lengths = keep_lengths(model)
        first = next(model.parameters())
        self._device, self._dtype = first.device, first.dtype
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._eos_token_ids = tuple(int(token) for token in eos_token_ids)
        self._placeholders = placeholders(model.config)
        self._cells_per_token = cells_per_token(model.config)
        # A sampled placeholder would ask for an image that is not there, in the trainer if not here.
        never = sorted(self._placeholders.values())
        self._never = torch.tensor(never, device=self._device) if never else None
        self._max_rows, self._max_model_len = max_rows, length
        self._exclusive = exclusive
        self._version = version
        self._waiting: deque[Group] = deque()
        self._running: dict[int, Group] = {}
        self._leases: set[str] = set()
        self._rows = RunningRows(max_rows)
        self._window: int | None = model.config.get_text_config().sliding_window if self._sliding else None
        self._cache = RowCache(self._dtype, self._window)
        self._sampling: SamplingRows | None = None
        self._num_added = 0

    @property
    def num_running(self) -> int:
        """Sequences that the next `step` extends."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for room."""
        return len(self._waiting)

    @property
    def max_model_len(self) -> int:
        """Most tokens of one sequence, prompt and completion together."""
        return self._max_model_len

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        return self._version

    @property
    def cache_size_bytes(self) -> int:
        """Bytes that the keys and values of the running rows occupy."""
        return self._cache.size_bytes

    def set_version(self, version: int) -> None:
        """Name the weights that are in place now; the cache is kept."""
        self._version = version
        for kept in self._kept_lengths:
            kept.forget()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live weights by Hugging Face name, tied ones once."""
        return live_tensors(self._model)

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            RequestError: the group cannot be generated as asked.
        """
        check_request(request, self._vocab_size, self._max_model_len, self._max_rows)
        check_tensors(request, self._placeholders, self._cells_per_token)
        if request.lease in self._leases:
            raise RequestError(f"lease {request.lease!r} is held already; give every request a lease of its own")
        budget = min(request.sampling.max_tokens, self._max_model_len - len(request.prompt_ids))
        stops = (*self._eos_token_ids, *request.sampling.stop_token_ids)
        self._waiting.append(Group(self._num_added, request, budget, stops))
        self._leases.add(request.lease)
        self._num_added += 1

    def cancel(self, lease: str) -> bool:
        """Forget a group and free its rows at once; returns whether the engine held it."""
        if lease not in self._leases:
            return False
        self._leases.remove(lease)
        for group in self._waiting:
            if group.request.lease == lease:
                self._waiting.remove(group)
                return True
        number = next(n for n, group in self._running.items() if group.request.lease == lease)
        del self._running[number]
        with torch.inference_mode():
            self._remove_rows(self._rows.table["group"] == number)
        return True

    def step(self) -> list[GroupResult | GroupFailed]:
        """Start waiting groups where room allows, sample one token of every sequence, return the groups that ended."""
        with torch.inference_mode():
            parts = [self._decode()] if len(self._rows) else []
            if joining := self._take_joining():
                parts.append(self._prefill(joining))
            if not parts:
                return []
            return self._sample(parts[0] if len(parts) == 1 else torch.cat(parts))

    # --- forward passes --------------------------------------------------------------------------------------------

    def _decode(self) -> torch.Tensor:
        """Feed every row its newest token; return the logits of the next, [rows, vocabulary]."""
        table, cache = self._rows.table, self._cache
        cache.begin()
        full, sliding = cache.masks(self._device)
        logits = self._model(
            input_ids=self._to_device(table["last"])[:, None],
            position_ids=self._to_device(table["position"])[:, None],
            attention_mask=self._by_kind(full, sliding),
            past_key_values=cache,
            use_cache=True,
        ).logits
        cache.advance()
        return _last(logits)

    def _take_joining(self) -> list[Group]:
        """Take the waiting groups, first come first, whose rows fit and whose prompts may be prefilled together."""
        joining: list[Group] = []
        room = self._max_rows - len(self._rows)
        longest = 0
        while self._waiting and not (self._exclusive and (joining or len(self._rows))):
            request = self._waiting[0].request
            longest = max(longest, len(request.prompt_ids))
            if request.num_completions > room or (joining and longest * (len(joining) + 1) > PREFILL_TOKENS):
                break
            room -= request.num_completions
            joining.append(self._waiting.popleft())
        return joining

    def _prefill(self, groups: list[Group]) -> torch.Tensor:
        """Compute the prompts of `groups`, add their rows; return the logits of the rows' first tokens."""
        lengths = np.array([len(group.request.prompt_ids) for group in groups])
        counts = np.array([group.request.num_completions for group in groups])
        budgets = np.array([group.budget for group in groups])
        columns = int(lengths.max())
        ids = np.zeros((len(groups), columns), np.int64)
        for line, group in zip(ids, groups, strict=True):
            line[columns - len(group.request.prompt_ids) :] = group.request.prompt_ids
        starts = columns - lengths
        prefilled = DynamicCache()
        extra = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
        logits = self._model(
            input_ids=self._to_device(ids),
            position_ids=self._to_device(_positions(groups, starts, columns)),
            attention_mask=self._prefill_mask(starts, columns) if starts.any() else None,
            past_key_values=prefilled,
            use_cache=True,
            **{name: self._to_device(array) for name, array in _pixels(groups).items()},
            **extra,
        ).logits
        which = np.repeat(np.arange(len(groups)), counts)
        # The last sampled token never enters the cache.
        self._cache.join(prefilled, which, lengths[which], (lengths + budgets - 1)[which])
        self._rows.append(groups)
        self._running.update((group.number, group) for group in groups)
        self._sampling = None
        return _last(logits).index_select(0, self._to_device(which))

    def _prefill_mask(
        self, starts: npt.NDArray[np.int64], columns: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the additive masks of prompts aligned right, [prompts, 1, columns, columns]."""
        at = torch.arange(columns, device=self._device)
        behind = at[:, None] - at
        # A padding position sees itself: a row of the softmax without any term would be NaN, and stay in the cache.
        seen = (behind >= 0) & (at >= self._to_device(starts)[:, None, None, None]) | (behind == 0)

        def additive(visible: torch.Tensor) -> torch.Tensor:
            return torch.zeros(visible.shape, dtype=self._dtype, device=self._device).masked_fill_(~visible, -torch.inf)

        sliding = additive(seen & (behind < self._window)) if self._window else None
        return self._by_kind(additive(seen), sliding)

    def _by_kind(
        self, full: torch.Tensor, sliding: torch.Tensor | None
    ) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Give the model its masks in the form that it takes: by layer type where it mixes types."""
        if self._sliding == "some":
            return {FULL: full, SLIDING: sliding}
        return full if sliding is None else sliding

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor) -> list[GroupResult | GroupFailed]:
        """Draw and record a token per row, and return the groups that ended with it."""
        table = self._rows.table
        if self._sampling is None:
            self._sampling = sampling_rows(table["temperature"], table["top_p"], table["top_k"], self._device)
        uniform = self._to_device(uniforms(table["key"], table["length"]))
        tokens, logprobs = draw(logits, self._sampling, uniform, self._never)
        # One copy to the host is one wait for the device; float64 holds both exactly.
        host = torch.stack((tokens.double(), logprobs.double())).cpu().numpy()
        stopped, spent = self._rows.record(host[0].astype(np.int64), host[1], self._version)
        ended: list[GroupResult | GroupFailed] = []
        gone = stopped | spent
        broken = ~np.isfinite(host[1])
        if broken.any():
            numbers = np.unique(table["group"][broken])
            ended.extend(self._fail(int(number)) for number in numbers)
            gone |= np.isin(table["group"], numbers)
        if gone.any():
            ended.extend(self._finish(gone, stopped))
            self._remove_rows(gone)
        return ended

    def _finish(self, gone: npt.NDArray[np.bool_], stopped: npt.NDArray[np.bool_]) -> list[GroupResult]:
        """Keep the completions of the rows that end; return the groups of which none runs any longer."""
        results = []
        for row in np.flatnonzero(gone):
            record = self._rows.table[row]
            group = self._running.get(int(record["group"]))
            if group is None:  # it failed in this very step
                continue
            status = Status.OK if stopped[row] else Status.TRUNCATED
            group.done[int(record["index"])] = self._rows.completion(row, status)
            if len(group.done) == group.request.num_completions:
                del self._running[group.number]
                self._leases.remove(group.request.lease)
                results.append(group.result())
        return results

    def _fail(self, number: int) -> GroupFailed:
        """Give up a running group whose probabilities are not numbers."""
        group = self._running.pop(number)
        self._leases.remove(group.request.lease)
        reason = f"the model's logits are not finite at weight version {self._version}; check the weights"
        return GroupFailed(group.request.lease, reason)

    def _remove_rows(self, gone: npt.NDArray[np.bool_]) -> None:
        self._cache.keep(self._rows.remove(gone))
        self._sampling = None

    def _to_device(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _positions(groups: Sequence[Group], starts: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.int64]:
    """Return the positions of prompts aligned right: [prompts, columns]; with images [3, prompts, columns]."""
    positions: npt.NDArray[np.int64] = np.maximum(np.arange(columns) - starts[:, None], 0)
    if not any(group.request.tensors for group in groups):
        return positions
    positions = np.repeat(positions[None], 3, axis=0)
    for row, group in enumerate(groups):
        if group.request.tensors:
            positions[:, row, starts[row] :] = group.request.tensors["position_ids"]
    return positions


def _pixels(groups: Sequence[Group]) -> dict[str, npt.NDArray[Any]]:
    """Return what the model takes of all images and videos, in the order of the prompts, as it looks for them."""
    named: dict[str, list[npt.NDArray[Any]]] = {}
    for group in groups:
        for name, array in group.request.tensors.items():
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
