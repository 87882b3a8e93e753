"""Embedded engine: any Hugging Face causal language model that takes explicit positions, on any torch device.

Batching is continuous. A prompt is prefilled once per group, and the group's rows share its blocks of the paged KV
cache; rows of different lengths then decode together, one token per step, and leave as soon as they end. A partial
completion is prefilled together with its prompt.

Where the KV cache has a limit, a group starts when the blocks of its prompt are free and its rows have room to grow. If
the cache is full nevertheless, the group that started last is preempted: its tokens are kept as partial completions, it
waits in front of the others, and is prefilled again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog
import torch
from transformers import PreTrainedModel

from starling.algo.architecture import context_length, media_inputs
from starling.algo.media import placeholder_ids
from starling.algo.truncation import KeptTokens
from starling.common.errors import ConfigError
from starling.common.wire.messages import MediaInputs, Status
from starling.rollout.engine.base import (
    AdoptionReport,
    CacheMode,
    EngineSpec,
    GroupFailed,
    GroupRequest,
    GroupResult,
    PartialCompletion,
    RequestError,
)
from starling.rollout.engine.embedded.batch import EmbeddedGroup, PrefillSequence, RunningRows
from starling.rollout.engine.embedded.forward import PREFILL_TOKENS, Forward
from starling.rollout.engine.embedded.lora import cache_weight_norms
from starling.rollout.engine.embedded.model import build_model, live_tensors
from starling.rollout.engine.embedded.packing import num_packed_tokens
from starling.rollout.engine.embedded.sampling import Drawn, SamplingRows, draw, sampling_rows, uniforms
from starling.rollout.engine.validation import check_partial, check_request, check_routing, check_tensors
from starling.rollout.engine.weights import LiveWeights
from starling.weightsync.tensors.adapters import base_digest
from starling.weightsync.tensors.modules import layout_of

if TYPE_CHECKING:
    from starling.weightsync.memory.digests import DigestMode
    from starling.weightsync.offers.offer import Offer
    from starling.weightsync.plan.layout import Layout
    from starling.weightsync.plan.planner import Plan
    from starling.weightsync.puller.report import PullProgress, PullReport
    from starling.weightsync.transports.endpoints import ServingOptions


log = structlog.get_logger(__name__)


def transformers_engine(spec: EngineSpec) -> TransformersEngine:
    """Build the embedded engine from `spec`.

    Raises:
        ConfigError: the model folder cannot be loaded, or the engine cannot decode its model.
    """
    settings, lora = spec.rollout, spec.model.lora
    model: Any = build_model(
        spec.path,
        dtype=spec.model.dtype,
        device=spec.model.device,
        weights=settings.load_weights,
        lora=lora,
        quantise=spec.weights.quantise,
        trust_remote_code=spec.model.trust_remote_code,
    )
    return TransformersEngine(
        model,
        eos_token_ids=spec.eos_token_ids,
        max_rows=settings.max_rows,
        max_model_len=spec.max_model_len,
        kv_cache_mb=settings.kv_cache_mb,
        exclusive=settings.exclusive,
        version=0 if settings.load_weights else -1,
        name=spec.name,
        base=base_digest(model, lora),
        digests=spec.weights.digests,
        serving=spec.serving,
    )


class TransformersEngine:
    """An `Engine` (see `base`) over a transformers model, which it owns: its attention function is replaced."""

    serves = True

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        max_rows: int = 64,
        max_model_len: int | None = None,
        kv_cache_mb: int = 0,
        exclusive: bool = False,
        version: int = 0,
        name: str = "rollout-0",
        base: str = "",
        digests: DigestMode = "full",
        serving: ServingOptions | None = None,
    ) -> None:
        """Create an engine without groups.

        Args:
            model: in eval mode, without gradients, as `build_model` returns it.
            eos_token_ids: the tokens that end every completion.
            max_rows: most sequences that run at a time; a group waits until all its rows fit.
            max_model_len: maximum number of tokens of a sequence; None for the model's context length.
            kv_cache_mb: limit on the KV cache in MiB; 0 for none.
            exclusive: generate each group in a batch of its own, so that its result depends bitwise only on weights,
                prompt and sampling parameters, wherever it was interrupted.
            version: the version of the weights in place.
            name: the replica's name, for its layout.
            base: digest of the weights below adapters, from `base_digest`.
            digests: how pulled versions are verified.
            serving: how versions that are pulled are served to others.

        Raises:
            ConfigError: the engine cannot decode this model, or a setting is invalid.
        """
        if max_rows < 1:
            raise ConfigError(f"max_rows is {max_rows}; give at least 1")
        self._forward = Forward(model, kv_cache_mb << 20)
        if self._forward.cache.max_blocks == 0:
            raise ConfigError(f"kv_cache_mb is {kv_cache_mb}, less than one block of the model's KV cache; give more")
        self._max_rows, self._kv_cache_mb = max_rows, kv_cache_mb
        self._max_model_len = _sequence_length(model, max_model_len)
        self._model = model
        self._live: Mapping[str, torch.Tensor] | None = None
        """The live weights by name. To list them takes a millisecond, several times for each adoption."""
        self._weight_norms = cache_weight_norms(model)
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._eos_token_ids = tuple(int(token) for token in eos_token_ids)
        self._media_inputs = media_inputs(model.config)
        self._banned_ids = _banned_ids(self._media_inputs, self._forward.device)
        self._exclusive = exclusive
        self._version = version
        self._waiting: OrderedDict[str, EmbeddedGroup] = OrderedDict()
        """By lease, in the order in which they start: a client of the HTTP server may give up thousands at once."""
        self._running: dict[int, EmbeddedGroup] = {}
        self._leases: set[str] = set()
        self._rows = RunningRows(max_rows)
        self._sampling: SamplingRows | None = None
        self._num_added = self._num_tokens = 0
        self._paused = False
        layout = layout_of(self.tensors(), name, base=base)
        self._weights = LiveWeights(layout, self.tensors, digests=digests, serving=serving)

    @property
    def kv_cache_ratio(self) -> float | None:
        """Share of the blocks of the KV cache that are in use; None without a limit."""
        cache = self._forward.cache
        return None if not cache.max_blocks else cache.num_blocks / cache.max_blocks

    @property
    def num_running(self) -> int:
        """Sequences that the next `step` decodes."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Groups that wait for free rows."""
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled since the engine was created."""
        return self._num_tokens

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of one sequence, prompt and completion together."""
        return self._max_model_len

    @property
    def version(self) -> int:
        """The weight version that samples the next token."""
        return self._version

    @property
    def ready(self) -> bool:
        """Whether `step` has something to compute."""
        return not self._paused and bool(len(self._rows) or self._waiting)

    @property
    def cache_size_bytes(self) -> int:
        """Bytes of the KV cache, which keeps some memory for the next rows."""
        return self._forward.cache.size_bytes

    # --- groups ----------------------------------------------------------------------------------------------------

    def add(self, request: GroupRequest) -> None:
        """Queue a group.

        Raises:
            RequestError: the group cannot be generated as asked.
        """
        check_request(request, self._vocab_size, self._max_model_len, self._max_rows)
        check_partial(request, self._vocab_size, self._media_inputs)
        check_tensors(request, self._media_inputs)
        if request.sampling.routing == "replayed":
            check_routing(request, self._forward.experts)
        if request.lease in self._leases:
            raise RequestError(f"lease {request.lease!r} is held already; give every request a lease of its own")
        budget = min(request.sampling.max_tokens, self._max_model_len - len(request.prompt_ids))
        stops = (*self._eos_token_ids, *request.sampling.stop_token_ids)
        group = EmbeddedGroup(self._num_added, request, budget, stops, replay=self._exclusive)
        limit = self._forward.cache.max_blocks
        if limit is not None and self._forward.num_blocks_of(group.prefill_sequences()) > limit:
            raise RequestError(
                f"the prompt has {len(request.prompt_ids)} tokens, which with {request.num_completions} completions do "
                f"not fit into a KV cache of {self._kv_cache_mb} MiB; raise rollout.kv_cache_mb"
            )
        self._waiting[request.lease] = group
        self._leases.add(request.lease)
        self._num_added += 1

    def cancel(self, lease: str) -> bool:
        """Drop a group and free its rows at once; return whether the engine held it."""
        return self.interrupt(lease) is not None

    def interrupt(self, lease: str) -> tuple[PartialCompletion, ...] | None:
        """Remove a group and return its partial completions, or None if the engine does not hold it."""
        if lease not in self._leases:
            return None
        self._leases.remove(lease)
        if (waiting := self._waiting.pop(lease, None)) is not None:
            return waiting.request.partial
        number = next(n for n, group in self._running.items() if group.request.lease == lease)
        return self._stop(number)[1]

    def _stop(self, number: int) -> tuple[EmbeddedGroup, tuple[PartialCompletion, ...]]:
        """Remove a running group and its rows; return it with its partial completions."""
        group, removed = self._running.pop(number), self._rows.table["group"] == number
        partials = {
            index: PartialCompletion(
                done.token_ids,
                done.logprobs,
                done.versions,
                done.status,
                done.kept,
                done.truncation_nats,
                done.routing,
                group.prompt_routing,
            )
            for index, done in group.done.items()
        }
        for row in np.flatnonzero(removed):
            partials.setdefault(int(self._rows.table["index"][row]), self._rows.partial(row, group.prompt_routing))
        with torch.inference_mode():
            self._remove_rows(removed)
        return group, tuple(partials[index] for index in range(group.request.num_completions))

    def step(self) -> list[GroupResult | GroupFailed]:
        """Start waiting groups that fit, sample one token of every sequence, and return the groups that ended."""
        if self._paused:
            return []
        ended: list[GroupResult | GroupFailed] = []
        with torch.inference_mode():
            ended += self._make_room()
            if len(self._rows):
                self._forward.begin()
            joining = self._take_joining()
            ended += [self._end(group) for group in joining if not group.num_rows]
            if self._waiting and not joining and not len(self._rows):
                ended.append(self._fail_too_large(self._waiting.popitem(last=False)[1]))
            sequences = [sequence for group in joining for sequence in group.prefill_sequences()]
            if len(self._rows) or sequences:
                ended += self._sample(self._compute(sequences))
        return ended

    def _compute(self, sequences: Sequence[PrefillSequence]) -> torch.Tensor:
        """Compute the newest token of every row, and prefill `sequences`, which join; return the logits after each."""
        if not sequences:
            return self._decode()
        table = self._rows.table
        if not len(table):
            logits = self._forward.prefill(sequences, self._version)
        elif self._forward.mixes(sequences):
            logits = self._forward.mix(table["last"], table["position"], sequences, self._version)
        else:
            logits = torch.cat((self._decode(), self._forward.prefill(sequences, self._version)))
        self._rows.append(sequences)
        self._running.update((sequence.group.number, sequence.group) for sequence in sequences)
        self._sampling = None
        return logits

    def pause(self) -> None:
        """Stop sampling until `resume`; running sequences stay."""
        self._paused = True

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False

    def _make_room(self) -> list[GroupFailed]:
        """Preempt groups, the last ones first, until the next tokens of all rows fit into the KV cache."""
        while len(self._rows) and self._forward.cache.num_missing_blocks():
            group, partials = self._stop(max(self._running))
            group = group.preempted(partials)
            if not self._running:
                return [self._fail_too_large(group)]
            log.info("preempted a group: the KV cache is full", lease=group.request.lease)
            self._waiting[group.request.lease] = group
            self._waiting.move_to_end(group.request.lease, last=False)
        return []

    def _fail_too_large(self, group: EmbeddedGroup) -> GroupFailed:
        """Fail a group that does not fit into the KV cache alone."""
        request = group.request
        self._leases.remove(request.lease)
        longest = max((len(partial.token_ids) for partial in request.partial), default=0)
        reason = (
            f"{request.num_completions} completions of a prompt of {len(request.prompt_ids)} tokens fill the KV cache "
            f"of {self._kv_cache_mb} MiB when the longest has {longest} tokens; raise rollout.kv_cache_mb, or lower "
            "the number of completions or max_tokens"
        )
        return GroupFailed(request.lease, reason)

    def _take_joining(self) -> list[EmbeddedGroup]:
        """Dequeue, in order, the waiting groups whose rows fit and whose prompts may be prefilled together."""
        joining: list[EmbeddedGroup] = []
        taken: list[PrefillSequence] = []
        room = self._max_rows - len(self._rows)
        while self._waiting and not (self._exclusive and (joining or len(self._rows))):
            group = next(iter(self._waiting.values()))
            sequences = [*taken, *group.prefill_sequences()]
            if group.num_rows > room or (joining and num_packed_tokens(sequences) > PREFILL_TOKENS):
                break
            if not self._has_blocks(sequences, alone=not joining and not len(self._rows)):
                break
            room -= group.num_rows
            taken = sequences
            joining.append(self._waiting.popitem(last=False)[1])
        return joining

    def _has_blocks(self, sequences: Sequence[PrefillSequence], *, alone: bool) -> bool:
        """Return whether the KV cache has the blocks of `sequences`, and one more for each row unless `alone`."""
        free = self._forward.cache.num_free_blocks
        if free is None:
            return True
        growth = 0 if alone else len(self._rows) + sum(len(sequence.indices) for sequence in sequences)
        return self._forward.num_blocks_of(sequences) + growth <= free

    def _decode(self) -> torch.Tensor:
        """Compute the newest token of every row; return the logits of the next ones."""
        table, recorder = self._rows.table, self._forward.recorder
        if not table["routed"].any():
            return self._forward.decode(table["last"], table["position"])
        with recorder.recording():
            logits = self._forward.decode(table["last"], table["position"])
        self._rows.record_experts(recorder.take())
        return logits

    # --- tokens ----------------------------------------------------------------------------------------------------

    def _sample(self, logits: torch.Tensor) -> list[GroupResult | GroupFailed]:
        """Sample and record a token per row, and return the groups that ended with it."""
        table = self._rows.table
        if self._sampling is None:
            device = self._forward.device
            self._sampling = sampling_rows(
                table["temperature"],
                table["top_p"],
                table["top_k"],
                device,
                min_p=table["min_p"],
                records=table["records"] == 1,
            )
        uniform = self._forward.to_device(uniforms(table["key"], table["length"]))
        drawn = draw(logits, self._sampling, uniform, self._banned_ids)
        # A single copy to the host waits for the device once; float64 holds all exactly.
        columns = (drawn.tokens, drawn.logprobs, *(() if drawn.log_mass is None else (drawn.log_mass,)))
        host = torch.stack([column.double() for column in columns]).cpu().numpy()
        token_ids, broken = host[0].astype(np.int64), ~np.isfinite(host[1])
        stopped, spent, sampled = self._rows.record(token_ids, host[1], self._version)
        if drawn.log_mass is not None:
            self._rows.record_truncation(host[2], _kept_tokens(drawn, len(table)), sampled)
        self._num_tokens += int(sampled.sum())
        self._call_listeners(sampled & ~broken, token_ids, host[1])
        ended: list[GroupResult | GroupFailed] = []
        removed = stopped | spent
        if broken.any():
            numbers = np.unique(table["group"][broken])
            ended.extend(self._fail(int(number)) for number in numbers)
            removed |= np.isin(table["group"], numbers)
        if removed.any():
            ended.extend(self._finish(removed, stopped))
            if self._exclusive:  # rows that replay an ended completion leave with their group
                removed |= ~np.isin(table["group"], list(self._running))
            self._remove_rows(removed)
            if broken.any():
                self._forward.cache.clear_free()
        return ended

    def _call_listeners(
        self, sampled: npt.NDArray[np.bool_], token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float64]
    ) -> None:
        """Pass the sampled tokens to the listeners of their groups."""
        observed = [number for number, group in self._running.items() if group.request.listener is not None]
        if not observed:
            return
        table = self._rows.table
        for row in np.flatnonzero(sampled & np.isin(table["group"], observed)):
            listener: Callable[..., None] | None = self._running[int(table["group"][row])].request.listener
            assert listener is not None
            listener(int(table["index"][row]), (int(token_ids[row]),), (float(logprobs[row]),))

    def _finish(self, removed: npt.NDArray[np.bool_], stopped: npt.NDArray[np.bool_]) -> list[GroupResult]:
        """Store the completions of the rows that end; return the groups whose completions have all ended."""
        results = []
        for row in np.flatnonzero(removed):
            record = self._rows.table[row]
            group = self._running.get(int(record["group"]))
            if group is None:  # it failed in this step
                continue
            if int(record["index"]) not in group.done:
                status = Status.OK if stopped[row] else Status.TRUNCATED
                group.done[int(record["index"])] = self._rows.completion(row, status)
            if not group.num_rows:
                del self._running[group.number]
                results.append(self._end(group))
        return results

    def _end(self, group: EmbeddedGroup) -> GroupResult:
        self._leases.remove(group.request.lease)
        return group.result()

    def _fail(self, number: int) -> GroupFailed:
        """Fail a running group that has non-finite log-probabilities."""
        group = self._running.pop(number)
        self._leases.remove(group.request.lease)
        reason = f"the model's logits are not finite at weight version {self._version}; check the weights"
        return GroupFailed(group.request.lease, reason)

    def _remove_rows(self, removed: npt.NDArray[np.bool_]) -> None:
        self._forward.cache.keep(self._rows.remove(removed))
        if self._sampling is not None and not self._sampling.is_plain:
            self._sampling = None

    # --- weights ---------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Return the layout of this process, the only worker."""
        return self._weights.layout

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live weights by Hugging Face name, tied ones once."""
        if self._live is None:
            self._live = live_tensors(self._model)
        return self._live

    def pull(
        self,
        offer: Offer,
        plan: Plan,
        *,
        root_plan: Plan | None = None,
        deadline_s: float,
        cancelled: Callable[[], bool],
        progress: Callable[[PullProgress], None],
        in_place: bool = False,
        relays: Sequence[Offer] = (),
        announce: Callable[[Offer], None] | None = None,
    ) -> PullReport:
        """Pull a version into staging buffers, or into the live weights; see `Engine.pull`."""
        return self._weights.pull(
            offer,
            plan,
            root_plan=root_plan,
            deadline_s=deadline_s,
            cancelled=cancelled,
            progress=progress,
            in_place=in_place,
            relays=relays,
            announce=announce,
        )

    def adopt(self, mode: CacheMode) -> AdoptionReport:
        """Switch to the version that was pulled last, and verify its digests.

        No group shares the KV cache of an earlier one, so `salt` equals `keep` here.

        Raises:
            WeightsError: nothing is staged.
        """
        offer = self._weights.switch()
        self.set_version(offer.version)
        recomputed = self._recompute() if mode == "recompute" else 0
        root, layout_root = self._weights.attest(offer)
        return AdoptionReport(offer.version, root == offer.root, root, layout_root, recomputed)

    def set_version(self, version: int) -> None:
        """Set the version of the weights that are in place now; the KV cache is kept."""
        self._version = version
        for norms in self._weight_norms:
            norms.forget()

    def _recompute(self) -> int:
        """Recompute the KV cache of the running rows with the current weights; return the number of tokens."""
        sequences = []
        for row, record in enumerate(self._rows.table):
            group = self._running[int(record["group"])]
            ids = [*group.request.prompt_ids, *self._rows.cached_ids(row)]
            sequences.append(PrefillSequence(group, (int(record["index"]),), ids))
        if sequences:
            with torch.inference_mode():
                self._forward.recompute(sequences, self._version)
        return sum(len(sequence.ids) for sequence in sequences)

    # --- the device ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Move the weights to host memory; all groups must have been removed before."""
        assert not len(self._rows), "groups are interrupted before the engine sleeps"
        if self._forward.device.type == "cuda":
            self._forward.cache.shrink()
            self._move("cpu")
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Move the weights back, unchanged."""
        self._move(self._forward.device)

    def _move(self, device: torch.device | str) -> None:
        self._model.to(device)
        self._live = None  # a module replaces its buffers

    def close(self) -> None:
        """Stop the threads and connections of pulls."""
        self._weights.close()


def _sequence_length(model: PreTrainedModel, max_model_len: int | None) -> int:
    """Return how many tokens a sequence may have: `max_model_len`, or the context length of the model.

    Raises:
        ConfigError: there is neither, or no room for a prompt token and a sampled one.
    """
    length = max_model_len if max_model_len is not None else context_length(model.config)
    if length is None:
        raise ConfigError("the model declares no context length; give max_model_len")
    if length < 2:
        raise ConfigError(f"max_model_len is {length}; give at least 2, a prompt token and a sampled one")
    return length


def _banned_ids(inputs: MediaInputs | None, device: torch.device) -> torch.Tensor | None:
    """Return the tokens that are never sampled: a placeholder would need an image, at the latest in the trainer.

    None if there are none.
    """
    banned = [] if inputs is None else sorted(placeholder_ids(inputs).values())
    return torch.tensor(banned, device=device) if banned else None


def _kept_tokens(drawn: Drawn, num_rows: int) -> KeptTokens | None:
    """Return the kept tokens of each row, on the host; None if no row records them."""
    if drawn.kept_rows is None or drawn.kept_ids is None:
        return None
    counts = np.bincount(drawn.kept_rows.cpu().numpy(), minlength=num_rows)
    return KeptTokens(counts.astype(np.int32), drawn.kept_ids.cpu().numpy().astype(np.int32))
