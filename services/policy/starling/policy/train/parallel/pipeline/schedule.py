"""Pipeline parallelism: the stages of a rank compute microbatches in the order of a schedule of torch.

    forward       a stage receives hidden states, computes its blocks, and sends on; the last one computes the loss
    backward      the same way back, with the gradients of what was sent
    passes        without gradients, such as those of a reference, go through the stages one after another

All ranks know the sizes of all microbatches, and so of everything that is sent: microbatches are not padded to one
size. Schedules that need more microbatches than there are get further ones, of a single token and with a loss of 0.

Schedules that split the backward pass in two (ZBV) need three things, which are asserted: what a stage sends is not a
view; what FSDP shards as a root is the module that the schedule calls; and FSDP frees no parameters between passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from torch.distributed.pipelining.stage import _PipelineStageBase, _RecvInfo

from starling.policy.plan.stages import num_passes, rank_of_stage, stages_of_rank
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.memory.blocks import replace_forward
from starling.policy.train.model.attention import model_arguments
from starling.policy.train.model.lm_head import final_layer
from starling.policy.train.model.routing import replaying
from starling.policy.train.parallel.fsdp import end_pass
from starling.policy.train.parallel.media import vision_tower
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.pipeline.stages import Received, embedding_name, keep_stages
from starling.policy.train.parallel.weights.shards import TiedWeights

_ATTRIBUTE: Final = "_starling_pipeline"

LastStage = Callable[[int], Tensor]
"""Computes microbatch i of the last stage by calling the model: a loss."""
OtherStage = Callable[[int, Callable[[], Tensor]], Tensor]
"""Returns the hidden states of microbatch i, which its second argument computes."""


class Stage(torch.nn.Module):
    """A stage as a module of its own, the root of what FSDP shards together."""

    def __init__(
        self, number: int, body: torch.nn.Module, head: torch.nn.Module | None, tower: torch.nn.Module | None
    ) -> None:
        """Take the stage's part of a model.

        Args:
            number: of the stage.
            body: of the model, with the stage's blocks.
            head: the output layer, of the last stage.
            tower: of images, of the first stage.
        """
        super().__init__()
        self.number, self.body, self.head, self.tower = number, body, head, tower
        self.compute: Callable[[Stage, Tensor | None, int], Tensor] | None = None

    def forward(self, hidden: Tensor | None = None, *, number: Tensor) -> Tensor:
        """Compute microbatch `number` from what the stage before has sent."""
        assert self.compute is not None, "the pipeline computes"
        return self.compute(self, hidden, int(number))


class Pipeline:
    """The stages of this rank, and their order of computation."""

    def __init__(self, model: Any, mesh: Mesh) -> None:
        """Keep only this rank's stages of `model`, in place."""
        self._model, self._mesh, self._settings = model, mesh, mesh.settings
        self._dtype, self._hidden_size = model.dtype, model.config.get_text_config().hidden_size
        own = stages_of_rank(self._settings, mesh.place("pp"))
        last, head = self._settings.num_stages - 1, final_layer(model)
        self.tied = _tied(model, self._settings, own)
        """Where this rank has tied weights that another stage has too."""
        tower, self._embedding = vision_tower(model), embedding_name(model)
        bodies = keep_stages(model, self._settings, mesh.place("pp"))
        self.stages = [
            Stage(number, body, head if number == last else None, tower if number == 0 else None)
            for number, body in zip(own, bodies, strict=True)
        ]
        """In the order in which a microbatch passes them."""
        self._active = self.stages[-1]
        self._inputs: Sequence[MicrobatchInputs] = ()
        replace_forward(model.get_decoder(), self._run_active)
        vars(model)[_ATTRIBUTE] = self

    @staticmethod
    def of(model: torch.nn.Module) -> Pipeline:
        """Return the pipeline of `model`, whose blocks are divided."""
        found: Pipeline = vars(model)[_ATTRIBUTE]
        return found

    def embedding(self) -> torch.nn.Module:
        """Return the embedding of the stage that computes, or what has its place."""
        return self._active.body.get_submodule(self._embedding)

    def is_first(self) -> bool:
        """Return whether the first stage computes."""
        return self._active.number == 0

    def num_passes(self, num_microbatches: int) -> int:
        """Return how many microbatches the schedule needs to compute `num_microbatches`."""
        return num_passes(self._settings, num_microbatches)

    def train(self, inputs: Sequence[MicrobatchInputs], last: LastStage, other: OtherStage) -> None:
        """Compute microbatches and add their gradients.

        Args:
            inputs: as many as `num_passes` says.
            last: computes the loss of a microbatch.
            other: computes the hidden states that another stage sends.
        """
        if not inputs:
            return
        self._prepare(inputs, last, other)
        numbers = torch.arange(len(inputs))
        self._schedule(inputs).step(target=numbers, number=numbers, return_outputs=False)

    @torch.no_grad()
    def evaluate(self, inputs: Sequence[MicrobatchInputs], last: Callable[[int], None]) -> None:
        """Compute microbatches without gradients; see `train`."""
        nothing = torch.zeros(())

        def compute(number: int) -> Tensor:
            last(number)
            return nothing

        self._prepare(inputs, compute, lambda _, run: run())
        group, sent = self._mesh.group("pp"), list[tuple[dist.Work | None, Tensor]]()
        local: list[Tensor] = []
        for stage in self.stages:
            kept: list[Tensor] = []
            before, after = (self._peer(stage.number + step) for step in (-1, 1))
            for number, one in enumerate(inputs):
                hidden = None
                if stage.number > 0 and before is None:
                    hidden = local[number]
                elif stage.number > 0:
                    hidden = torch.empty(self._shape(one), dtype=self._dtype, device=self._model.device)
                    dist.recv(hidden, group=group, group_src=before)
                kept.append(stage(hidden, number=torch.tensor(number)))
                # What goes around to the first rank goes when that has computed its stage: it receives nothing before.
                if after is not None and after > self._mesh.place("pp"):
                    sent.append((dist.isend(kept[-1], group=group, group_dst=after), kept[-1]))
            if after is not None and after < self._mesh.place("pp"):
                sent += [(dist.isend(one, group=group, group_dst=after), one) for one in kept]
            local = kept
        for work, _ in sent:
            assert work is not None
            work.wait()
        for stage in self.stages:
            end_pass(stage)

    def _peer(self, stage: int) -> int | None:
        """Return the place along pp of a stage; None for this one, or if there is no such stage."""
        if not 0 <= stage < self._settings.num_stages:
            return None
        place = rank_of_stage(self._settings, stage)
        return None if place == self._mesh.place("pp") else place

    def _prepare(self, inputs: Sequence[MicrobatchInputs], last: LastStage, other: OtherStage) -> None:
        self._inputs = inputs
        is_split = self._settings.schedule == "zbv"

        def compute(stage: Stage, hidden: Tensor | None, number: int) -> Tensor:
            self._active = stage
            embedding = self.embedding()
            if isinstance(embedding, Received):
                embedding.hidden = hidden
            if stage.head is not None:
                return last(number)
            found = other(number, lambda: self._hidden(number))
            if torch.is_grad_enabled() and not found.requires_grad:
                found.requires_grad_()  # a first stage whose parameters are frozen: the schedule expects a gradient
            assert not (is_split and found._is_view()), "a view cannot be detached in place"
            return found

        for stage in self.stages:
            stage.compute = compute

    def _hidden(self, number: int) -> Tensor:
        """Return the hidden states of the active stage."""
        inputs = self._inputs[number]
        with replaying(inputs.replay):
            found: Tensor = self._model.base_model(**model_arguments(self._model, inputs)).last_hidden_state
        return found

    def _run_active(self, _: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._active.body(*args, **kwargs)

    def _shape(self, inputs: MicrobatchInputs) -> tuple[int, int, int]:
        """Return the shape of the hidden states between two stages."""
        rows, length = inputs.input_ids.shape
        return rows, length // self._mesh.size("tp"), self._hidden_size

    def _schedule(self, inputs: Sequence[MicrobatchInputs]) -> Any:
        shapes = [self._shape(one) for one in inputs]
        stages: list[_PipelineStageBase] = [
            _ShapedStage(stage, self._settings, self._mesh, shapes, self._dtype, self._model.device)
            for stage in self.stages
        ]
        number = len(inputs)
        match self._settings.schedule:
            case "gpipe":
                return ScheduleGPipe(stages[0], number, _itself, scale_grads=False)
            case "1f1b":
                return Schedule1F1B(stages[0], number, _itself, scale_grads=False)
            case "interleaved":
                return ScheduleInterleaved1F1B(stages, number, _itself, scale_grads=False)
            case "zbv":
                if self._mesh.size("dp_shard") > 1:
                    check_split(self.stages)
                return ScheduleZBVZeroBubble(stages, number, _itself, scale_grads=False)


def _tied(model: Any, settings: ParallelSettings, own: Sequence[int]) -> TiedWeights | None:
    weight: Any = final_layer(model).weight
    if model.get_input_embeddings().weight is not weight:
        return None
    names = [name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is weight]
    embedding = next(name for name, _ in model.named_parameters() if name in names)
    head = next(name for name in names if name != embedding)
    last = settings.num_stages - 1
    if 0 in own and last in own:
        return TiedWeights(embedding, head, None)
    if 0 in own:
        return TiedWeights(embedding, None, rank_of_stage(settings, last))
    # Without the embedding the output layer has its name.
    return TiedWeights(None, embedding, 0) if last in own else None


def check_split(stages: Sequence[torch.nn.Module]) -> None:
    """Assert what a backward pass in two parts needs of sharded stages: without it gradients would be wrong."""
    for stage in stages:
        assert isinstance(stage, FSDPModule), "the module that the schedule calls is the root of FSDP"
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                groups = fully_shard.state(module)._fsdp_param_groups  # type: ignore[attr-defined]
                assert all(group.post_forward_mesh_info is None for group in groups), (
                    "FSDP frees nothing between passes"
                )


def _itself(loss: Tensor, _: Tensor) -> Tensor:
    """Return the output of the last stage, which is its loss already."""
    return loss


class _ShapedStage(PipelineStage):
    """A stage whose microbatches have shapes of their own, which are known everywhere: none is found out or sent."""

    def __init__(
        self,
        stage: Stage,
        settings: ParallelSettings,
        mesh: Mesh,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        example = torch.empty(shapes[0], dtype=dtype, device="meta", requires_grad=True)
        super().__init__(
            stage,
            stage.number,
            settings.num_stages,
            device,
            input_args=() if stage.number == 0 else (example,),
            output_args=(example,),
            group=mesh.group("pp"),
        )
        self._shapes, self._of_type = shapes, dtype

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        for number in range(num_microbatches):
            found = () if self.is_first else (self._buffer(number, self.stage_index - 1, requires_grad=True),)
            self.args_recv_info[number] = found

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        for number in range(num_microbatches):
            found = () if self.is_last else (self._buffer(number, self.stage_index + 1, requires_grad=False),)
            self.grad_recv_info[number] = found

    def _buffer(self, number: int, source: int, *, requires_grad: bool) -> _RecvInfo:
        buffer = torch.empty(self._shapes[number], dtype=self._of_type, device=self.device)
        meta = _TensorMeta(buffer.shape, buffer.stride(), buffer.dtype, requires_grad)
        return _RecvInfo(f"microbatch {number} from stage {source}", source, buffer, meta)
