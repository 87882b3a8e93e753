"""Recording of kept tokens: whether those of a group can be sent."""

from __future__ import annotations

from starling.common.wire.messages import Sampling
from starling.common.wire.tensors import MAX_KEPT_BYTES, MAX_KEPT_PER_TOKEN


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
