"""Evaluation of one pinned version on held-out prompts.

Its groups go first, and no other version is published until it is done: every token of an evaluation is of one
version, and a rollout that starts anew, or a group that is generated again, finds that version still on offer.
"""

from __future__ import annotations

from typing import Any

from starling.common.wire.messages import USABLE, Prompt
from starling.controller.core.ledger import Groups, GroupState


class Evaluation(Groups):
    """The held-out prompts under one weight version."""

    def __init__(self, version: int, prompts: list[Prompt], max_tries: int, number: int) -> None:
        """`number` tells this evaluation's groups from those of the ones before."""
        super().__init__("evaluate", max_tries)
        self.version = version
        self.num_prompts = len(prompts)
        self.num_admitted = number * len(prompts)
        for prompt in prompts:
            self.admit(prompt)

    @property
    def done(self) -> bool:
        """Say whether every prompt is scored or was given up."""
        return self.num_live == self.count(GroupState.SCORED)

    def summary(self) -> dict[str, Any]:
        """Return mean@k, pass@k (any completion with the full reward of 1), and what failed."""
        groups = self.within(GroupState.SCORED)
        rewards = [[r for r in group.rewards if r is not None] for group in groups]
        kept = [r for group in rewards for r in group]
        fields: dict[str, Any] = {
            "version": self.version,
            "num_prompts": self.num_prompts,
            "num_failed": self.num_discarded,
            "reward_mean": sum(kept) / len(kept) if kept else None,
            "pass_at_k": sum(max(r, default=0) >= 1 for r in rewards) / len(groups) if groups else None,
            "k": max((len(r) for r in rewards), default=0),
        }
        names = sorted({name for group in groups for name in group.components})
        for name in names:
            values = [v for group in groups for v in group.components.get(name, ()) if v is not None]
            fields[f"score/{name}"] = sum(values) / len(values) if values else None
        lengths = [t.num_tokens for group in groups for t in group.trajectories if t.status in USABLE]
        fields["completion_tokens_mean"] = sum(lengths) / len(lengths) if lengths else None
        return fields
