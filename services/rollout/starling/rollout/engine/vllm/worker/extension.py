"""Worker extension: the class that vLLM mixes into its workers, and the weights that each of them pulls.

vLLM imports this module in each worker before it builds the model, and calls the methods of `WorkerExtension` by name.
They return errors instead of raising them: an exception in one worker alone would leave vLLM's workers out of step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from vllm.platforms import current_platform

from starling.algo.architecture import placeholders
from starling.common.settings import environment_variable
from starling.rollout.engine.vllm import cpu, multimodal, processes
from starling.rollout.engine.vllm.pull_progress import PullMessage, PullMessageSender
from starling.rollout.engine.vllm.quantised import published_model
from starling.rollout.engine.vllm.worker import cpu_kernels, sampler
from starling.rollout.engine.vllm.worker.adapters import AdapterSlot
from starling.rollout.engine.vllm.worker.experts import ExpertRecorder
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.offers.offer import Offer, Transport, decode_offer
from starling.weightsync.offers.sealed import unseal
from starling.weightsync.plan.layout import decode_layout, encode
from starling.weightsync.plan.planner import decode_plan
from starling.weightsync.puller.report import PullProgress
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.endpoints import ServingOptions
from starling.weightsync.vllm.cpu import keep_weights
from starling.weightsync.vllm.quantised import record_quantised
from starling.weightsync.vllm.recorded import Published, PublishedModel, RecordedWorker
from starling.weightsync.vllm.worker import LiveWeights, WorkerWeights, record_model, recorded_weights, renew

P = ParamSpec("P")
T = TypeVar("T")
Answer = tuple[str, Any]
"""The error, empty if there was none, and the result."""

processes.end_with_replica()
multimodal.take_prepared_prompts()
if current_platform.is_cpu():
    keep_weights()
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


def unsealed(offer: bytes) -> bytes:
    """Return an encoded offer, which is sealed if the engine is on several hosts. Raises WeightsError."""
    key = environment_variable(processes.OFFER_KEY)
    return unseal(bytes.fromhex(key), offer) if key else offer


class WorkerPulls:
    """The pulls of one worker, each in a thread that sends messages to the replica."""

    def __init__(self, weights: WorkerWeights, rank: int, socket_path: str) -> None:
        """Prepare for pulls.

        Args:
            weights: of this worker.
            rank: this worker's rank.
            socket_path: the replica's socket for pull messages.
        """
        self._weights, self._rank = weights, rank
        self._messages = PullMessageSender(socket_path)
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None

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
        cancelled = self._cancelled
        arguments: dict[str, Any] = {
            "offer": decode_offer(unsealed(offer)),
            "plan": decode_plan(plan),
            "root_plan": decode_plan(root_plan) if root_plan else None,
            "deadline_s": deadline_s,
            "in_place": in_place,
            "cancelled": cancelled.is_set,
            "relays": [decode_offer(unsealed(relay)) for relay in relays],
        }

        def run() -> None:
            if before is not None:
                before.join(deadline_s)  # the earlier pull was cancelled
            self._pull(number, arguments, announce)

        self._thread = threading.Thread(target=run, name="pull", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Cancel a running pull."""
        self._cancelled.set()

    def adopt(self, version: int) -> tuple[str, str]:
        """Switch to the version that was pulled; return root and rank root of this worker."""
        roots = self._weights.adopt(version)
        return roots.root, roots.rank_root

    def close(self) -> None:
        """Stop a running pull and close all connections."""
        self.cancel()
        self._weights.close()
        self._messages.close()

    def _pull(self, number: int, arguments: dict[str, Any], announce: bool) -> None:
        def progress(progress: PullProgress) -> None:
            self._messages.send(PullMessage(pull=number, rank=self._rank, progress=progress))

        def announced(offer: Offer) -> None:
            self._messages.send(PullMessage(pull=number, rank=self._rank, offer=offer))

        try:
            report = self._weights.pull(**arguments, progress=progress, announce=announced if announce else None)
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
    starling_published: Published
    starling_recorded: RecordedWorker | None = None
    """What was recorded of the model's loader; None for adapters."""
    starling_pulls: WorkerPulls | None = None
    """None where no version is pulled."""
    starling_experts: ExpertRecorder | None = None
    """None until a request is to be recorded."""

    @returns_errors
    def starling_prepare(self) -> None:
        """Prepare the worker for requests, with the weights that it has loaded."""
        self._starling_prepare()

    @returns_errors
    def starling_describe(self, quantise: str) -> bytes:
        """Prepare the worker; return its part of the layout, for weights in the format `weights.quantise`."""
        self._starling_prepare()
        runner, config, replica = self.model_runner, self.vllm_config, f"worker {self.rank}"
        full = PublishedModel.of(config)
        if quantise:
            quantised = published_model(full, quantise)
            recorded = record_quantised(runner.get_model(), config, quantised, replica)
            self.starling_published = quantised
        else:
            recorded = record_model(runner.get_model(), config, full, replica)
            self.starling_published = full
        self.starling_recorded = recorded
        return encode(recorded.layout)

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
        serving: tuple[Transport, str, bool] | None,
    ) -> int:
        """Take the layout of all workers; return the extra bytes that an adoption needs for the largest part."""
        joined = decode_layout(layout)
        live = self._starling_live()
        served = None if serving is None else ServingOptions(*serving)
        if served is not None and (own := environment_variable(processes.SERVED_AT)):
            served = served._replace(host=own)
        weights = WorkerWeights(live, joined, self.rank, digests, served)
        self.starling_pulls = WorkerPulls(weights, self.rank, environment_variable(processes.PULLS) or socket_path)
        return live.part_bytes

    def _starling_live(self) -> LiveWeights:
        """Return what a version fills in this worker."""
        model, slot, config = self.model_runner.get_model(), self.starling_slot, self.vllm_config
        if slot is not None:

            def apply() -> None:
                if slot.apply():
                    renew(model, config)

            return LiveWeights(lambda: slot.tensors, apply)
        assert self.starling_recorded is not None
        return recorded_weights(model, config, self.starling_published, self.starling_recorded)

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
        """Start a pull; see `WorkerPulls.pull`."""
        assert self.starling_pulls is not None
        self.starling_pulls.pull(number, offer, plan, root_plan, deadline_s, in_place, relays, announce)

    @returns_errors
    def starling_cancel(self) -> None:
        """Cancel a running pull."""
        assert self.starling_pulls is not None
        self.starling_pulls.cancel()

    @returns_errors
    def starling_adopt(self, version: int) -> tuple[str, str]:
        """Switch to a version; see `WorkerPulls.adopt`."""
        assert self.starling_pulls is not None
        return self.starling_pulls.adopt(version)

    @returns_errors
    def starling_record_experts(self) -> tuple[int, int, int] | None:
        """Record the choices of routers from now on; return `ExpertRecorder.sizes`."""
        self.starling_experts = self.starling_experts or ExpertRecorder(self.model_runner, self.vllm_config)
        return self.starling_experts.sizes

    @returns_errors
    def starling_take_experts(self, request_id: str) -> bytes | None:
        """Return the experts of a request's tokens, see `ExpertRecorder.take`."""
        assert self.starling_experts is not None
        experts = self.starling_experts.take(request_id)
        return None if experts is None else experts.tobytes()

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
        if self.starling_pulls is not None:
            self.starling_pulls.close()
