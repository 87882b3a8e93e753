"""The plan of a run: its kind, and the numbers by which the core decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec

from starling.common.ids import LeaseKind, Purpose, Role
from starling.common.kinds import RL, RunKind, kind_of
from starling.common.wire.messages import Sampling, Welcome
from starling.controller.core.groups.buffer import GroupBuffer, buffer_class
from starling.controller.core.groups.validation.limits import GroupLimits
from starling.controller.core.groups.validation.scores import TrainedScorer, is_drawn
from starling.controller.core.replicas.scaling.autoscale import AutoscaleRule
from starling.weightsync.offers.offer import TransportChoice

MAX_DISCARDED_STEPS = 3
"""The run fails when as many groups as these steps have were discarded in a row."""
FILTER_LIMIT = 10
"""Steps' worth of groups that may be filtered out in a row, where the recipe sets no limit."""


@dataclass(frozen=True)
class LeaseTimeouts:
    """How long one lease may take, by the kind of its work.

    A replica that sends heartbeats and does not answer by then hangs, and is evicted.
    """

    generate_s: float = 3600.0
    score_s: float = 900.0
    teach_s: float = 900.0
    train_s: float = 7200.0
    publish_s: float = 900.0
    adopt_s: float = 900.0
    save_s: float = 3600.0
    """A checkpoint or a saved state."""
    sleep_s: float = 300.0
    """Releasing shared devices, or taking them back."""

    def of(self, kind: LeaseKind) -> float:
        """Return the timeout of a lease of this kind, in seconds."""
        return self._by_kind[kind]

    @cached_property
    def _by_kind(self) -> dict[LeaseKind, float]:
        return {
            "generate": self.generate_s,
            "score": self.score_s,
            "teach": self.teach_s,
            "train": self.train_s,
            "publish": self.publish_s,
            "adopt": self.adopt_s,
            "checkpoint": self.save_s,
            "save": self.save_s,
            "sleep": self.sleep_s,
            "wake": self.sleep_s,
        }


@dataclass(frozen=True)
class RunPlan:
    """The kind of a run, its sizes, bounds and deadlines."""

    seed: int
    sampling: Sampling
    eval_sampling: Sampling
    kind: RunKind = RL
    num_supervised_steps: int = 0
    """Steps that learn from examples: the first of the run."""
    examples_per_step: int = 1
    num_steps: int = 0
    """Steps of reinforcement learning, after the supervised ones; without a policy, files to write."""
    num_prompts: int = 0
    """Without a policy: how many prompts are answered, each once."""
    records: bool = False
    """Write the groups of each step of reinforcement learning to files too, before the step is trained."""
    prompts_per_step: int = 1
    group_size: int = 1
    colocate: bool = False
    """Policies and rollouts share their devices by time."""
    single_roles: frozenset[str] = frozenset()
    """Roles of which the launcher can place one replica only: its nodes meet at one address of the run."""
    max_staleness: int = 1
    sync_every: int = 1
    """Steps between two publications; 0 publishes when rollouts have no group left that they may start."""
    sync_every_s: float = 0.0
    """Seconds between two publications, unless training would wait for one."""
    relay_from_bytes: int = 64 << 20
    """Size of the weights from which rollouts on other hosts than the policy read them from each other."""
    max_tries: int = 2
    dynamic_sampling: bool = False
    """Filter groups out whose rewards are all equal, and take the next prompts in their place."""
    filter_limit: int = 0
    """Filtered groups in a row after which the run fails; 0 for ten times `prompts_per_step`."""
    evaluate_at_start: bool = False
    evaluate_at_end: bool = False
    evaluate_every: int = 0
    """Steps of reinforcement learning between two evaluations; 0 for none."""
    eval_completions: int = 1
    eval_share: float = 0.25
    """Share of the rollouts, at least one, that an evaluation is pinned to; of a single one, half of its slots."""
    save_every: int = 0
    """Steps between two saved states of the policy; 0 saves only at a stop."""
    save_rest_s: float = 0.0
    """Minimum seconds between two saved states, for steps that take less time than a save."""
    samples_per_step: int = 0
    """Completions of each step in samples.jsonl; 0 for none."""
    samples_every: int = 1
    """Steps between two steps with samples."""
    begin_version: int = 0
    """The version that the run begins with: more than 0 when it continues from a state of another run."""
    begin_prompt: int = 0
    """Position in the data of the first prompt that it trains."""
    num_policies: int = 1
    """Policy replicas, and below rollout and reward replicas, that must join before reinforcement learning begins."""
    num_rollouts: int = 1
    num_rewards: int = 1
    """0 for a run without scorers: it has teachers, and all rewards are 0."""
    num_teachers: int = 0
    """Teachers that must join; 0 for a run without teachers."""
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    start_s: float = 120.0
    """How long the run may wait for its first replicas, and later for a replica of a role that has none."""
    stop_s: float = 240.0
    """How long a graceful stop may take before the run fails: the current step, its publication, the checkpoint."""
    drain_s: float = 15.0
    host: str = "127.0.0.1"
    """Address that replicas serve weights on, where they have no other."""
    encrypt_weights: bool | None = None
    """As `network.encrypt_weights`."""
    rollout_transport: TransportChoice = "auto"
    """Transport of the offers of rollouts; others are refused, unless they are as safe."""
    timeouts: LeaseTimeouts = LeaseTimeouts()
    max_model_len: int = 0
    """Tokens of a prompt with one of its completions; 0 if the recipe does not say it, and below likewise."""
    max_media_bytes: int = 0
    """Tensors of a prompt's images and videos."""
    teacher_top_k: int | None = None
    """Likeliest tokens that a teacher sends for each position; None if the recipe does not say it."""
    fans_out: bool = False
    """Without training: a policy reads the model folder and publishes its weights, which rollouts pull as version 0."""
    reads_checkpoint: bool = False
    """Without a policy: the controller reads the model folder, and no rollout gets work before the digest is known."""
    num_scorers: int = 0
    """Scorers of the recipe; 0 if it does not say it."""
    scorers: tuple[TrainedScorer, ...] = ()
    """Those that count in the reward, where the algorithm may take their scores one by one; else empty."""
    compares_scores: bool = False
    """The algorithm takes them one by one: dynamic sampling compares the scores of each, not the rewards."""
    evaluation_scorers: tuple[str, ...] = ()
    """Labels of the scorers that only evaluate."""
    evaluated_share: float = 0.0
    """Share of the groups of training that they score."""
    alarm_steps: int = 20
    """Steps with their scores over which these are compared with the rewards."""
    autoscale: AutoscaleRule | None = None
    """The rule by which the number of rollouts follows the work; None for none."""
    evaluation_s: float = 7200.0
    """How long one evaluation may take; prompts that are not scored by then count as failed."""

    @property
    def last_step(self) -> int:
        """The version that the last step makes."""
        return self.num_supervised_steps + self.num_steps

    @property
    def publishes(self) -> bool:
        """Whether rollouts get their weights from policies. Otherwise they read them from a folder themselves."""
        return self.fans_out or self.kind.publishes(self)

    @property
    def has_teachers(self) -> bool:
        """Whether teachers score the tokens of the groups of every step."""
        return self.num_teachers > 0

    @property
    def max_discarded(self) -> int:
        """How many groups may be discarded in a row."""
        return MAX_DISCARDED_STEPS * self.prompts_per_step

    @property
    def max_filtered(self) -> int:
        """How many groups may be filtered out in a row."""
        return self.filter_limit or FILTER_LIMIT * self.prompts_per_step

    @cached_property
    def group_limits(self) -> GroupLimits:
        """Limits on the size of a group."""
        return GroupLimits(
            num_completions=max(self.group_size, self.eval_completions),
            longest=self.max_model_len,
            media_bytes=self.max_media_bytes,
            teacher_top_k=self.teacher_top_k,
        )

    def num_completions(self, purpose: Purpose) -> int:
        """Return how many completions a group of this purpose has."""
        return self.group_size if purpose == "train" else self.eval_completions

    def evaluates(self, purpose: Purpose, ordinal: int) -> bool:
        """Return whether evaluation scorers score a group, too: some of training, and all others."""
        if purpose == "evaluate" or not self.kind.trains:
            return True
        return bool(self.evaluation_scorers) and is_drawn(self.seed, ordinal, self.evaluated_share)

    def phase(self, step: int) -> str:
        """Return the phase of the run during `step`: sft, dpo, reward_model, or what is done with groups."""
        return self.kind.phase(is_example_step=step <= self.num_supervised_steps)

    def new_buffer(self) -> GroupBuffer:
        """Return the buffer of the run as it begins."""
        buffer = buffer_class(self.kind)(
            num_steps=self.num_steps,
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            max_tries=self.max_tries,
            needs_teacher=self.has_teachers,
            num_prompts=self.num_prompts,
        )
        buffer.begin(max(0, self.begin_version - self.num_supervised_steps), self.begin_prompt)
        return buffer

    def journaled(self) -> dict[str, Any]:
        """Return what may not differ when the run resumes, because it gives the records of the journal their meaning.

        The names are those of the journal's `RunBegun` record.
        """
        return {
            "seed": self.seed,
            "objective": self.kind.objective,
            "num_supervised_steps": self.num_supervised_steps,
            "examples_per_step": self.examples_per_step,
            "prompts_per_step": self.prompts_per_step,
            "group_size": self.group_size,
            "begin_version": self.begin_version,
            "begin_prompt": self.begin_prompt,
            "is_taught": self.has_teachers,
            "activity": self.kind.activity,
        }

    def to_fields(self) -> dict[str, Any]:
        """Return all numbers of the plan as a recording holds them: flat, the timeouts among them."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        del fields["kind"]
        timeouts = fields.pop("timeouts")
        return {**fields, **timeouts, "objective": self.kind.objective, "activity": self.kind.activity}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RunPlan:
        """Return the plan of a recording.

        Raises:
            ValueError: the fields are not those of a plan.
        """
        numbers = dict(fields)
        kind = kind_of(numbers.pop("objective", "sft"), numbers.pop("activity", "rl"))
        try:
            timeouts = msgspec.convert(numbers, LeaseTimeouts)
            return replace(msgspec.convert(numbers, cls), kind=kind, timeouts=timeouts)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def welcome(self, role: Role) -> Welcome:
        """Return the answer to each heartbeat of a member of this role."""
        shares = self.colocate and role in ("policy", "rollout")
        return Welcome(heartbeat_s=self.heartbeat_s, lease_s=self.lease_s, shares_devices=shares)


def draw_seed(seed: int, purpose: str, ordinal: int, tries: int) -> int:
    """Return the sampling seed of a group: independent of when and where it is generated, new after a failure."""
    return ((seed * 2 + (purpose == "evaluate")) * 1_000_003 + ordinal) * 1_009 + tries
