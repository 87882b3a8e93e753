"""Worker extension: the class that vLLM mixes into its workers, and the weights that each of them pulls.

vLLM imports this module in each worker before it builds the model, and calls the methods of `WorkerExtension` by name.
They return errors instead of raising them: an exception in one worker alone would leave vLLM's workers out of step.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from vllm.platforms import current_platform

from starling.algo.architecture import placeholders
from starling.common.errors import WeightsError
from starling.rollout.engine.vllm import cpu, multimodal, processes
from starling.rollout.engine.vllm.pull_progress import PullMessage, PullMessageSender
from starling.rollout.engine.vllm.worker import cpu_kernels, sampler
from starling.rollout.engine.vllm.worker.adapters import AdapterSlot
from starling.rollout.engine.vllm.worker.recorded import (
    PartLoader,
    PublishedModel,
    RecordedWorker,
    loadable,
    record_worker,
    renew_derived,
)
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import Table, in_terms_of
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import Offer, Transport, decode_offer
from starling.weightsync.plan.layout import Layout, decode_layout, encode
from starling.weightsync.plan.planner import Plan, decode_plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.puller.report import PullProgress
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.endpoints import ServingOptions

P = ParamSpec("P")
T = TypeVar("T")
Answer = tuple[str, Any]
"""The error, empty if there was none, and the result."""
Parts = Callable[[], Iterator[Mapping[str, torch.Tensor]]]
"""Returns an iterator over tensors to fill, by storage; what was filled is in use when the next ones are requested."""

processes.end_with_replica()
multimodal.take_prepared_prompts()
if current_platform.is_cpu():
    cpu.keep_weights()
    cpu.keep_experts()
    cpu.do_without_torchvision()
    cpu.fix_speculative_decoding()
    cpu_kernels.install_kernels()


def returns_errors(method: Callable[P, T]) -> Callable[P, Answer]:
    """Make `method` return an `Answer` instead of raising."""

    @wraps(method)
    def answer(*arguments: P.args, **named: P.kwargs) -> Answer:
        try:
            return "", method(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - the replica raises it
            return f"{type(error).__name__}: {error}", None

    return answer


class WorkerWeights:
    """The weights of one worker, and the pulls into them."""

    def __init__(
        self,
        tensors: Callable[[], dict[str, torch.Tensor]],
        apply: Callable[[], None],
        layout: Layout,
        rank: int,
        digests: DigestMode,
        socket_path: str,
        parts: Parts | None,
        serving: ServingOptions | None,
    ) -> None:
        """Prepare for pulls.

        Args:
            tensors: returns this worker's tensors of a version, by their names in the layout.
            apply: makes vLLM compute with these tensors after they have changed.
            layout: the layout of all workers.
            rank: this worker's rank.
            digests: how a version is verified.
            socket_path: the replica's socket for pull messages.
            parts: makes the tensors that are filled one after the other, where not all of a version goes straight into
                vLLM's parameters; None where all of it does.
            serving: how pulls that are announced are served to others.
        """
        self._tensors, self._apply, self._rank, self._parts = tensors, apply, rank, parts
        self._puller = Puller(layout, rank=rank, digests=digests, serving=serving)
        self._messages = PullMessageSender(socket_path)
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._offer: Offer | None = None
        self._root_plan: Plan | None = None

    def pull(
        self,
        number: int,
        offer: bytes,
        plan: bytes,
        root_plan: bytes,
        deadline_s: float,
        in_place: bool,
        relays: Sequence[bytes],
        announce: bool,
    ) -> None:
        """Start a pull in a thread, which sends messages; `root_plan` may be empty."""
        self.cancel()
        before, self._cancelled = self._thread, threading.Event()
        self._offer = decode_offer(offer)
        self._root_plan = decode_plan(root_plan) if root_plan else None
        others = [decode_offer(relay) for relay in relays]
        arguments = (before, number, decode_plan(plan), deadline_s, in_place, self._cancelled, others, announce)
        self._thread = threading.Thread(target=self._pull, args=arguments, name="pull", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Cancel a running pull."""
        self._cancelled.set()

    def adopt(self, version: int) -> tuple[str, str]:
        """Switch to the version that was pulled, unless it is in place already.

        Returns: root and rank root of this worker.
        """
        if self._parts is not None:
            return self._fill(self._parts, version)
        # By what was pulled and not by its number: a version in place may be lost, or not be what was published.
        if self._puller.state == "staged":
            switched = self._puller.switch(self._tensors())
            if switched != version:
                raise WeightsError(f"Version {switched} was staged, not {version}.")
        self._apply()
        assert self._offer is not None
        roots = self._puller.attest_roots(self._tensors(), self._offer, self._root_plan)
        return roots.root, roots.rank_root

    def _fill(self, parts: Parts, version: int) -> tuple[str, str]:
        """Switch to a staged version part by part; returns as `adopt`."""
        assert self._offer is not None
        roots = self._puller.switch_in_parts(parts(), self._offer, self._root_plan)
        if self._puller.version != version:
            raise WeightsError(f"Version {self._puller.version} was staged, not {version}.")
        self._apply()
        return roots.root, roots.rank_root

    def close(self) -> None:
        """Stop a running pull and close all connections."""
        self.cancel()
        self._puller.close()
        self._messages.close()

    def _pull(
        self,
        before: threading.Thread | None,
        number: int,
        plan: Plan,
        deadline_s: float,
        in_place: bool,
        cancelled: threading.Event,
        relays: Sequence[Offer],
        announce: bool,
    ) -> None:
        if before is not None:
            before.join(deadline_s)  # the earlier pull was cancelled

        def progress(progress: PullProgress) -> None:
            self._messages.send(PullMessage(pull=number, rank=self._rank, progress=progress))

        def announced(offer: Offer) -> None:
            self._messages.send(PullMessage(pull=number, rank=self._rank, offer=offer))

        assert self._offer is not None
        try:
            report = self._puller.pull(
                self._offer,
                plan,
                deadline_s=deadline_s,
                cancelled=cancelled.is_set,
                # What is packed or loaded at the adoption is always staged, in host memory.
                into=self._tensors() if in_place and self._parts is None else None,
                progress=progress,
                relays=relays,
                relays_first=True,
                announce=announced if announce else None,
            )
        except Exception as error:  # noqa: BLE001 - raised again in the replica
            self._messages.send(PullMessage(pull=number, rank=self._rank, problem=f"{type(error).__name__}: {error}"))
        else:
            self._messages.send(PullMessage(pull=number, rank=self._rank, report=report))


class WorkerExtension:
    """Mixed into vLLM's `Worker`. Names have a prefix, as vLLM rejects names that its workers already have."""

    rank: int
    model_runner: Any
    vllm_config: Any
    starling_slot: AdapterSlot | None = None
    """The adapters, if a version consists of adapters."""
    starling_published: PublishedModel
    starling_recorded: RecordedWorker | None = None
    """What was recorded of the model's loader; None for adapters and quantised weights."""
    starling_weights: WorkerWeights | None = None
    """None where no version is pulled."""

    @returns_errors
    def starling_prepare(self) -> None:
        """Prepare the worker for requests, with the weights that it has loaded."""
        self._starling_prepare()

    @returns_errors
    def starling_describe(self, quantise: str) -> bytes:
        """Prepare the worker; return its part of the layout, for weights in the format `weights.quantise`."""
        self._starling_prepare()
        runner, config, replica = self.model_runner, self.vllm_config, f"worker {self.rank}"
        if quantise:
            from starling.rollout.engine.vllm.worker.packing import packed_layout

            return encode(packed_layout(runner.model, replica, self._starling_table(), quantise))
        published = PublishedModel(config)
        self.starling_published = published
        self.starling_recorded = recorded = record_worker(runner.get_model(), config, published, replica)
        if config.load_config.load_format == "dummy":  # vLLM leaves zeros where it loads nothing
            tensors = loadable(runner.get_model())
            for name in recorded.padded:
                tensors[name].zero_()
        return encode(recorded.layout)

    def _starling_table(self) -> Table:
        """Return this worker's parameters in terms of those that the policy publishes, from the family's table."""
        config = self.vllm_config
        parallel, vision = config.parallel_config, config.model_config.multimodal_config
        described = json.loads((Path(config.model_config.model) / "config.json").read_text())
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        table = worker_table(
            described,
            self.rank,
            tp=parallel.tensor_parallel_size,
            pp=parallel.pipeline_parallel_size,
            whole_experts=parallel.enable_expert_parallel and parallel.tensor_parallel_size > 1,
            whole_tower=vision is not None and vision.mm_encoder_tp_mode == "data",
            dtype=dtype,
        )
        return in_terms_of(table, transformers_table(described, dtype))

    @returns_errors
    def starling_adapt(self, layout: bytes, config: dict[str, Any]) -> bytes:
        """Prepare the worker for versions that are adapters, see `AdapterSlot`; return its part of the layout."""
        self._starling_prepare()
        adapted = decode_layout(layout)
        self.starling_slot = AdapterSlot(self.model_runner.get_model(), adapted, config)
        return encode(layout_of(self.starling_slot.tensors, f"worker {self.rank}", base=adapted.base))

    @returns_errors
    def starling_missing(self) -> list[str]:
        """Return the layers that have adapters in training, but not in this worker."""
        assert self.starling_slot is not None
        return self.starling_slot.missing()

    @returns_errors
    def starling_join(
        self,
        layout: bytes,
        digests: DigestMode,
        socket_path: str,
        quantise: str,
        serving: tuple[Transport, str, bool] | None,
    ) -> int:
        """Take the layout of all workers; return the extra bytes that an adoption needs for the largest part."""
        model, slot, joined = self.model_runner.get_model(), self.starling_slot, decode_layout(layout)
        recorded, config = self.starling_recorded, self.vllm_config
        parts: Parts | None = None
        extra_bytes = 0

        def tensors() -> dict[str, torch.Tensor]:
            return loadable(model) if slot is None else slot.tensors

        def apply() -> None:
            changed = slot is None or slot.apply()
            if changed and current_platform.is_cpu():
                cpu.repack(model)
            if changed:
                renew_derived(model, config)

        if quantise:
            from starling.rollout.engine.vllm.worker.packing import Packer  # uses internals of vLLM

            packer = Packer(model, joined, self.rank, quantise, config)
            parts, extra_bytes = packer.layers_to_fill, packer.layer_bytes
        elif recorded is not None and (recorded.whole or recorded.processed):
            loader = PartLoader(model, config, self.starling_published, recorded)
            parts, extra_bytes = loader.parts_to_fill, loader.part_bytes
        served = None if serving is None else ServingOptions(*serving)
        self.starling_weights = WorkerWeights(tensors, apply, joined, self.rank, digests, socket_path, parts, served)
        return extra_bytes

    @returns_errors
    def starling_pull(
        self,
        number: int,
        offer: bytes,
        plan: bytes,
        root_plan: bytes,
        deadline_s: float,
        in_place: bool,
        relays: Sequence[bytes],
        announce: bool,
    ) -> None:
        """Start a pull; see `WorkerWeights.pull`."""
        assert self.starling_weights is not None
        self.starling_weights.pull(number, offer, plan, root_plan, deadline_s, in_place, relays, announce)

    @returns_errors
    def starling_cancel(self) -> None:
        """Cancel a running pull."""
        assert self.starling_weights is not None
        self.starling_weights.cancel()

    @returns_errors
    def starling_adopt(self, version: int) -> tuple[str, str]:
        """Switch to a version; see `WorkerWeights.adopt`."""
        assert self.starling_weights is not None
        return self.starling_weights.adopt(version)

    def _starling_prepare(self) -> None:
        runner, config = self.model_runner, self.vllm_config.model_config.hf_config
        # A sampled placeholder token would need an image, at the latest in the trainer.
        sampler.install(runner, sorted(placeholders(config).values()))
        multimodal.use_given_positions(runner.get_model(), config)
        if current_platform.is_cpu():
            cpu.complete_runner(runner, first=self.rank < self.vllm_config.parallel_config.tensor_parallel_size)

    @returns_errors
    def starling_close(self) -> None:
        """Stop everything that was started here."""
        if self.starling_weights is not None:
            self.starling_weights.close()
