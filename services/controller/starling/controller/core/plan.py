"""The numbers of a run that the core decides by."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.ids import LeaseKind, Purpose
from starling.common.wire.messages import Sampling

RESUMED_WITH: tuple[str, ...] = (
    "seed",
    "num_sft_steps",
    "examples_per_step",
    "prompts_per_step",
    "group_size",
)
"""What may not differ when a run is taken up again: its journal means something else by other values."""


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
    evaluate_every: int = 0
    """Steps of reinforcement learning between two evaluations; 0 for none."""
    eval_completions: int = 1
    eval_share: float = 0.25
    """Share of the rollouts, at least one, that an evaluation is bound to; of a single one, half of its slots."""
    save_every: int = 0
    """Steps between two saved states of the policy; 0 saves none but at a stop."""
    save_rest_s: float = 0.0
    """Least seconds between two of them, for steps that are shorter than it takes to save."""
    num_policies: int = 1
    """Policy, and below rollout and reward replicas, that must have joined before reinforcement learning begins."""
    num_rollouts: int = 1
    num_rewards: int = 1
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    start_s: float = 120.0
    """How long the run may wait for its first replicas, and later for a replica of a role that has none."""
    stop_s: float = 240.0
    """How long an orderly stop may take before the run fails: the step in hand, its publication, the checkpoint."""
    drain_s: float = 15.0
    generate_s: float = 3600.0
    """How long a replica may work on one group, below on scoring one, on a step, and so on, before the work is taken
    from it: whoever heartbeats all the while and never answers hangs."""
    score_s: float = 900.0
    train_s: float = 7200.0
    publish_s: float = 900.0
    adopt_s: float = 900.0
    save_s: float = 3600.0
    evaluation_s: float = 7200.0
    """How long one evaluation may take; what is not scored by then counts as failed."""

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

    def patience_s(self, kind: LeaseKind) -> float:
        """Return how long a lease of this kind may take."""
        match kind:
            case "generate":
                return self.generate_s
            case "score":
                return self.score_s
            case "train":
                return self.train_s
            case "publish":
                return self.publish_s
            case "adopt":
                return self.adopt_s
            case "checkpoint" | "save":
                return self.save_s


def draw_seed(seed: int, purpose: str, ordinal: int, tries: int) -> int:
    """Return the sampling seed of a group: the same wherever and whenever it is generated, new after a failure."""
    return ((seed * 2 + (purpose == "evaluate")) * 1_000_003 + ordinal) * 1_009 + tries
