"""Digest of the groups that a step trained: it covers all of their data, and a reader of the journal can compute it."""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from starling.algo.routing import Routing
from starling.algo.truncation import KeptTokens
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.digest import batch_digest
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.rl import RlTrainer

Make = Callable[..., list[ScoredGroup]]
SHAPES = [(6, [4, 9, 1, 3]), (1, [2, 2, 7, 5]), (11, [1, 1, 1, 12])]


def plain_advantages(group: ScoredGroup) -> list[float]:
    """Return the advantages of GRPO, as in the paper."""
    mean, std = statistics.fmean(group.rewards), statistics.stdev(group.rewards)
    return [(reward - mean) / (std + 1e-4) for reward in group.rewards]


def plain_digest(group: ScoredGroup, advantages: list[float]) -> int:
    """Return the digest by its definition in docs/reference/metrics.md."""
    arrays = (group.prompt_ids, group.completion_ids, group.logprobs, group.versions)
    num = len(group.lengths)
    content = group.prompt_id.encode() + b"\0" + b"".join(array.tobytes() for array in arrays)
    content += struct.pack(f"<{num}i", *group.lengths) + struct.pack(f"<{num}d", *group.rewards)
    content += struct.pack(f"<{num}f", *advantages) + (b"" if group.loss_mask is None else group.loss_mask.tobytes())
    if group.kept is not None:
        content += group.kept.counts.tobytes() + group.kept.ids.tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def test_trainer_digests_what_it_has_trained(tiny: Callable[..., Any], make_groups: Make) -> None:
    groups = make_groups(SHAPES)
    groups[1] = replace(groups[1], kept=KeptTokens.from_rows([np.array([token]) for token in groups[1].completion_ids]))
    settings = PolicySettings.model_validate({"algorithm": {"num_minibatches": 2}})
    trainer = RlTrainer(tiny(), settings, total_steps=2)
    trainer.step(groups, step=1)
    expected = sum(plain_digest(group, plain_advantages(group)) for group in groups) % 2**64
    assert trainer.batch_digest == expected
    trainer.step([replace(groups[0], rewards=groups[0].rewards[::-1]), *groups[1:]], step=2)
    assert trainer.batch_digest != expected


def changed(group: ScoredGroup, name: str) -> ScoredGroup:
    """Return `group` with one element of an array changed."""
    array = getattr(group, name).copy()
    array[-1] += 1
    return replace(group, **{name: array})


@pytest.mark.parametrize("name", ["prompt_ids", "completion_ids", "logprobs", "versions"])
def test_digest_covers_every_array(make_groups: Make, name: str) -> None:
    groups, advantages = make_groups(SHAPES), [[0.5, -0.5, 1.0, -1.0]] * 3
    other = [*groups[:2], changed(groups[2], name)]
    assert batch_digest(groups, advantages) != batch_digest(other, advantages)


def test_digest_covers_rewards_advantages_lengths_and_mask(make_groups: Make) -> None:
    groups, advantages = make_groups(SHAPES), [[0.5, -0.5, 1.0, -1.0]] * 3
    whole = batch_digest(groups, advantages)
    first, rest = groups[0], groups[1:]
    swapped = (first.rewards[1], first.rewards[0], *first.rewards[2:])
    mask = np.ones(sum(first.lengths), dtype=np.uint8)
    experts = Routing(*(np.zeros((len(ids), 1, 1), np.uint8) for ids in (first.prompt_ids, first.completion_ids)))
    for other in (
        replace(first, rewards=swapped),
        replace(first, lengths=(9, 4, 1, 3)),
        replace(first, prompt_id="train/0/9"),
        replace(first, loss_mask=mask),
        replace(first, kept=KeptTokens.from_rows(list(first.completion_ids[:, None]))),
        replace(first, routing=experts),
        replace(first, routing=Routing(experts.prompt, experts.completions + np.uint8(1))),
    ):
        assert batch_digest([other, *rest], advantages) != whole
    assert batch_digest(groups, [[-0.5, 0.5, 1.0, -1.0], *advantages[1:]]) != whole
    assert batch_digest(groups[::-1], advantages[::-1]) == whole, "the order of the groups does not matter"
    shares = batch_digest(groups[:1], advantages[:1]) + batch_digest(rest, advantages[1:])
    assert shares % 2**64 == whole, "the digests of shares add up"
