"""Bytes that a rank sends in its collectives, counted where torch dispatches them, by axis of the mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rank_processes import run_ranks
from small_steps import MODELS, make_examples, make_model, make_settings
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from starling.policy.plan.sizes import ModelSizes, model_sizes
from starling.policy.plan.traffic import Update, traffic_of_place
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.learner import Learner
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.parallel.apply import ParallelModel
from starling.policy.train.parallel.mesh import AXES, DATA, SHARDS, Mesh

OTHER = "other"
"""In place of an axis: a group that is none, such as that of all ranks."""
_NO_TRAFFIC = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "recv_")


EACH_AXIS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dp_replicate": 2, "dp_shard": 2}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen3-tied", {"dp_shard": 2, "cp": 2}),
    ("qwen3-tied", {"pp": 2}),
    ("qwen3_moe", {"dp_shard": 2, "ep": 2}),
]
PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"dp_shard": 2}),
    ("qwen3-tied", {"dp_shard": 2, "reshard": "never"}),
    ("llama", {"dp_shard": 2, "reshard": "always"}),
    ("qwen2", {"dp_replicate": 2}),
    ("qwen3", {"tp": 2}),
    ("qwen2", {"tp": 4}),
    ("qwen3-tied", {"dp_shard": 2, "tp": 2}),
    ("qwen3", {"cp": 2}),
    ("llama", {"cp": 2, "context": "ring"}),
    ("qwen2", {"cp": 2, "context": "all_gather"}),
    ("qwen3", {"cp": 2, "tp": 2}),
    ("qwen3", {"pp": 2, "schedule": "gpipe"}),
    ("qwen3-tied", {"pp": 2, "dp_shard": 2}),
    ("qwen2", {"pp": 2, "tp": 2}),
    ("qwen3_moe", {"dp_shard": 4, "ep": 2}),
    ("qwen3_moe", {"dp_shard": 2, "tp": 2, "ep": 4}),
    ("qwen3_moe", {"tp": 2, "ep": 2}),
]
"""Each axis alone, and pairs."""


def traffic_ratios(name: str, parallel: dict[str, Any]) -> list[dict[str, float]]:
    """Make a supervised step on all ranks of a mesh. Returns for each the bytes it sent over the formula, by axis.

    What travels along no axis of the formula, such as metrics, is in the last ratio, "all".
    """
    kind, tied = MODELS[name]
    sizes = model_sizes(make_model(kind, tied).config.to_dict())  # imports what the forked ranks then have
    settings = ParallelSettings(**parallel)
    found = run_ranks(settings.num_ranks, step_of_rank, name, parallel)
    places = [rank // (settings.num_ranks // settings.pp) for rank in range(settings.num_ranks)]
    pairs = [
        (Counter(sent.num_bytes), _expected(sent, sizes, settings, place))
        for sent, place in zip(found, places, strict=True)
    ]
    if settings.ep > 1:
        # What a rank sends to experts depends on the routers; what all send together does not.
        pairs = [tuple(sum(of_ranks, Counter()) for of_ranks in zip(*pairs, strict=True))]  # type: ignore[list-item]
    return [_ratios(sent, expected) for sent, expected in pairs]


def _expected(sent: Sent, sizes: ModelSizes, settings: ParallelSettings, place: int) -> Counter[str]:
    num_tokens = settings.cp * sum(sent.tokens) / len(sent.tokens)
    update = Update(len(sent.tokens), num_tokens, item_bytes=4)
    found = traffic_of_place(sizes, settings, update, place)
    return Counter({axis: traffic.num_bytes for axis, traffic in found.items()})  # type: ignore[misc]


def _ratios(sent: Counter[str], expected: Counter[str]) -> dict[str, float]:
    ratios = {axis: sent[axis] / num_bytes for axis, num_bytes in expected.items()}
    return {**ratios, "all": sum(sent.values()) / sum(expected.values())}


@dataclass(frozen=True, slots=True)
class Sent:
    """What a rank has sent for one step."""

    num_bytes: Mapping[str, float]
    """By axis."""
    num_calls: Mapping[str, int]
    """Collectives, by axis."""
    tokens: Sequence[int]
    """Of each of its passes, those of this rank, padding included."""


def step_of_rank(_: int, name: str, parallel: dict[str, Any]) -> Sent:
    """Make a supervised step on one rank of a mesh, the second one, and return what it sends."""
    mesh = Mesh(ParallelSettings(**parallel))
    kind, tied = MODELS[name]

    def load() -> Any:
        model = make_model(kind, tied)
        apply_memory_settings(model, MemorySettings())
        return model

    learner = Learner(load, make_settings(**parallel), mesh=mesh)
    learner.supervise(make_examples(seed=1), num_steps=2)
    tokens: list[int] = []
    divided = ParallelModel.divided

    def observe(model: ParallelModel, inputs: MicrobatchInputs) -> MicrobatchInputs:
        found = divided(model, inputs)
        tokens.append(found.input_ids.shape[1])
        return found

    # Its process is the rank's own.
    ParallelModel.divided = observe  # type: ignore[method-assign]
    with CountTraffic(mesh) as count:
        learner.supervise(make_examples(seed=2), num_steps=2)
    return Sent(dict(count.sent), dict(count.calls), tokens)


class CountTraffic(TorchDispatchMode):
    """Counts while it is active.

    The bytes are those of the algorithms that send the least. Of n ranks with an equal part each, one sends its part
    n - 1 times in a gather, and as much in a sum of which each rank keeps a part; a sum that all ranks keep is both.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Count the traffic of this rank of `mesh`."""
        super().__init__()
        axes = [axis for axis in (DATA, *AXES) if mesh.size(axis) > 1]
        self._axes = {mesh.group(axis).group_name: axis for axis in axes}
        self._dispatch = ""
        """Group of ep, which may be that of another axis: it has the exchanges of tokens only."""
        if mesh.experts is not None:
            self._dispatch = mesh.group("ep").group_name
            self._axes.setdefault(mesh.group("efsdp").group_name, "efsdp")
        if mesh.size("dp_shard") > 1:
            self._axes[mesh.group(SHARDS).group_name] = "dp_shard"
        self.sent: Counter[str] = Counter()
        """Bytes by axis."""
        self.calls: Counter[str] = Counter()
        """Collectives by axis."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count `func`, if it is a collective, and call it."""
        name = func._opname
        if func.namespace in ("c10d", "_c10d_functional") and name not in _NO_TRAFFIC:
            group, size = _group(args)
            if size > 1:
                is_dispatch = name == "alltoall_base_" and group == self._dispatch
                axis = "ep" if is_dispatch else self._axes.get(group, OTHER)
                self.sent[axis] += _bytes_sent(name, args, size)
                self.calls[axis] += 1
        return func(*args, **(kwargs or {}))


def _group(args: Sequence[Any]) -> tuple[str, int]:
    """Return name and size of the group of a collective's arguments."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    for value in reversed(args):
        if isinstance(value, str):
            return value, _resolve_process_group(value).size()
    for value in args:
        if hasattr(value, "_type") and "ProcessGroup" in str(value._type()):
            found = ProcessGroup.unbox(value)
            return found.group_name, found.size()
    raise AssertionError(f"no process group among {args}")


def _bytes_sent(name: str, args: Sequence[Any], size: int) -> float:
    """Return the bytes that a rank sends in one collective of `size` ranks."""
    if name == "_allgather_base_":
        return (size - 1) * _bytes(args[1])
    if name in ("all_gather_into_tensor", "allgather_"):
        return (size - 1) * _bytes(args[0] if name != "allgather_" else args[1])
    if name == "_reduce_scatter_base_":
        return (size - 1) * _bytes(args[0])
    if name == "reduce_scatter_tensor":
        return (size - 1) * _bytes(args[0]) / size
    if name == "reduce_scatter_":
        return (size - 1) * _bytes(args[0])
    if name == "alltoall_base_":
        return (size - 1) * _bytes(args[0]) / size
    if name == "send":
        return _bytes(args[0])
    if name in ("allreduce_", "all_reduce"):
        return 2 * (size - 1) * _bytes(args[0]) / size
    raise AssertionError(f"no formula for {name}")


def _bytes(tensors: Tensor | Sequence[Any]) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(one) for one in tensors)
