"""What rollouts record of a group for training: tokens that truncated sampling kept, and experts of its tokens."""

from __future__ import annotations

from starling.algo.routing import routing_bytes
from starling.algo.truncation import is_truncated
from starling.common.kinds import RunKind
from starling.common.wire.messages import ModelLimits, Sampling
from starling.common.wire.tensors import MAX_KEPT_BYTES, MAX_KEPT_PER_TOKEN, MAX_ROUTING_BYTES


def truncation_notice(sampling: Sampling, kind: RunKind) -> str:
    """Return that log-probabilities are not those of the distribution that tokens are drawn from; empty if they are."""
    truncated = is_truncated(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
    if not kind.keeps_tokens or kind.reads_trajectories or sampling.logprobs != "full" or not truncated:
        return ""
    return (
        "tokens are drawn from a part of the vocabulary, and their log-probabilities are over all of it, which "
        "sampling/truncation_nats measures; sampling.logprobs = 'truncated' makes them exact"
    )


def recording_problem(sampling: Sampling, group_size: int) -> str:
    """Return why the kept tokens of groups cannot be recorded, in one sentence; empty if they can, or need not."""
    if sampling.logprobs == "full":
        return ""
    if not 1 <= sampling.top_k <= MAX_KEPT_PER_TOKEN:
        return (
            f"sampling.logprobs = 'truncated' sends the ids of the kept tokens with each token, and sampling.top_k = "
            f"{sampling.top_k} does not bound their number, as top_p and min_p do not where a model is unsure; set "
            f"sampling.top_k from 1 to {MAX_KEPT_PER_TOKEN}"
        )
    if sampling.temperature == 0:
        return "sampling.logprobs = 'truncated' with sampling.temperature = 0 keeps a single token; set 'full'"
    num_bytes = 4 * group_size * sampling.max_tokens * sampling.top_k
    if num_bytes > MAX_KEPT_BYTES:
        return (
            f"sampling.logprobs = 'truncated' with sampling.top_k = {sampling.top_k}, sampling.max_tokens = "
            f"{sampling.max_tokens} and rl.group_size = {group_size} can take {num_bytes} bytes for a group's kept "
            f"tokens, and {MAX_KEPT_BYTES} can be sent; lower one of the three"
        )
    return ""


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
