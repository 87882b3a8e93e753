"""Recorded routing: whether the experts that rollouts choose can be recorded for training, and how large they are."""

from __future__ import annotations

from starling.algo.routing import routing_bytes
from starling.common.wire.messages import ModelLimits, Sampling
from starling.common.wire.tensors import MAX_ROUTING_BYTES


def replay_problem(sampling: Sampling, group_size: int, limits: ModelLimits | None) -> str:
    """Return why the routing of groups cannot be replayed, in one sentence; empty if it can, or need not.

    Args:
        sampling: of the groups.
        group_size: completions of a group.
        limits: of the model that is trained; None if they are not known, and then nothing is found.
    """
    if sampling.routing == "own" or limits is None:
        return ""
    if limits.experts is None:
        return (
            "sampling.routing = 'replayed' needs a mixture of experts whose routers can be made to choose recorded "
            "experts, and the policy's model is none; set it to 'own'"
        )
    num_bytes = routing_bytes(limits.experts, group_size * sampling.max_tokens)
    if num_bytes > MAX_ROUTING_BYTES:
        return (
            f"sampling.routing = 'replayed' with sampling.max_tokens = {sampling.max_tokens} and rl.group_size = "
            f"{group_size} can take {num_bytes} bytes for the experts of a group, {limits.experts.num_chosen} in each "
            f"of {limits.experts.num_layers} layers, and {MAX_ROUTING_BYTES} can be sent; lower one of the two"
        )
    return ""
