"""One layout of a replica from what its ranks say of themselves."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.layout import Layout, RankLayout, TensorSpec, check_layout


def join_ranks(replica: str, layouts: Sequence[Layout]) -> Layout:
    """Join the layouts of a replica's ranks, each of which may know only its own tensors.

    A rank that holds nothing of a tensor cannot see that it is tied, so a tie that one rank sees holds for all.

    Args:
        replica: name of the replica.
        layouts: in the order of the ranks; ranks of a layout of several stay together.

    Raises:
        WeightsError: ranks that contradict each other, naming the tensor.
    """
    specs: dict[str, TensorSpec] = {}
    for rank, layout in enumerate(layouts):
        for spec in layout.tensors:
            known = specs.setdefault(spec.name, spec)
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                raise WeightsError(
                    f"Tensor {spec.name} of {replica} is {spec.dtype} of shape {spec.shape} on rank {rank}, but "
                    f"{known.dtype} of shape {known.shape} on a rank before it."
                )
            if known.same_as and spec.same_as and known.same_as != spec.same_as:
                raise WeightsError(
                    f"Tensor {spec.name} of {replica} is tied to {spec.same_as} on rank {rank}, but to {known.same_as} "
                    "on a rank before it."
                )
            if spec.same_as:
                specs[spec.name] = spec
    index = {name: i for i, name in enumerate(specs)}
    ranks: list[RankLayout] = []
    for layout in layouts:
        places = [index[spec.name] for spec in layout.tensors]
        for held in layout.ranks:
            shards = (msgspec.structs.replace(shard, tensor=places[shard.tensor]) for shard in held.shards)
            ranks.append(RankLayout(place=held.place, shards=tuple(shards)))
    bases = {layout.base for layout in layouts}
    if len(bases) > 1:
        raise WeightsError(f"The ranks of {replica} have their adapters on different weights: give all the same files.")
    joined = Layout(replica=replica, tensors=tuple(specs.values()), ranks=tuple(ranks), base="".join(bases))
    check_layout(joined)
    return joined
