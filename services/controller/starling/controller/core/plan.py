"""The numbers of a run that the core decides by."""

from __future__ import annotations

from dataclasses import dataclass

from starling.common.ids import Activity, LeaseKind, Objective, Purpose, Role
from starling.common.wire.messages import Sampling, Welcome

RESUMED_WITH: tuple[str, ...] = (
    "seed",
    "objective",
    "num_supervised_steps",
    "examples_per_step",
    "prompts_per_step",
    "group_size",
    "begin_version",
    "begin_prompt",
    "is_taught",
    "activity",
)
"""What may not differ when a run is taken up again: its journal means something else by other values."""

TRAINING: tuple[Activity, ...] = ("rl", "replay")
"""What is done with groups where there is a policy."""

FILTER_LIMIT = 10
"""Steps' worth of groups that may be set aside in a row, where the recipe does not say."""


@dataclass(frozen=True)
class RunPlan:
    """What is to be done, and the bounds to keep."""

    seed: int
    sampling: Sampling
    eval_sampling: Sampling
    objective: Objective = "sft"
    """What the supervised steps teach."""
    activity: Activity = "rl"
    """What is done with groups: they are trained as they come (rl), or as files have them (replay). Or there is no
    policy, and they are written to files, with their tokens (generate) or without (evaluate, infer). Or there are none
    (serve): rollouts answer requests of others."""
    num_supervised_steps: int = 0
    """Steps that learn from examples: the first of the run."""
    examples_per_step: int = 1
    num_steps: int = 0
    """Steps of reinforcement learning, after the supervised ones; without a policy, files to write."""
    num_prompts: int = 0
    """Without a policy: how many prompts are answered, each once."""
    records: bool = False
    """Write the groups of each step of reinforcement learning to files too, before it is trained."""
    prompts_per_step: int = 1
    group_size: int = 1
    colocate: bool = False
    """Policies and rollouts share their devices, and take turns."""
    max_staleness: int = 1
    max_tries: int = 2
    dynamic_sampling: bool = False
    """Set groups aside whose rewards are all equal, and take the next prompts in their place."""
    filter_limit: int = 0
    """The run fails after so many of them in a row; 0 for ten times `prompts_per_step`."""
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
    samples_per_step: int = 0
    """Completions of each step that people are shown; 0 for none."""
    samples_every: int = 1
    """Only of every so-manieth step."""
    begin_version: int = 0
    """The version that the run begins with: more than 0 when it goes on from a state of another one."""
    begin_prompt: int = 0
    """Position in the data of the first prompt that it trains."""
    num_policies: int = 1
    """Policy, and below rollout and reward replicas, that must have joined before reinforcement learning begins."""
    num_rollouts: int = 1
    num_rewards: int = 1
    """0 for a run in which nothing scores: it has teachers, and all rewards are 0."""
    num_teachers: int = 0
    """Teachers that must have joined; 0 for a run without."""
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    start_s: float = 120.0
    """How long the run may wait for its first replicas, and later for a replica of a role that has none."""
    stop_s: float = 240.0
    """How long an orderly stop may take before the run fails: the step in hand, its publication, the checkpoint."""
    drain_s: float = 15.0
    generate_s: float = 3600.0
    """How long a replica may work on one group, below on scoring and on teaching one, on a step, and so on, before the
    work is taken from it: whoever heartbeats all the while and never answers hangs."""
    score_s: float = 900.0
    teach_s: float = 900.0
    train_s: float = 7200.0
    publish_s: float = 900.0
    adopt_s: float = 900.0
    save_s: float = 3600.0
    sleep_s: float = 300.0
    evaluation_s: float = 7200.0
    """How long one evaluation may take; what is not scored by then counts as failed."""

    @property
    def last_step(self) -> int:
        """The version that the last step makes."""
        return self.num_supervised_steps + self.num_steps

    @property
    def has_policy(self) -> bool:
        """Say whether anything is trained. If not, rollouts generate with the weights that they read: version 0."""
        return self.activity in TRAINING

    @property
    def keeps_tokens(self) -> bool:
        """Say whether anybody needs the tokens of a group, and not just the texts of its completions."""
        return self.activity not in ("evaluate", "infer", "serve")

    @property
    def serves(self) -> bool:
        """Say whether the run goes on until it is stopped."""
        return self.activity == "serve"

    @property
    def replays(self) -> bool:
        """Say whether the groups to train come from files."""
        return self.activity == "replay"

    @property
    def publishes(self) -> bool:
        """Say whether versions are put on offer."""
        return self.has_policy and self.needs_rollouts

    @property
    def is_taught(self) -> bool:
        """Say whether teachers see the groups of every step."""
        return self.num_teachers > 0

    @property
    def most_filtered(self) -> int:
        """How many groups may be set aside in a row."""
        return self.filter_limit or FILTER_LIMIT * self.prompts_per_step

    def num_completions(self, purpose: Purpose) -> int:
        """Return how many completions a group of this purpose has."""
        return self.group_size if purpose == "train" else self.eval_completions

    def phase(self, step: int) -> str:
        """Return what `step` is one of: sft, dpo, reward_model, or what is done with groups."""
        return self.objective if self.has_policy and step <= self.num_supervised_steps else self.activity

    @property
    def needs_rollouts(self) -> bool:
        """Say whether anything is ever generated."""
        if not self.has_policy:
            return True
        return not self.replays and (self.num_steps > 0 or self.evaluate_at_start or self.evaluate_at_end)

    def welcome(self, role: Role) -> Welcome:
        """Return what members of a role are told, again and again."""
        shares = self.colocate and role in ("policy", "rollout")
        return Welcome(heartbeat_s=self.heartbeat_s, lease_s=self.lease_s, shares_devices=shares)

    def patience_s(self, kind: LeaseKind) -> float:
        """Return how long a lease of this kind may take."""
        match kind:
            case "generate":
                return self.generate_s
            case "score":
                return self.score_s
            case "teach":
                return self.teach_s
            case "train":
                return self.train_s
            case "publish":
                return self.publish_s
            case "adopt":
                return self.adopt_s
            case "checkpoint" | "save":
                return self.save_s
            case "sleep" | "wake":
                return self.sleep_s


def draw_seed(seed: int, purpose: str, ordinal: int, tries: int) -> int:
    """Return the sampling seed of a group: the same wherever and whenever it is generated, new after a failure."""
    return ((seed * 2 + (purpose == "evaluate")) * 1_000_003 + ordinal) * 1_009 + tries
