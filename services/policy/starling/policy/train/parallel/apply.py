"""A model on a mesh: what is done to it, in this order, and how its ranks divide a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from starling.algo.architecture import placeholders
from starling.algo.experts import find_experts, num_experts
from starling.common.errors import ConfigError
from starling.common.wire.messages import ModelExperts
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.shared_export import ModelOutline
from starling.policy.train.data.packing import Index, Microbatch, MicrobatchInputs
from starling.policy.train.loss.router import declared_routers
from starling.policy.train.metrics.flops import ModelCost, model_cost
from starling.policy.train.model.layout import AttentionPlan, attention_plan
from starling.policy.train.model.lm_head import find_lm_head
from starling.policy.train.model.load import version_tensors
from starling.policy.train.model.routing import find_routing
from starling.policy.train.model.tensors import all_named
from starling.policy.train.optim.quantised import BLOCK_NUMEL, is_quantised
from starling.policy.train.parallel import expert, fsdp
from starling.policy.train.parallel.available import check_available
from starling.policy.train.parallel.collectives import sum_over
from starling.policy.train.parallel.context.share import check_segments, divide_tokens
from starling.policy.train.parallel.media import MediaForward, vision_tower
from starling.policy.train.parallel.mesh import DATA, RESULTS, SHARDS, Mesh
from starling.policy.train.parallel.passes import divide_passes
from starling.policy.train.parallel.pipeline.schedule import Pipeline
from starling.policy.train.parallel.pipeline.stages import observe_stages
from starling.policy.train.parallel.replicas.peers import StepPeers
from starling.policy.train.parallel.tensor.divide import divide_tensors
from starling.policy.train.parallel.tensor.probe import TensorProbe
from starling.policy.train.parallel.weights.adapters import merged_parts
from starling.policy.train.parallel.weights.parts import cuts_blocks, hidden_masters, part_of, state_parts
from starling.policy.train.parallel.weights.reading import read_weights
from starling.policy.train.parallel.weights.sample import small_copy
from starling.policy.train.parallel.weights.shards import LocalShards, TiedWeights, local_part, owned

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.policy.train.model.deferred import DeferredModel
else:
    PreTrainedModel = torch.nn.Module


def parallelise(
    model: PreTrainedModel, mesh: Mesh, settings: PolicySettings, deferred: DeferredModel | None = None
) -> ParallelModel:
    """Put `model` on `mesh`, in place.

    Args:
        model: whole, with the same weights on every rank, which all call this.
        mesh: of the ranks.
        settings: of the policy.
        deferred: the weights of a `model` that has no memory for them: each rank reads its parts at the end.

    Raises:
        ConfigError: the model or a setting is not available on a mesh; the text names it and the remedy.
    """
    check_available(model, settings)
    # These run the whole model on a few tokens, and remember what they found.
    if model.get_output_embeddings() is not None:
        find_lm_head(model)
    plan = attention_plan(model, settings.attention)
    find_routing(model)
    if mesh.size("cp") > 1:
        check_segments(model, plan, "cp", mesh)
    dtypes = {name: tensor.dtype for name, tensor in all_named(model, each_name=True)}
    whole = WholeModel.of(model)
    partial = _divide_blocks(model, mesh, settings, plan, deferred)
    if mesh.size("ep") > 1:
        divided = set(expert.divide_experts(model, mesh))
        partial = [name for name in partial if name not in divided]
    reshard, roots = settings.parallel.reshard, tuple[torch.nn.Module, ...]()
    pipeline = None
    if mesh.size("pp") > 1:
        pipeline = Pipeline(model, mesh)
        kept = {name for name, _ in model.named_parameters()}
        partial = [name for name in partial if name in kept]
        reshard, roots = "never", tuple(pipeline.stages)
    media = None if vision_tower(model) is None else _media_forward(model, mesh, pipeline)
    if mesh.size(SHARDS) > 1:
        fsdp.shard_parameters(model, mesh, reshard, roots, codes=settings.precision.fsdp_all_gather)
    if deferred is not None:
        read_weights(deferred, roots, dtypes)
    return ParallelModel(model, mesh, whole, partial, pipeline, media)


def _divide_blocks(
    model: PreTrainedModel, mesh: Mesh, settings: PolicySettings, plan: AttentionPlan, deferred: DeferredModel | None
) -> Sequence[str]:
    """Try the code of `model` in stages and with divided matrices, and divide the matrices, where the mesh has ranks.

    Returns the names of whole parameters of whose gradient each rank of tp has a part.
    """
    if mesh.size("pp") * mesh.size("tp") == 1:
        return ()
    # What has no memory is tried on a sample of it.
    tried = model if deferred is None else small_copy(model, deferred.device, num_blocks=mesh.settings.num_stages)
    if mesh.size("pp") > 1:
        observe_stages(tried, mesh.settings, plan)
    if mesh.size("tp") == 1:
        return ()
    check_segments(model, plan, "tp", mesh)
    probe = TensorProbe(tried, plan, mesh, rounds=settings.precision.kind != "none")
    partial = divide_tensors(model, mesh)
    if tried is not model:
        divide_tensors(tried, mesh)
    with mesh.between_turns():  # this rank keeps a part of the matrices already
        probe.check(tried)
    return partial


def _media_forward(model: PreTrainedModel, mesh: Mesh, pipeline: Pipeline | None) -> MediaForward:
    return MediaForward(
        model,
        own_tokens=lambda values: values.chunk(mesh.size("tp"), dim=1)[mesh.place("tp")],
        embedding=model.get_input_embeddings if pipeline is None else pipeline.embedding,
        is_first=(lambda: True) if pipeline is None else pipeline.is_first,
        always=mesh.size(SHARDS) > 1,
    )


@dataclass(frozen=True, slots=True)
class WholeModel:
    """What is known of a model before it is divided over ranks."""

    outline: ModelOutline
    cost: ModelCost
    names: tuple[str, ...]
    """Of its trained parameters."""
    expert_layers: tuple[str, ...]
    """Names of the experts of all layers."""
    num_experts: int
    """Most of a layer; 0 without any."""
    experts: ModelExperts | None
    """Those whose choice can be replayed; see `find_routing`."""
    num_routers: int
    """Those with a load-balancing loss."""
    vocabulary_size: int
    """Rows of the embedding."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> WholeModel:
        """Describe `model`."""
        names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        routers = declared_routers(model)
        return cls(
            ModelOutline.of(model),
            model_cost(model),
            names,
            tuple(find_experts(model)),
            max((num_experts(one) for one in find_experts(model).values()), default=0),
            find_routing(model),
            len(routers),
            int(model.get_input_embeddings().weight.shape[0]),
        )


class ParallelModel:
    """A model whose ranks make steps together: what each computes of a step, and how results are joined.

    All ranks of a replica call the same methods in the same order.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        whole: WholeModel,
        partial: Sequence[str] = (),
        pipeline: Pipeline | None = None,
        media: MediaForward | None = None,
    ) -> None:
        """Describe `model`, which is on `mesh` already.

        Args:
            model: with this rank's parts.
            mesh: of the ranks.
            whole: what `model` was before it was divided.
            partial: see `LocalShards`.
            pipeline: where the blocks are divided.
            media: where it takes images.
        """
        self._media, self._placeholders = media, tuple(placeholders(model.config).values())
        self.model, self.mesh, self.whole, self.pipeline = model, mesh, whole, pipeline
        self._partial, self.outline = partial, whole.outline
        settings = mesh.settings
        self.peers = StepPeers(settings.replica_timeout_s, model.device) if settings.elastic else None
        """The other replicas that make the present step; None where there never are any."""
        self._dtypes = {name: tensor.dtype for name, tensor in self.outline.tensors.items()}
        self._device = model.device
        self.expert_layers, self.num_experts = whole.expert_layers, whole.num_experts
        self.num_routers = whole.num_routers
        """See `TokenRanks`."""

    @property
    def has_all(self) -> bool:
        """Whether each rank holds a part of every tensor."""
        return self.mesh.size("pp") == 1

    def check_optimizer(self, settings: OptimizerSettings) -> None:
        """Raise ConfigError if an optimizer quantises blocks of numbers, and this mesh cuts tensors within one."""
        if settings.kind != "adamw_8bit":
            return
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad or not is_quantised(parameter.numel()):
                continue
            if cuts_blocks(parameter, BLOCK_NUMEL):
                raise ConfigError(
                    f'optimizer.kind = "adamw_8bit" quantises blocks of {BLOCK_NUMEL} numbers, row after row, and '
                    f"policy.parallel cuts {name} of shape {list(parameter.shape)} elsewhere: use another kind, or "
                    "only dp_replicate, pp, and such dp_shard and cp as divide the rows into whole blocks"
                )

    def shards(self, trained: Mapping[str, Tensor]) -> LocalShards:
        """Return this rank's shards of the tensors that an optimizer updates."""
        unused = tuple[str, ...] if self._media is None else self._media.unused
        return LocalShards(trained, self.mesh, self._partial, self._tied, self.peers, unused)

    def owned(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the local parts of `tensors` such that every element is on one rank only."""
        return owned(tensors, self.mesh, None if self._tied is None else self._tied.copied)

    @property
    def _tied(self) -> TiedWeights | None:
        return None if self.pipeline is None else self.pipeline.tied

    def published(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` in the element types of a version: FSDP trains parameters of fewer bits in float32."""
        dtypes = {name: self._dtypes.get(name, tensor.dtype) for name, tensor in tensors.items()}
        return {
            name: tensor if tensor.dtype == dtypes[name] else tensor.to(dtypes[name])
            for name, tensor in tensors.items()
        }

    def version(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors`, by name of the parameter, without a copy of another one on this rank."""
        copied = None if self._tied is None or self._tied.other is not None else self._tied.copied
        return {name: tensor for name, tensor in tensors.items() if name != copied}

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return this rank's parts of the tensors of a version, by name, in its element types."""
        return {name: part_of(name, tensor) for name, tensor in self.published(self.version(tensors)).items()}

    def state_parts(self, states: Mapping[str, Tensor]) -> dict[str, Part]:
        """Return this rank's parts of an optimizer's tensors; writing into them changes it."""
        parameters = self.version(dict(self.model.named_parameters()))
        own = {name: state for name, state in states.items() if name.partition(":")[2] in parameters}
        return state_parts(own, parameters) | hidden_masters(parameters, self._dtypes)

    @torch.no_grad()
    def restored(self, tensors: Mapping[str, Tensor]) -> None:
        """Update the copy of tied weights on this rank, after the original has been read.

        Args:
            tensors: parameters by name, or states of an optimizer by ``<field>:<parameter>``.
        """
        if self._tied is None or self._tied.other is not None:
            return
        for name, copy in tensors.items():
            field, colon, parameter = name.rpartition(":")
            if parameter == self._tied.copied:
                local_part(copy).copy_(local_part(tensors[f"{field}{colon}{self._tied.original}"]))

    def owned_parts(self) -> dict[str, Part]:
        """Return those of `parts` of the present version that this rank writes, where several have the same."""
        tensors = version_tensors(self.model)
        return self.parts({name: tensors[name] for name in self.owned(tensors)})

    def merged_parts(self) -> dict[str, Part]:
        """Return what `owned_parts` does, in host memory, of the model with its adapters merged."""
        return merged_parts(self.model, self.owned)

    def passes(self, plan: Sequence[Microbatch]) -> list[Microbatch | None]:
        """Return the microbatches of this rank; None for a pass that only takes part in collectives."""
        place, size = (0, 1) if self.peers is None else (self.peers.place, self.peers.size)
        ranks = self.mesh.size(DATA)
        divided = divide_passes([one.num_token_slots for one in plan], size * ranks)
        own = [None if number is None else plan[number] for number in divided[place * ranks + self.mesh.place(DATA)]]
        # Only FSDP communicates with data-parallel ranks within a pass.
        own = own if self.mesh.size(SHARDS) > 1 else [one for one in own if one is not None]
        if self.pipeline is not None and own:
            own += [None] * (self.pipeline.num_passes(len(own)) - len(own))
        return own

    def divided(self, inputs: MicrobatchInputs) -> MicrobatchInputs:
        """Return this rank's share of a microbatch."""
        return divide_tokens(inputs, self.mesh, self._placeholders)

    def begin_pass(self, *, is_last: bool) -> None:
        """Prepare a pass; `is_last`: of an update."""
        fsdp.begin_pass(self.model, is_last=is_last)

    def compute(self, function: Callable[[], Tensor]) -> Tensor:
        """Return the result of `function`, which calls parts of the model instead of its forward pass."""
        result: Tensor = fsdp.compute_whole(self.model, function)
        return result

    def end_pass(self, *models: torch.nn.Module) -> None:
        """Complete a pass of this model, and of other `models` with it."""
        for model in (self.model, *models):
            fsdp.end_pass(model)

    def own_segments(self, inputs: MicrobatchInputs) -> Index:
        """See `TokenRanks`."""
        if self.mesh.size("cp") * self.mesh.size("tp") == 1:
            return inputs.segments
        missing = inputs.input_ids.shape[1] * self.mesh.size("cp") - len(inputs.segments)
        own: Index = np.pad(inputs.segments, (0, missing), constant_values=-1)
        if inputs.share is not None:
            own = inputs.share.take(torch.from_numpy(own)[None])[0].numpy()
        return np.split(own, self.mesh.size("tp"))[self.mesh.place("tp")]

    def sum_slots(self, values: Tensor) -> Tensor:
        """See `TokenRanks`."""
        for axis in ("cp", "tp"):
            if self.mesh.size(axis) > 1:
                values = sum_over(values, self.mesh.group(axis))
        return values

    def sum_loads(self, values: Tensor) -> Tensor:
        """See `TokenRanks`."""
        return self.sum(self.sum_slots(values))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks that compute different parts of the results, of all replicas."""
        summed = values.detach().clone()
        dist.all_reduce(summed, group=self.mesh.group(RESULTS))
        if self.peers is not None:
            self.peers.sum_(summed)
        return summed

    def sum_all(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over all ranks of this replica."""
        summed = values.to(self._device, copy=True)
        dist.all_reduce(summed)
        return summed

    def join(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return an array of which each rank of `sum` has computed some elements, with 0 for the others."""
        return self.sum(torch.from_numpy(values).to(self._device)).cpu().numpy()

    def gather(self, values: Any) -> list[Any]:
        """Return the `values` of each rank of `sum`: what JSON can hold, NaN and infinities included."""
        if self.peers is not None:
            values = self.peers.gather(values)
            return [one for of_rank in self._gather(values) for one in of_rank]
        return self._gather(values)

    def _gather(self, values: Any) -> list[Any]:
        """Do the same for the ranks of this replica."""
        text = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(self._device)
        group, num_ranks = self.mesh.group(RESULTS), self.mesh.size(RESULTS)
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(num_ranks)]
        dist.all_gather(sizes, torch.tensor([len(text)], device=self._device), group=group)
        longest = max(int(size) for size in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8, device=self._device) for _ in range(num_ranks)]
        dist.all_gather(texts, torch.nn.functional.pad(text, (0, longest - len(text))), group=group)
        return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(texts, sizes, strict=True)]
