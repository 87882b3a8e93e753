"""The numbers of a run that the core decides by."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.ids import Purpose
from starling.common.wire.messages import Sampling


@dataclass(frozen=True)
class RunPlan:
    """What is to be done, and the bounds to keep."""

    seed: int
    sampling: Sampling
    eval_sampling: Sampling
    num_sft_steps: int = 0
    examples_per_step: int = 1
    num_steps: int = 0
    """Steps of reinforcement learning, after the supervised ones."""
    prompts_per_step: int = 1
    group_size: int = 1
    max_staleness: int = 1
    max_tries: int = 2
    evaluate_at_start: bool = False
    evaluate_at_end: bool = False
    eval_completions: int = 1
    num_rollouts: int = 1
    """Rollout replicas, and below reward replicas, that must have joined before reinforcement learning begins."""
    num_rewards: int = 1
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    start_s: float = 120.0
    """How long the run may wait for its first replicas, and later for a replica of a role that has none."""
    drain_s: float = 15.0

    @property
    def last_step(self) -> int:
        """The version that the last step makes."""
        return self.num_sft_steps + self.num_steps

    def num_completions(self, purpose: Purpose) -> int:
        """Return how many completions a group of this purpose has."""
        return self.group_size if purpose == "train" else self.eval_completions

    @property
    def needs_rollouts(self) -> bool:
        """Say whether anything is ever generated."""
        return self.num_steps > 0 or self.evaluate_at_start or self.evaluate_at_end


def draw_seed(seed: int, purpose: str, ordinal: int, tries: int) -> int:
    """Return the sampling seed of a group: the same wherever and whenever it is generated, new after a failure."""
    return ((seed * 2 + (purpose == "evaluate")) * 1_000_003 + ordinal) * 1_009 + tries
