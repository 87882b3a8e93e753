"""What is mixed into vLLM's worker class: one destination of the weights for each worker process.

vLLM imports this module in each worker before it builds the model there, and calls methods of the mixin by name. None
of them raises: an error in one worker alone would leave vLLM's workers out of step. Each returns its problem instead.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from vllm.platforms import current_platform

from starling.common.errors import WeightsError
from starling.rollout.engine.multimodal.prompts import placeholders
from starling.rollout.engine.vllm import cpu
from starling.rollout.engine.vllm import multimodal as media
from starling.rollout.engine.vllm import processes as watch
from starling.rollout.engine.vllm.pull_progress import PullMessage, PullMessageSender
from starling.rollout.engine.vllm.worker import cpu_kernels, sampler
from starling.rollout.engine.vllm.worker.adapters import AdapterSlot
from starling.weightsync.layouts.fused import transformers_table
from starling.weightsync.layouts.parameters import in_terms_of
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.memory.digests import DigestMode
from starling.weightsync.plan.layout import Layout, decode_layout, encode
from starling.weightsync.plan.offer import Offer, decode_offer
from starling.weightsync.plan.planner import Plan, decode_plan
from starling.weightsync.puller.fetch import PullProgress
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of

if TYPE_CHECKING:
    from starling.rollout.engine.vllm.worker.packing import Packer

P = ParamSpec("P")
T = TypeVar("T")
Answer = tuple[str, Any]
"""What went wrong, empty for nothing, and the result."""

watch.end_with_replica()
media.take_prepared_prompts()
if current_platform.is_cpu():
    cpu.keep_weights()
    cpu.keep_experts()
    cpu.do_without_torchvision()
    cpu.mend_speculation()
    cpu_kernels.install_kernels()


def returns_errors(method: Callable[P, T]) -> Callable[P, Answer]:
    """Have `method` return an `Answer` in place of raising."""

    @wraps(method)
    def answer(*arguments: P.args, **named: P.kwargs) -> Answer:
        try:
            return "", method(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - the replica raises it
            return f"{type(error).__name__}: {error}", None

    return answer


class WorkerWeights:
    """The weights of one worker, and what is pulled into them."""

    def __init__(
        self,
        tensors: Callable[[], dict[str, torch.Tensor]],
        place: Callable[[], None],
        layout: Layout,
        rank: int,
        digests: DigestMode,
        news: str,
        packer: Packer | None,
    ) -> None:
        """Make it ready to pull.

        Args:
            tensors: returns what this worker holds of a version, by the names of the layout.
            place: has vLLM compute with what these hold, after they have changed.
            layout: of all workers.
            rank: of this one.
            digests: how a version is proven.
            news: where the replica listens.
            packer: what brings quantised weights into vLLM's layers; None where there are none.
        """
        self._tensors, self._place, self._rank, self._packer = tensors, place, rank, packer
        self._puller = Puller(layout, rank=rank, digests=digests)
        self._teller = PullMessageSender(news)
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self._offer: Offer | None = None

    def pull(self, number: int, offer: bytes, plan: bytes, deadline_s: float, in_place: bool) -> None:
        """Begin to pull in a thread, which tells how it goes."""
        self.cancel()
        before, self._cancelled = self._thread, threading.Event()
        self._offer = decode_offer(offer)
        arguments = (before, number, decode_plan(plan), deadline_s, in_place, self._cancelled)
        self._thread = threading.Thread(target=self._pull, args=arguments, name="pull", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End a pull that is under way."""
        self._cancelled.set()

    def adopt(self, version: int) -> str:
        """Put the version that was pulled in place, unless it is; return what this worker attests."""
        if self._packer is not None:
            return self._pack(self._packer, version)
        if self._puller.version != version:
            switched = self._puller.switch(self._tensors())
            if switched != version:
                raise WeightsError(f"Version {switched} was staged, not {version}.")
        self._place()
        assert self._offer is not None
        return self._puller.attest(self._tensors(), self._offer)

    def _pack(self, packer: Packer, version: int) -> str:
        """Put a staged version of quantised weights in place, layer by layer; return what was attested of each."""
        assert self._offer is not None
        root = self._puller.switch_in_turns(packer.turns(), self._offer)
        if self._puller.version != version:
            raise WeightsError(f"Version {self._puller.version} was staged, not {version}.")
        self._place()
        return root

    def close(self) -> None:
        """End everything."""
        self.cancel()
        self._puller.close()
        self._teller.close()

    def _pull(
        self,
        before: threading.Thread | None,
        number: int,
        plan: Plan,
        deadline_s: float,
        in_place: bool,
        cancelled: threading.Event,
    ) -> None:
        if before is not None:
            before.join(deadline_s)  # it was cancelled

        def progress(progress: PullProgress) -> None:
            self._teller.tell(PullMessage(pull=number, rank=self._rank, progress=progress))

        assert self._offer is not None
        try:
            report = self._puller.pull(
                self._offer,
                plan,
                deadline_s=deadline_s,
                cancelled=cancelled.is_set,
                # What is packed has no place yet: its staging, in the host's memory, is all the same filled.
                into=self._tensors() if in_place and self._packer is None else None,
                progress=progress,
            )
        except Exception as error:  # noqa: BLE001 - the replica raises it
            self._teller.tell(PullMessage(pull=number, rank=self._rank, problem=f"{type(error).__name__}: {error}"))
        else:
            self._teller.tell(PullMessage(pull=number, rank=self._rank, report=report))


class WorkerExtension:
    """Mixed into vLLM's `Worker`. Names are prefixed, as vLLM refuses those that its workers have."""

    rank: int
    model_runner: Any
    vllm_config: Any
    starling_slot: AdapterSlot | None = None
    """Where adapters go, where they make up a version."""

    @returns_errors
    def starling_describe(self, quantise: str) -> bytes:
        """Make the worker ready; return its part of the layout, in the form `weights.quantise`."""
        self._starling_prepare()
        runner, config = self.model_runner, self.vllm_config
        parallel = config.parallel_config
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        described = json.loads((Path(config.model_config.model) / "config.json").read_text())
        vision, dtype = config.model_config.multimodal_config, str(config.model_config.dtype).removeprefix("torch.")
        mine = worker_table(
            described,
            self.rank,
            tp=tp,
            pp=pp,
            whole_experts=parallel.enable_expert_parallel and tp > 1,
            whole_tower=vision is not None and vision.mm_encoder_tp_mode == "data",
            dtype=dtype,
        )
        # The policy publishes the parameters of transformers' class, by the names that they have there.
        table = in_terms_of(mine, transformers_table(described, dtype))
        if quantise:
            from starling.rollout.engine.vllm.worker.packing import packed_layout

            return encode(packed_layout(runner.model, f"worker {self.rank}", table, quantise))
        return encode(layout_of(dict(runner.model.named_parameters()), f"worker {self.rank}", table=table))

    @returns_errors
    def starling_adapt(self, layout: bytes, config: dict[str, Any]) -> bytes:
        """Make the worker ready for versions of adapters, see `slot.Slot`; return its part of the layout."""
        self._starling_prepare()
        adapted = decode_layout(layout)
        self.starling_slot = AdapterSlot(self.model_runner.get_model(), adapted, config)
        return encode(layout_of(self.starling_slot.tensors, f"worker {self.rank}", base=adapted.base))

    @returns_errors
    def starling_missing(self) -> list[str]:
        """Return the layers that have adapters in training, and none here."""
        assert self.starling_slot is not None
        return self.starling_slot.missing()

    @returns_errors
    def starling_join(self, layout: bytes, digests: DigestMode, news: str, quantise: str) -> int:
        """Take the layout of all workers; return the bytes of a layer that are needed beside quantised weights."""
        model, slot, whole = self.model_runner.model, self.starling_slot, decode_layout(layout)
        packer = None
        if quantise:
            from starling.rollout.engine.vllm.worker.packing import Packer  # of inner functions of vLLM

            packer = Packer(model, whole, self.rank, quantise, self.vllm_config)

        def tensors() -> dict[str, torch.Tensor]:
            return dict(model.named_parameters()) if slot is None else slot.tensors

        def place() -> None:
            changed = slot is None or slot.place()
            if changed and current_platform.is_cpu():
                cpu.pack_again(model)

        self.starling_destination = WorkerWeights(tensors, place, whole, self.rank, digests, news, packer)
        return packer.layer_bytes if packer else 0

    @returns_errors
    def starling_pull(self, number: int, offer: bytes, plan: bytes, deadline_s: float, in_place: bool) -> None:
        """Begin a pull; see `WorkerWeights.pull`."""
        self.starling_destination.pull(number, offer, plan, deadline_s, in_place)

    @returns_errors
    def starling_cancel(self) -> None:
        """End a pull."""
        self.starling_destination.cancel()

    @returns_errors
    def starling_adopt(self, version: int) -> str:
        """Put a version in place; see `WorkerWeights.adopt`."""
        return self.starling_destination.adopt(version)

    def _starling_prepare(self) -> None:
        runner, config = self.model_runner, self.vllm_config.model_config.hf_config
        # A sampled placeholder would ask for an image that is not there, in the trainer if not here.
        sampler.install(runner, sorted(placeholders(config).values()))
        media.use_given_positions(runner.get_model(), config)
        if current_platform.is_cpu():
            cpu.complete_runner(runner, first=self.rank < self.vllm_config.parallel_config.tensor_parallel_size)

    @returns_errors
    def starling_close(self) -> None:
        """End everything that was begun here."""
        self.starling_destination.close()
