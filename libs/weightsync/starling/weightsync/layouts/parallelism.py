"""Placements of a weight along the axes of tensor, pipeline and expert parallelism.

Trainers and engines share these rules; where they differ (padding of the vocabulary, distribution of whole experts)
there is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence

from starling.common.errors import WeightsError
from starling.weightsync.layouts.placements import REPLICATE, Only, Placement, Sharded
from starling.weightsync.layouts.weights import Model, Weight


def tensor_parallel(weight: Weight, num_ranks: int, *, vocabulary_multiple: int = 1) -> Placement:
    """Place `weight` along an axis of tensor parallelism.

    Args:
        weight: what to place.
        num_ranks: length of the axis.
        vocabulary_multiple: the number of rows of embeddings is padded to a multiple of this before it is split, as
            engines do; 1 for none.

    Raises:
        WeightsError: heads or a padded vocabulary that cannot be split evenly.
    """
    spec, cut = weight.spec, weight.cut
    if cut == "whole" or num_ranks == 1:
        return REPLICATE
    if cut == "vocabulary":
        padded = -(-spec.shape[0] // vocabulary_multiple) * vocabulary_multiple
        if vocabulary_multiple > 1 and padded % num_ranks:
            raise WeightsError(f"{spec.name}: {padded} padded rows cannot be shared evenly by {num_ranks} ranks.")
        return Sharded(dim=0, chunk=padded // num_ranks if vocabulary_multiple > 1 else 0)
    if cut == "key_value" and num_ranks > weight.units:
        if num_ranks % weight.units:
            raise WeightsError(
                f"{spec.name}: {weight.units} heads cannot be shared by {num_ranks} ranks; use a multiple or a divisor."
            )
        return Sharded(dim=0, copies=num_ranks // weight.units)
    if weight.units % (num_ranks * weight.blocks):
        raise WeightsError(
            f"{spec.name}: {weight.units // weight.blocks} heads cannot be shared by {num_ranks} ranks; use a divisor."
        )
    return Sharded(dim=1 if cut == "columns" else 0, factor=weight.blocks)


def expert_parallel(weight: Weight, num_experts: int, num_ranks: int) -> Placement:
    """Place a routed expert's `weight` along an axis that distributes whole experts, neighbours together.

    With a remainder the first ranks have one more expert.
    """
    share, more = divmod(num_experts, num_ranks)
    in_larger_shares = more * (share + 1)
    if weight.expert < in_larger_shares:
        return Only(indices=(weight.expert // (share + 1),))
    return Only(indices=(more + (weight.expert - in_larger_shares) // share,))


def pipeline_parallel(weight: Weight, model: Model, layers_of_stages: Sequence[int]) -> Placement:
    """Place `weight` along an axis of pipeline stages with `layers_of_stages` layers each.

    An embedding that is tied to the head is held by the first and by the last stage.
    """
    last = len(layers_of_stages) - 1
    if weight.stage == "first":
        tied = any(other.spec.same_as == weight.spec.name for other in model.weights[-2:])
        return Only(indices=(0, last) if tied and last else (0,))
    if weight.stage == "last":
        return Only(indices=(last,))
    end = 0
    for stage, num_layers in enumerate(layers_of_stages):
        end += num_layers
        if weight.layer < end:
            return Only(indices=(stage,))
    raise WeightsError(f"{weight.spec.name} is in none of {end} layers.")


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Distribute `num_layers` over the stages of a pipeline; a remainder goes to the last stages except the very last.

    The last stage also computes the head and the first the embedding, so they get no extra layer: engines do the same.

    Raises:
        WeightsError: fewer layers than stages.
    """
    if num_stages < 1 or num_layers < num_stages:
        raise WeightsError(f"{num_layers} layers cannot make a pipeline of {num_stages} stages.")
    share, more = divmod(num_layers, num_stages)
    return tuple(share + (num_stages - 1 - more <= stage < num_stages - 1) for stage in range(num_stages))
