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
from typing import Any, ParamSpec, TypeVar

import torch
from vllm.platforms import current_platform

from starling.common.errors import WeightsError
from starling.rollout.engine.vision import placeholders
from starling.rollout.engine.vllm import cpu, media, sampler, watch
from starling.rollout.engine.vllm.news import News, Teller
from starling.weightsync.execute.digests import Digests
from starling.weightsync.execute.pull import Puller
from starling.weightsync.execute.transfer import Progress
from starling.weightsync.layout import Layout, decode_layout, encode
from starling.weightsync.layouts.modules import layout_of
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.offer import Offer, decode_offer
from starling.weightsync.plan import Plan, decode_plan

P = ParamSpec("P")
T = TypeVar("T")
Answer = tuple[str, Any]
"""What went wrong, empty for nothing, and the result."""

watch.end_with_replica()
media.take_prepared_prompts()
if current_platform.is_cpu():
    cpu.keep_weights()
    cpu.do_without_torchvision()
    cpu.mend_speculation()


def answered(method: Callable[P, T]) -> Callable[P, Answer]:
    """Have `method` return an `Answer` in place of raising."""

    @wraps(method)
    def answer(*arguments: P.args, **named: P.kwargs) -> Answer:
        try:
            return "", method(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - the replica raises it
            return f"{type(error).__name__}: {error}", None

    return answer


class Destination:
    """The weights of one worker, and what is pulled into them."""

    def __init__(self, model: torch.nn.Module, layout: Layout, rank: int, digests: Digests, news: str) -> None:
        """Make it ready to pull.

        Args:
            model: this worker's part.
            layout: of all workers.
            rank: of this one.
            digests: how a version is proven.
            news: where the replica listens.
        """
        self._model, self._rank = model, rank
        self._puller = Puller(layout, rank=rank, digests=digests)
        self._teller = Teller(news)
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
        if self._puller.version != version:
            switched = self._puller.switch(self._tensors())
            if switched != version:
                raise WeightsError(f"Version {switched} was staged, not {version}.")
        if current_platform.is_cpu():
            cpu.pack_again(self._model)
        assert self._offer is not None
        return self._puller.attest(self._tensors(), self._offer)

    def close(self) -> None:
        """End everything."""
        self.cancel()
        self._puller.close()
        self._teller.close()

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._model.named_parameters())

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

        def progress(progress: Progress) -> None:
            self._teller.tell(News(pull=number, rank=self._rank, progress=progress))

        assert self._offer is not None
        try:
            report = self._puller.pull(
                self._offer,
                plan,
                deadline_s=deadline_s,
                cancelled=cancelled.is_set,
                into=self._tensors() if in_place else None,
                progress=progress,
            )
        except Exception as error:  # noqa: BLE001 - the replica raises it
            self._teller.tell(News(pull=number, rank=self._rank, problem=f"{type(error).__name__}: {error}"))
        else:
            self._teller.tell(News(pull=number, rank=self._rank, report=report))


class WorkerExtension:
    """Mixed into vLLM's `Worker`. Names are prefixed, as vLLM refuses those that its workers have."""

    rank: int
    model_runner: Any
    vllm_config: Any

    @answered
    def starling_describe(self) -> bytes:
        """Make the worker ready; return its part of the layout."""
        runner, config = self.model_runner, self.vllm_config
        # A sampled placeholder would ask for an image that is not there, in the trainer if not here.
        sampler.install(runner, sorted(placeholders(config.model_config.hf_config).values()))
        media.place_as_told(runner.get_model(), config.model_config.hf_config)
        parallel = config.parallel_config
        tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        if current_platform.is_cpu():
            cpu.complete_runner(runner, first=self.rank < tp)
        table = worker_table(
            json.loads((Path(config.model_config.model) / "config.json").read_text()),
            self.rank,
            tp=tp,
            pp=pp,
            whole_experts=parallel.enable_expert_parallel and tp > 1,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
        )
        layout = layout_of(dict(runner.model.named_parameters()), f"worker {self.rank}", table=table)
        return encode(layout)

    @answered
    def starling_join(self, layout: bytes, digests: Digests, news: str) -> None:
        """Take the layout of all workers."""
        self.starling_destination = Destination(
            self.model_runner.model, decode_layout(layout), self.rank, digests, news
        )

    @answered
    def starling_pull(self, number: int, offer: bytes, plan: bytes, deadline_s: float, in_place: bool) -> None:
        """Begin a pull; see `Destination.pull`."""
        self.starling_destination.pull(number, offer, plan, deadline_s, in_place)

    @answered
    def starling_cancel(self) -> None:
        """End a pull."""
        self.starling_destination.cancel()

    @answered
    def starling_adopt(self, version: int) -> str:
        """Put a version in place; see `Destination.adopt`."""
        return self.starling_destination.adopt(version)

    @answered
    def starling_close(self) -> None:
        """End everything that was begun here."""
        self.starling_destination.close()
