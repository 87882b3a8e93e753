"""Evaluation of one pinned version on held-out prompts, beside training.

An evaluation is bound to a few rollouts that hold its version, and these adopt no other until it is done: every token
of it is of one version. The other rollouts go on with training; a run's only rollout gives it half of its slots. So it
neither blocks training nor waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starling.common.wire.messages import Prompt
from starling.controller.core.groups.group import Group, Groups, GroupState
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.routing import Routing

TASK = "task"
"""Key of a prompt's metadata by which results are told apart."""


class Evaluation(Groups):
    """The held-out prompts under one weight version."""

    def __init__(
        self,
        number: int,
        version: int,
        cause: str,
        prompts: Iterable[Prompt],
        *,
        num_completions: int,
        max_tries: int,
        first: int,
        deadline: float,
        expected: Callable[[Prompt], int],
    ) -> None:
        """`first` is the ordinal of its first group: no two evaluations of a run share one.

        `expected` says how many tokens the completions of a prompt will have.
        """
        super().__init__("evaluate", max_tries)
        self.number, self.version, self.cause = number, version, cause
        self.num_completions, self.deadline = num_completions, deadline
        self.num_admitted = self.first = first
        self.pinned: set[str] = set()
        """Rollouts that it is bound to."""
        self.free = Routing()
        """Those of them that hold its version, by their free slots."""
        for prompt in prompts:
            self.admit(prompt, expected(prompt))
        self.num_prompts = self.num_admitted - first

    @property
    def done(self) -> bool:
        """Say whether every prompt is scored or was given up."""
        return self.num_live == self.count(GroupState.SCORED)

    def give_up(self) -> None:
        """Discard what is not scored: its time is over."""
        for group in list(self.live()):
            if group.state is not GroupState.SCORED:
                self.discard(group)

    def summary(self) -> dict[str, Any]:
        """Return mean@k, pass@k (any completion with the full reward of 1), what failed, and the same by task."""
        groups = self.within(GroupState.SCORED)
        fields: dict[str, Any] = {
            "version": self.version,
            "cause": self.cause,
            "num_prompts": self.num_prompts,
            "num_failed": self.num_discarded,
            **rates([group.rewards for group in groups]),
        }
        names = sorted({name for group in groups for name in group.components})
        for name in names:
            values = [v for group in groups for v in group.components.get(name, ()) if v is not None]
            fields[f"score/{name}"] = sum(values) / len(values) if values else None
        lengths = [t.num_tokens - t.num_masked for group in groups for t in group.trajectories]
        fields["completion_tokens_mean"] = sum(lengths) / len(lengths) if lengths else None
        tasks: dict[str, list[Group]] = {}
        for group in groups:
            if TASK in group.prompt.metadata:
                tasks.setdefault(str(group.prompt.metadata[TASK]), []).append(group)
        if tasks:
            fields["tasks"] = {
                task: {"num_prompts": len(members), **rates([group.rewards for group in members])}
                for task, members in sorted(tasks.items())
            }
        return fields


def num_pinned(num_rollouts: int, share: float) -> int:
    """Return how many rollouts an evaluation is bound to."""
    return min(num_rollouts, max(1, math.ceil(num_rollouts * share)))


def slots_of(member: Member, num_rollouts: int) -> int:
    """Return how many groups of an evaluation a rollout may work on: of a run's only one, half of its slots."""
    return member.num_slots if num_rollouts > 1 else (member.num_slots + 1) // 2


def pass_at(k: int, num: int, num_right: int) -> float:
    """Return the probability that one of `k` completions, drawn from `num` with `num_right` right ones, is right.

    The unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1).
    """
    if num - num_right < k:
        return 1.0
    return 1.0 - math.prod((num - num_right - i) / (num - i) for i in range(k))


def rates(of_groups: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return mean@k and pass@k of the rewards of groups; None where there are none."""
    rewards = [[r for r in group if r is not None] for group in of_groups]
    kept = [r for group in rewards for r in group]
    k = max((len(r) for r in rewards), default=0)
    fields: dict[str, Any] = {
        "reward_mean": sum(kept) / len(kept) if kept else None,
        "pass_at_k": sum(max(r, default=0) >= 1 for r in rewards) / len(rewards) if rewards else None,
        "k": k,
    }
    smaller = 1
    while smaller < k:
        rates = [pass_at(smaller, len(r), sum(x >= 1 for x in r)) for r in rewards if len(r) >= smaller]
        fields[f"pass_at_{smaller}"] = sum(rates) / len(rates) if rates else None
        smaller *= 2
    return fields
