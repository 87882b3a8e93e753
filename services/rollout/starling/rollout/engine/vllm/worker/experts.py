"""Recording of the experts that the routers of a worker's model choose, by request and by slot of the KV cache.

After each pass, the choices of its tokens are copied to the host, into the slots of the cache that the pass has filled,
and for requests that ask for it into a list. The keys of a prefix may come from the cache, computed for another
request; then the experts of its tokens are those of its slots. A token that is computed again, after a preemption or
with a renewed cache, keeps its first experts (docs/decisions/0054-router-replay.md).

The choices themselves are captured by vLLM's routers. Written for the first model runner of vLLM 0.32 and 0.33, whose
own recording (`enable_return_routed_experts`) is for the second one; `launch` selects the first.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from starling.algo.routing import Experts, expert_dtype, no_experts, unrecorded
from starling.rollout.engine.vllm.groups import RECORDS_EXPERTS

NULL_BLOCK: Final = 0
"""vLLM's block that holds no token: what a window has passed."""


class ExpertRecorder:
    """The choices of the routers of one worker's layers."""

    def __init__(self, runner: Any, config: Any) -> None:
        """Record the passes of a model runner from now on.

        Raises:
            ValueError: the model has no experts, or their kernel hides the choice.
        """
        model = runner.get_model()
        self._layers = sorted({int(one.layer_id) for one in model.modules() if isinstance(one, MoERunner)})
        self._capturer = RoutedExpertsCapturer(config.scheduler_config.max_num_batched_tokens, config)
        if self._layers:  # a stage may have none
            bind_routed_experts_capturer(model, self._capturer)  # in each worker: some gather the choices of all
        self._runner = runner
        self._num_experts = int(config.model_config.get_num_experts())
        self._rows: dict[str, _Rows] = {}
        """Of the requests that are recorded, by vLLM's id."""
        self._keeps = get_tensor_model_parallel_rank() == 0  # the others choose the same
        if not self._keeps:
            return
        groups = runner.kv_cache_config.kv_cache_groups
        full = [n for n, group in enumerate(groups) if isinstance(group.kv_cache_spec, FullAttentionSpec)]
        self._group = full[0] if full else 0
        num_slots = runner.kv_cache_config.num_blocks * groups[self._group].kv_cache_spec.block_size
        dtype = expert_dtype(self._num_experts)
        shape = len(self._layers), self._capturer.shape_per_token[1]
        self._slots: Experts = np.full((num_slots, *shape), unrecorded(dtype), dtype)
        self._forward, runner._model_forward = runner._model_forward, self._pass

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """This worker's layers with experts, the experts of each, and how many a token has; None in all but one of the
        workers that share these layers.
        """
        return (len(self._layers), self._num_experts, self._slots.shape[2]) if self._keeps else None

    def take(self, request_id: str) -> Experts | None:
        """Return and forget the experts of a request's tokens, [tokens, layers, chosen]; None as for `sizes`.

        They are those of all computed tokens, from the first of the prompt.
        """
        if not self._keeps:
            return None
        rows = self._rows.pop(request_id, None)
        return self._slots[:0] if rows is None else rows.all

    def _pass(self, *arguments: Any, **named: Any) -> Any:
        """Compute a pass, and keep the choices of its tokens."""
        output = self._forward(*arguments, **named)
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np[: batch.num_reqs + 1]
        first = batch.num_computed_tokens_cpu[: batch.num_reqs]
        chosen = self._chosen(int(starts[-1]))
        rows = np.repeat(np.arange(batch.num_reqs), np.diff(starts))
        positions = np.arange(len(rows)) - starts[rows] + first[rows]
        # All of them before any is read: a request may share a prefix that this pass computes for another one.
        self._slots[self._slots_of(rows, positions)[0]] = chosen
        for row, request_id in enumerate(batch.req_ids):
            if _is_recorded(self._runner.requests[request_id]):
                self._extend(request_id, row, int(first[row]), chosen[starts[row] : starts[row + 1]])
        return output

    def _chosen(self, num_tokens: int) -> Experts:
        """Return the experts of the last pass, on the host."""
        captured = self._capturer.device_buffer[:num_tokens, self._layers].to(torch.int16)
        chosen: Experts = captured.cpu().numpy().astype(self._slots.dtype)
        return chosen

    def _extend(self, request_id: str, row: int, first: int, chosen: Experts) -> None:
        """Add to a request's experts those of the tokens from `first` on, and of the cached ones before."""
        known = self._rows.setdefault(request_id, _Rows(self._slots))
        if known.num < first:
            cached = np.arange(known.num, first)
            slots, is_held = self._slots_of(np.full(len(cached), row), cached)
            experts = self._slots[slots]
            known.add(np.where(is_held[:, None, None], experts, no_experts(len(cached), experts)))
        known.add(chosen[known.num - first :])

    def _slots_of(
        self, rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the slots of tokens, by the row of their request and their position, and which of them hold one."""
        table = self._runner.input_batch.block_table[self._group]
        blocks = table.block_table.np[rows, positions // table.block_size].astype(np.int64)
        return blocks * table.block_size + positions % table.block_size, blocks != NULL_BLOCK


class _Rows:
    """The experts of one request's tokens, which grow with each pass."""

    def __init__(self, like: Experts) -> None:
        self._array, self.num = like[:0], 0

    @property
    def all(self) -> Experts:
        return self._array[: self.num]

    def add(self, experts: Experts) -> None:
        end = self.num + len(experts)
        if end > len(self._array):
            grown = np.empty((2 * end, *self._array.shape[1:]), self._array.dtype)
            grown[: self.num] = self.all
            self._array = grown
        self._array[self.num : end] = experts
        self.num = end


def _is_recorded(request: Any) -> bool:
    parameters = request.sampling_params
    return parameters is not None and RECORDS_EXPERTS in (parameters.extra_args or ())
