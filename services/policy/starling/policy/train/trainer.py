"""Parts of a step that all trainers share: microbatch tensors, the backward pass, and metrics of the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from starling.algo.architecture import turn_off_router_logits
from starling.algo.attention.forest import Forest
from starling.algo.attention.interface import Backend
from starling.common.ids import TrainerKind
from starling.policy.core.phases import NullClock, PhaseClock
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import Flags
from starling.policy.train.data.packing import (
    Layout,
    MicrobatchInputs,
    PackedBatch,
    shared_token_fraction,
    to_tensors,
)
from starling.policy.train.loss.logprobs import token_logprobs
from starling.policy.train.loss.router import RouterLoss
from starling.policy.train.memory.setup import optimizer_device
from starling.policy.train.metrics.flops import model_cost, step_flops
from starling.policy.train.metrics.tokens import TokenMetrics
from starling.policy.train.model.layout import AttentionPlan, attention_plan
from starling.policy.train.model.load import longest_sequence
from starling.policy.train.model.reference import ReferenceModel
from starling.policy.train.optim.optimizer import ModelOptimizer, UpdateResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.policy.train.parallel.apply import ParallelModel
    from starling.policy.train.parallel.pipeline.schedule import Pipeline
else:
    PreTrainedModel = torch.nn.Module


LossOf = Callable[[MicrobatchInputs, Any], Tensor]
ReferenceOf = Callable[[PreTrainedModel, MicrobatchInputs], Any]


class Trainer:
    """A model that is trained in place, with its optimizer.

    Each kind of trainer has its own `step`; all of them go pack -> forward -> loss -> update -> metrics.
    """

    kind: ClassVar[TrainerKind]

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        optimizer: OptimizerSettings,
        *,
        total_steps: int,
        clock: PhaseClock | None,
        reference: ReferenceModel | None = None,
        parallel: ParallelModel | None = None,
    ) -> None:
        """Start with a fresh optimizer.

        Args:
            model: trained in place, and put into evaluation mode: dropout would give its tokens other
                log-probabilities than the rollout's.
            settings: defaults of every step.
            optimizer: settings of this kind of step.
            total_steps: planned number of steps; decides the decay of the learning rate.
            clock: records the phases of each step.
            reference: for losses that compare with the weights before training.
            parallel: the ranks that make the steps together, where `model` is on a mesh.
        """
        turn_off_router_logits(model.config)
        self._router_loss = RouterLoss(
            model,
            settings.router_aux_coefficient,
            parallel,
            counts=not settings.memory.compile,
            bias_rate=settings.router_bias_rate,
        )
        self._model, self._settings = model.eval(), settings
        self._clock = clock or NullClock()
        device = optimizer_device(model, settings.memory)
        self._parallel, shards, names = parallel, None, None
        self._cost = model_cost(model) if parallel is None else parallel.whole.cost
        if parallel is not None:
            parallel.check_optimizer(optimizer)
            shards, names = parallel.shards, parallel.whole.names
        self.optimizer = ModelOptimizer(model, optimizer, total_steps, device=device, shards=shards, names=names)
        self.reference = reference

    @property
    def _plan(self) -> AttentionPlan:
        return attention_plan(self._model, self._settings.attention)

    @property
    def _layout(self) -> Layout:
        """Of the microbatches: what the model can compute."""
        return self._plan.layout

    @property
    def _longest(self) -> int | None:
        """Maximum length of a sequence in tokens; None for no limit."""
        limits = longest_sequence(self._model), self._plan.longest
        return min((limit for limit in limits if limit is not None), default=None)

    def _microbatches(
        self, batch: PackedBatch, trained: Flags | None = None, *, with_reference: bool = False
    ) -> Iterator[MicrobatchInputs]:
        """Yield one microbatch's tensors at a time: the pixels of all could be larger than the model.

        On a mesh these are the ones of this rank, which then makes as many passes as the other ranks.

        Args:
            batch: of the update.
            trained: see `to_tensors`.
            with_reference: the reference computes each microbatch too, before the model.
        """
        if self._parallel is None:
            for microbatch in batch.plan:
                self._clock.enter("forward")
                yield to_tensors(batch, microbatch, self._model.device, trained, self._plan.backend)
            return
        passes = self._parallel.passes(batch.plan)
        for number, own in enumerate(passes, start=1):
            self._clock.enter("forward")
            self._parallel.begin_pass(is_last=number == len(passes))
            if own is None:
                self._empty_pass(with_reference=with_reference)
            else:
                inputs = to_tensors(batch, own, self._model.device, trained, self._plan.backend)
                yield self._parallel.divided(inputs)
            reference = self.reference.separate if with_reference and self.reference is not None else None
            self._parallel.end_pass(*([] if reference is None else [reference]))

    def _add_gradients(
        self,
        batch: PackedBatch,
        loss_of: LossOf,
        metrics: TokenMetrics,
        trained: Flags | None = None,
        *,
        reference_of: ReferenceOf | None = None,
    ) -> list[Tensor]:
        """Add the gradient of a batch, with the routers' part. Returns the loss of each microbatch, detached.

        Args:
            batch: of the update.
            loss_of: returns the loss of a microbatch, a scalar, from its inputs and what `reference_of` returned.
            metrics: receives the routers' loss.
            trained: see `to_tensors`.
            reference_of: computes what a loss needs of the reference, from the reference and the inputs.
        """
        if self._parallel is not None and self._parallel.pipeline is not None:
            return self._add_in_stages(self._parallel.pipeline, batch, loss_of, metrics, trained, reference_of)
        losses = []
        for inputs in self._microbatches(batch, trained, with_reference=reference_of is not None):
            found = None
            if reference_of is not None:
                assert self.reference is not None, "there is a reference"
                with self.reference.computing() as reference:
                    found = reference_of(reference, _unrouted(inputs))
            with self._router_loss.recording():
                loss = loss_of(inputs, found)
            losses.append(self._backward(self._router_loss.add_to(loss, inputs, batch.num_sequences, metrics)))
        return losses

    @property
    def _one_at_a_time(self) -> bool:
        """Whether the backward pass of a microbatch comes before the forward pass of the next."""
        return self._parallel is None or self._parallel.pipeline is None

    def _add_in_stages(
        self,
        pipeline: Pipeline,
        batch: PackedBatch,
        loss_of: LossOf,
        metrics: TokenMetrics,
        trained: Flags | None,
        reference_of: ReferenceOf | None,
    ) -> list[Tensor]:
        """Do the same with the blocks divided: losses are of the last stage, and of the routers of each."""
        inputs, is_empty = self._all_inputs(batch, trained)
        of_reference: dict[int, Any] = {}
        if reference_of is not None:
            assert self.reference is not None, "there is a reference"
            self._clock.enter("forward")
            unrouted = [_unrouted(one) for one in inputs]
            with self.reference.computing() as reference:

                def keep(number: int) -> None:
                    if is_empty[number]:  # other ranks gather the stage with this one
                        self._output_sum(reference, unrouted[number])
                    else:
                        of_reference[number] = reference_of(reference, unrouted[number])

                pipeline.of(reference).evaluate(unrouted, keep)
        losses = list[Tensor]()

        def last(number: int) -> Tensor:
            if is_empty[number]:
                return 0.0 * self._output_sum(self._model, inputs[number])
            with self._router_loss.recording():
                loss = loss_of(inputs[number], of_reference.get(number))
            loss = self._router_loss.add_to(loss, inputs[number], batch.num_sequences, metrics)
            losses.append(loss.detach())
            return loss

        def other(number: int, run: Callable[[], Tensor]) -> Tensor:
            if is_empty[number]:
                return run()
            with self._router_loss.recording():
                hidden = run()
            hidden, loss = self._router_loss.attach_to(hidden, inputs[number], batch.num_sequences, metrics)
            losses.append(loss)
            return hidden

        self._clock.enter("backward")
        pipeline.train(inputs, last, other)
        return losses

    @torch.no_grad()
    def _evaluate(
        self, batch: PackedBatch, function: Callable[[MicrobatchInputs], None], trained: Flags | None
    ) -> None:
        """Call `function` for each microbatch of this rank, without gradients."""
        if self._parallel is not None and self._parallel.pipeline is not None:
            inputs, is_empty = self._all_inputs(batch, trained)
            self._clock.enter("forward")

            def compute(number: int) -> None:
                if is_empty[number]:  # other ranks gather the stage with this one
                    self._output_sum(self._model, inputs[number])
                else:
                    function(inputs[number])

            self._parallel.pipeline.evaluate(inputs, compute)
            return
        for one in self._microbatches(batch, trained):
            function(one)

    def _all_inputs(self, batch: PackedBatch, trained: Flags | None) -> tuple[list[MicrobatchInputs], list[bool]]:
        """Return the inputs of all passes of this rank, and which only take part in collectives."""
        assert self._parallel is not None
        own = self._parallel.passes(batch.plan)
        device, backend = self._model.device, self._plan.backend
        found = [
            _one_token(self._layout, device, backend)
            if one is None
            else to_tensors(batch, one, device, trained, backend)
            for one in own
        ]
        return [self._parallel.divided(one) for one in found], [one is None for one in own]

    def _empty_pass(self, *, with_reference: bool) -> None:
        """Take part in a pass of other ranks: compute one token, and add a gradient of 0 to every parameter."""
        assert self._parallel is not None
        inputs = self._parallel.divided(_one_token(self._layout, self._model.device, self._plan.backend))
        if with_reference and self.reference is not None:
            with self.reference.computing() as reference:
                self._output_sum(reference, inputs)
        output = self._output_sum(self._model, inputs)
        if output.requires_grad:
            self._backward(0.0 * output)

    def _output_sum(self, model: PreTrainedModel, inputs: MicrobatchInputs) -> Tensor:
        """Return a sum that depends on every parameter that a microbatch's loss depends on."""
        return token_logprobs(model, inputs, chunk_tokens=self._settings.memory.logprob_chunk_tokens)[0].sum()

    @property
    def _gather(self) -> Any:
        """See `TokenMetrics`."""
        return None if self._parallel is None else self._parallel.gather

    def begin_step(self) -> None:
        """Prepare a step, after one that may have failed."""
        self._router_loss.begin_step()

    def _apply_gradient(self, loss: float, settings: OptimizerSettings, *, ends_step: bool = True) -> UpdateResult:
        """Make an update, see `ModelOptimizer.apply`; `ends_step`: the last one of its step."""
        if ends_step:
            self._router_loss.complete_load()
        return self.optimizer.apply(loss, settings, ends_step=ends_step)

    def _total(self, losses: Sequence[Tensor]) -> float:
        """Return the sum of the losses of all microbatches, those of other ranks included."""
        total = torch.stack(list(losses)).sum() if losses else torch.zeros((), device=self._model.device)
        return float(total if self._parallel is None else self._parallel.sum(total))

    def _backward(self, loss: Tensor) -> Tensor:
        """Accumulate the gradient of `loss`. Returns its detached value."""
        self._clock.enter("backward")
        torch.autograd.backward(loss)
        return loss.detach()

    def _step_metrics(
        self,
        result: UpdateResult,
        optimizer: OptimizerSettings,
        batch: PackedBatch,
        *,
        num_tokens: int,
        num_sequences: int,
    ) -> dict[str, float]:
        """Return the metrics common to all steps of one optimizer update."""
        return {
            "grad_norm": result.grad_norm,
            "max_grad_norm": optimizer.max_grad_norm,
            "learning_rate": result.learning_rate,
            "skipped_step": float(result.skipped),
            "num_tokens": float(num_tokens),
            "num_sequences": float(num_sequences),
            "num_microbatches": float(len(batch.plan)),
            "padding_waste": batch.padding_waste,
            "shared_token_fraction": shared_token_fraction([batch]),
            "model_flops": step_flops(self._cost, batch.lengths, batch.reach, num_tokens),
        }


def reference_model(
    model: PreTrainedModel,
    initial: Callable[[], PreTrainedModel] | None,
    given: PreTrainedModel | None,
    parallel: ParallelModel | None,
) -> ReferenceModel:
    """Return the reference of `model`, which may be on a mesh; see `ReferenceModel`."""
    if parallel is None:
        return ReferenceModel(model, initial, given)
    # What the pass of the reference's adapters leaves gathered is not the trained ones.
    return ReferenceModel(model, initial, given, reload=True, swapped=parallel.end_pass)


def _unrouted(inputs: MicrobatchInputs) -> MicrobatchInputs:
    """Return `inputs` for a reference, whose routers choose for themselves: it is no copy of the rollout's model."""
    return inputs if inputs.replay is None else replace(inputs, replay=None)


def _one_token(layout: Layout, device: torch.device, backend: Backend) -> MicrobatchInputs:
    """Return a microbatch of one token, which is trained."""
    zeros = torch.zeros(1, 1, dtype=torch.int64, device=device)
    numbers = np.zeros(1, dtype=np.int64)
    return MicrobatchInputs(
        input_ids=zeros,
        position_ids=zeros,
        structure=Forest.of_documents([1]) if layout == "forest" else None,
        source=zeros[0],
        targets=zeros[0],
        tokens=numbers,
        segments=numbers,
        sequences=np.zeros((1, 2), dtype=np.int64),
        backend=backend,
    )
