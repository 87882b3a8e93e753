"""Digest of the groups that a step trained, which a reader of the journal can compute again.

`docs/reference/metrics.md` gives its definition. It is a sum over the groups, so their order does not matter, and the
sum of the digests of several policies is that of the whole step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from starling.policy.train.data.groups import ScoredGroup


def group_digest(group: ScoredGroup, advantages: Sequence[float]) -> int:
    """Return the digest of a group whose completions have these advantages, of 64 bits."""
    digest = hashlib.blake2b(group.prompt_id.encode() + b"\0", digest_size=8)
    for array in (group.prompt_ids, group.completion_ids, group.logprobs, group.versions):
        digest.update(array.tobytes())
    digest.update(np.asarray(group.lengths, dtype="<i4").tobytes())
    digest.update(np.asarray(group.rewards, dtype="<f8").tobytes())
    digest.update(np.asarray(advantages, dtype="<f4").tobytes())
    if group.loss_mask is not None:
        digest.update(group.loss_mask.tobytes())
    if group.kept is not None:
        digest.update(group.kept.counts.tobytes() + group.kept.ids.tobytes())
    if group.routing is not None:
        digest.update(group.routing.prompt.tobytes() + group.routing.completions.tobytes())
    return int.from_bytes(digest.digest(), "little")


def batch_digest(groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float]]) -> int:
    """Return the digest of the groups of a step, with the advantages of their completions; 64 bits, never 0."""
    total = sum(group_digest(group, row) for group, row in zip(groups, advantages, strict=True))
    return total % (1 << 64) or 1
