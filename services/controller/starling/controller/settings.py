"""Settings of the controller: data, steps, sampling, evaluation, logging, deadlines."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from starling.algo.staleness import num_slots
from starling.common.kinds import KINDS, RunKind
from starling.common.ranges import (
    MAX_COEFFICIENT,
    MAX_COUNT,
    MAX_GROUPS,
    MAX_MIB,
    MAX_REPLICAS,
    MAX_ROWS,
    MAX_SECONDS,
    MAX_STALENESS,
    MAX_STEPS,
    MAX_TOKENS,
    MAX_WHOLE,
)
from starling.common.settings import Seconds, ServiceSettings, SettingsSection, Temperature, TokenId
from starling.common.wire.messages import Sampling
from starling.controller.core.groups.validation.recording import recording_problem
from starling.controller.core.groups.validation.scores import TrainedScorer
from starling.controller.core.plan import LeaseTimeouts, RunPlan
from starling.controller.core.replicas.scaling.autoscale import AutoscaleRule
from starling.controller.core.replicas.scaling.desired import MAX_DESIRED
from starling.controller.core.training.train_groups import step_problem
from starling.controller.data.settings import DataSettings
from starling.controller.data.trajectories import TRAJECTORIES
from starling.weightsync.offers.offer import TransportChoice

ANSWERS_PER_FILE = 64
"""Prompts whose answers are written together."""
NOTHING_RECORDED: Final = {"logprobs": "full", "routing": "own"}
"""What differs in [sampling] where nothing is trained."""


class SamplingSettings(SettingsSection):
    """Sampling of tokens in training."""

    max_tokens: int = Field(default=256, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens of one completion. It also ends when prompt and completion reach
    `rollout.max_model_len`; in both cases it counts as truncated."""
    temperature: Temperature = 1.0
    """Sampling temperature: the logits are divided by it."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep the most likely tokens whose probabilities sum to this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Keep this number of most likely tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep tokens whose probability is at least this share of the most likely token's; 0 keeps all."""
    logprobs: Literal["full", "truncated"] = "full"
    """Log-probabilities in training: over the whole vocabulary, or over the tokens that `top_p`, `top_k` and `min_p`
    kept, which the rollout then records. Only the latter are those of the distribution from which tokens are drawn; see
    `docs/reference/algorithms.md`. It needs `top_k`, which bounds what is recorded."""
    routing: Literal["own", "replayed"] = "own"
    """Experts of each token in training, for a mixture of experts: those that the policy's routers choose, or those
    that the rollout's chose, which it then records; see `docs/how-to/router-replay.md`."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end a completion, in addition to the tokenizer's end-of-sequence token."""

    def to_wire(self) -> Sampling:
        """Return the settings as a wire message."""
        return Sampling(**self.model_dump())

    def without_truncation(self, temperature: float) -> SamplingSettings:
        """Return the settings of an evaluation: at `temperature`, over the whole vocabulary."""
        full = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **NOTHING_RECORDED}
        return self.model_copy(update=full)


class SftSettings(SettingsSection):
    """Supervised fine-tuning: the whole run with `run.kind = "sft"`, else a warm-up before reinforcement learning."""

    num_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Number of supervised optimizer steps."""
    examples_per_step: int = Field(default=32, ge=1, le=MAX_GROUPS)
    """Examples per step."""
    data: DataSettings | None = None
    """Dataset of the examples; [data] if not set."""


class PreferenceSettings(SettingsSection):
    """Learning from pairs of responses: the whole run with `run.kind = "dpo"` or `"reward_model"`."""

    num_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Number of optimizer steps."""
    examples_per_step: int = Field(default=32, ge=1, le=MAX_GROUPS)
    """Pairs per step."""
    data: DataSettings | None = None
    """Dataset of the pairs: the chosen response is in its `reference_column`, the rejected one in its
    `rejected_column`. [data] if not set."""


class RlSettings(SettingsSection):
    """Reinforcement learning."""

    num_steps: int = Field(default=100, ge=0, le=MAX_STEPS)
    """Number of optimizer steps."""
    prompts_per_step: int = Field(default=16, ge=1, le=MAX_GROUPS)
    """Prompts (groups) per step."""
    group_size: int = Field(default=8, le=MAX_ROWS)
    """Completions per prompt."""
    max_staleness: int = Field(default=1, ge=0, le=MAX_STALENESS)
    """Maximum age of a trained token, in weight versions before the version that the step updates. 0 is synchronous
    training."""
    sync_every: int = Field(default=1, ge=0, le=MAX_STALENESS + 1)
    """Steps between two publications of the weights; versions in between are never sent. At most `max_staleness` + 1:
    the groups of later steps need a newer version. 0 publishes when it is needed: as soon as rollouts have started all
    groups that `max_staleness` lets them start with the last one."""
    sync_every_s: float = Field(default=0.0, ge=0, le=MAX_SECONDS)
    """Minimum time between two publications, for runs with short steps. The version of `max_staleness` steps after the
    last publication is never held back, so that training need not wait for it."""
    max_tries: int = Field(default=2, ge=0, le=MAX_COUNT)
    """How often a group is generated again after a scorer failed, before its prompt is discarded."""
    dynamic_sampling: bool = False
    """Filter groups whose rewards are all equal, and generate for the next prompts instead, until each step has
    `prompts_per_step` groups with different rewards (DAPO, arXiv:2503.14476, equation 11)."""
    filter_limit: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """The run fails when this number of consecutive groups was filtered; 0 means ten times `prompts_per_step`."""

    @field_validator("group_size")
    @classmethod
    def _check_group_size(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(
                f"{group_size} is too small: advantages are relative to the other completions of the group; set at "
                "least 2"
            )
        return group_size

    @model_validator(mode="after")
    def _check_sync(self) -> Self:
        if self.sync_every > self.max_staleness + 1:
            raise ValueError(
                f"sync_every = {self.sync_every} with max_staleness = {self.max_staleness}: after "
                f"{self.max_staleness + 1} steps no group is left that older weights may generate; lower sync_every to "
                f"{self.max_staleness + 1}, or raise max_staleness"
            )
        due = max(1, self.sync_every)
        if self.sync_every_s and due >= self.max_staleness:
            raise ValueError(
                f"sync_every_s = {self.sync_every_s:g} with sync_every = {self.sync_every} and max_staleness = "
                f"{self.max_staleness} holds nothing back, because the version of max_staleness steps after a "
                f"publication never is; remove sync_every_s, or raise max_staleness to {due + 1}"
            )
        return self


class TaskSettings(SettingsSection):
    """One task of an evaluation: a dataset with a name."""

    name: str = Field(min_length=1)
    """Name of the task in the results; scorers may be restricted to it."""
    data: DataSettings
    """Dataset of the task: its held-out prompts, or all if it has none."""


class EvaluationSettings(SettingsSection):
    """Evaluation on the held-out prompts of [data], and the prompts of `run.kind = "evaluate"` and `"infer"`."""

    at_start: bool = False
    """Evaluate before the first step of reinforcement learning."""
    at_end: bool = False
    """Evaluate after the last step."""
    every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Interval between evaluations, in steps of reinforcement learning; 0 for none."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the rollouts (at least one) that an evaluation uses; of a single rollout it uses half the slots."""
    timeout_s: Seconds = 7200.0
    """Maximum duration of one evaluation. Prompts that are not scored by then count as failed."""
    num_completions: int = Field(default=1, ge=1, le=MAX_ROWS)
    """Completions per prompt."""
    training_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Share of the groups of training that scorers with `use = "evaluation"` score, too; such a group waits for their
    scores. With 0 they score evaluations only."""
    alarm_steps: int = Field(default=20, ge=4, le=1000)
    """Alarm `reward_hacking`: steps with evaluation scores over which these are compared with the rewards, the newer
    half with the older one."""
    temperature: Temperature = 0.0
    """Sampling temperature; 0 takes the most likely token."""
    tasks: tuple[TaskSettings, ...] = ()
    """Tasks that `run.kind = "evaluate"` evaluates instead of [data]."""

    @field_validator("tasks")
    @classmethod
    def _check_names(cls, tasks: tuple[TaskSettings, ...]) -> tuple[TaskSettings, ...]:
        names = [task.name for task in tasks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tasks have the name {name!r}; rename one of them")
        return tasks


class DeadlineSettings(SettingsSection):
    """Maximum durations of work. A replica that sends heartbeats but no answer by then hangs, and is evicted."""

    generate_s: Seconds = 3600.0
    """One group of completions."""
    score_s: Seconds = 900.0
    """The rewards of one group."""
    teach_s: Seconds = 900.0
    """The teacher log-probs of one group."""
    train_s: Seconds = 7200.0
    """One step, with all its optimizer updates."""
    publish_s: Seconds = 900.0
    """Publication of one weight version."""
    adopt_s: Seconds = 900.0
    """Pulling a weight version and switching to it."""
    save_s: Seconds = 3600.0
    """Writing a checkpoint or a saved state."""
    sleep_s: Seconds = 300.0
    """Releasing shared devices or taking them back, with `launch.colocate`."""


class LoggingSettings(SettingsSection):
    """Loggers, samples and trajectories; see `docs/reference/metrics.md`."""

    loggers: tuple[str, ...] = ()
    """Loggers of the metrics besides `metrics.jsonl`: `tensorboard`, `wandb`, `trackio`, or a custom one as
    `module:name` or `path/to/file.py:name`."""
    project: str = "starling"
    """Project of the run in wandb and trackio."""
    offline: bool = False
    """Run wandb offline: its records stay in the run's folder until `wandb sync` uploads them."""
    queue_steps: int = Field(default=1000, ge=1, le=MAX_COUNT)
    """Maximum number of steps that wait for a slow logger. Further steps are dropped, counted and reported."""
    deadline_s: Seconds = 60.0
    """A logger that takes longer for one step is considered hung and gets no more steps."""
    close_s: Seconds = 30.0
    """How long the end of the run waits for loggers to finish."""
    samples_per_step: int = Field(default=4, ge=0, le=1000)
    """Completions per step that are written to `samples.jsonl` and the loggers, with prompt and rewards; 0 for none."""
    samples_every: int = Field(default=1, ge=1, le=MAX_STEPS)
    """Interval between steps with samples, in steps."""
    samples_mb: int = Field(default=64, ge=1, le=MAX_MIB)
    """Maximum size in MiB of `samples.jsonl` and its predecessor `samples.old.jsonl` together."""
    trajectories: bool = False
    """Write all groups that reinforcement learning trains to `trajectories/`, for a later run of `run.kind =
    "replay"`. `run.kind = "generate"` always writes them; see `docs/how-to/replay.md`."""


class TrainedScorerSettings(SettingsSection):
    """A scorer that counts in the reward."""

    label: str
    """Its name in metrics."""
    weight: float = Field(ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """Its weight in the reward."""
    clip_min: float | None = Field(default=None, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """A lower score counts as this one."""
    clip_max: float | None = Field(default=None, ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)
    """A higher score counts as this one."""
    tasks: tuple[str, ...] = ()
    """Tasks whose prompts it scores; empty for all prompts."""

    def to_core(self) -> TrainedScorer:
        """Return the scorer in the form of the core."""
        return TrainedScorer(self.label, self.weight, self.clip_min, self.clip_max, self.tasks)


class AutoscaleSettings(SettingsSection):
    """Number of rollouts that follows the work; see `docs/how-to/scale.md`."""

    min: int = Field(default=1, ge=1, le=MAX_DESIRED)
    """Fewest rollouts."""
    max: int = Field(default=0, ge=0, le=MAX_DESIRED)
    """Most rollouts; 0 leaves their number to `starling scale`."""
    starving: float = Field(default=0.2, gt=0, le=1)
    """Share of the time in which the policy waits for groups, with all slots of all rollouts taken, from which there
    are more rollouts."""
    idle: float = Field(default=0.5, gt=0, le=1)
    """Share of the slots that have no group, because `rl.max_staleness` allows no more, from which there is one rollout
    less, if the policy waits for less than half of `starving`."""
    window_s: Seconds = 60.0
    """Time over which the shares are measured, at least three steps."""
    cooldown_s: Seconds = 300.0
    """Time from a change to the beginning of the next window."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if 0 < self.max < self.min:
            raise ValueError(f"min = {self.min} is more than max = {self.max}; lower min, or raise max")
        return self

    def to_core(self) -> AutoscaleRule | None:
        """Return the rule, None where it is off."""
        if not self.max:
            return None
        return AutoscaleRule(self.min, self.max, self.starving, self.idle, self.window_s, self.cooldown_s)


class ControllerSettings(SettingsSection):
    """Replicas, saved states, time limits and files of the controller."""

    num_policies: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Policy replicas that must have joined before training begins."""
    num_rollouts: int = Field(default=1, ge=1, le=MAX_REPLICAS)
    """Rollout replicas that must have joined before reinforcement learning begins."""
    num_rewards: int = Field(default=1, ge=0, le=MAX_REPLICAS)
    """Reward replicas that must have joined before reinforcement learning begins; 0 if the policy learns from teachers
    only, without rewards."""
    num_teachers: int = Field(default=0, ge=0, le=MAX_REPLICAS)
    """Teacher replicas that must have joined before reinforcement learning begins."""
    colocate: bool = False
    """Policies and rollouts share their devices and use them in turn. Set by `launch.colocate`."""
    single_roles: tuple[Literal["policy", "rollout"], ...] = ()
    """Roles of which the launcher can place one replica only, since its nodes meet at one address. Set by
    `launch.policy_rdzv` and `launch.rollout_rdzv`."""
    rollout_transport: TransportChoice = "auto"
    """Transport by which rollouts pass weights on; their offers of others are refused. Set by `rollout.transport`."""
    max_model_len: int = Field(default=0, ge=0, le=MAX_TOKENS)
    """Limit on the tokens of a prompt with one of its completions, above which a group is refused; 0 for only the limit
    of the model that is trained. Set by `rollout.max_model_len`."""
    max_media_bytes: int = Field(default=0, ge=0, le=900_000_000)
    """Limit on the bytes of a prompt's images and videos, above which its group is refused; 0 for only that of the
    journal. Set by `rollout.max_media_bytes`."""
    teacher_top_k: int | None = Field(default=None, ge=0, le=MAX_WHOLE)
    """Likeliest tokens that a teacher sends for each position; a run with teachers needs it. Set by `teacher.top_k`."""
    model_path: str = ""
    """Model folder of a run without a policy. If it is on the controller's machine, rollouts with another digest are
    refused; otherwise those with another one than the first rollout. Set by `model.path`."""
    fan_out: bool = False
    """In a run that trains nothing: a policy publishes the weights of the model folder, and the rollouts pull them. Set
    by `launch.fan_out`."""
    denoising: bool = False
    """Completions are denoising trajectories of a diffusion model. Set by [diffusion]."""
    num_scorers: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Limit on the scores of a completion, if it is more than 64. Set by `reward.scorers`."""
    trained_scorers: tuple[TrainedScorerSettings, ...] = ()
    """Scorers whose scores the policies get one by one, besides the rewards; empty for none. Set by `reward.scorers`
    where `policy.algorithm.name` may take them."""
    compares_scores: bool = False
    """`rl.dynamic_sampling` compares the scores of each of these scorers, and not the rewards. Set by
    `policy.algorithm.name`."""
    evaluation_scorers: tuple[str, ...] = ()
    """Labels of the scorers that only evaluate. Set by `reward.scorers`."""
    start_s: Seconds = 120.0
    """The run fails when a role has had too few replicas for this long, or when the digest of the model folder of a run
    without a policy is not known this long after its replicas have joined."""
    drain_s: Seconds = 15.0
    """Time that replicas have to leave at the end of the run."""
    stop_s: Seconds = 240.0
    """Maximum duration of a graceful stop (the current step, its publication, the checkpoint) before the run fails."""
    stopped_exit_code: int = Field(default=0, ge=0, le=125)
    """Exit code of a controller whose run a signal has stopped before its end, for a scheduler that is to start it
    again; 0 as after a complete run. An operator's `starling stop` ends with 0, and so does that of `starling run`."""
    save_every: int = Field(default=20, ge=0, le=MAX_STEPS)
    """Interval between saved states of the policy, from which it resumes after a crash, in steps; 0 saves at a stop
    only."""
    begin_version: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Version of the saved state that the run starts from. Set by `starling run --from`."""
    begin_prompt: int = Field(default=0, ge=0, le=MAX_STEPS * MAX_GROUPS)
    """Position in the data that the run starts from. Set by `starling run --from`."""
    relay_from_mb: float = Field(default=64.0, ge=0, le=MAX_WHOLE)
    """Size of the weights, in MiB, from which rollouts on other hosts than the policy read them from each other while
    they arrive. Smaller ones arrive sooner straight from the policy."""
    save_rest_s: float = Field(default=10.0, ge=0, le=MAX_SECONDS)
    """Minimum time between two saved states, and before the first one, for runs with short steps."""
    journal_s: Seconds = 60.0
    """The run fails when the disk of the journal has been full for this long."""
    autoscale: AutoscaleSettings = AutoscaleSettings()
    network_disk: bool = False
    """Allow a journal on a network file system, where its lock may not hold. Only for a run that no other host can
    start: a second controller of the same folder is noticed at its first record, not before."""
    accept_changed_data: bool = False
    """Resume although the data has changed since the run began. Groups that no step has taken are generated again, from
    their new prompts. Set by `starling run --resume RUN_FOLDER --accept-changed-data`."""
    compact_records: int = Field(default=16_384, ge=1, le=MAX_WHOLE)
    """Records after which the journal is compacted to the present state. A restart reads at most about so many; a
    compaction takes some ten milliseconds."""
    window: int = Field(default=1024, ge=1, le=MAX_GROUPS)
    """Prompts that a run without a policy works on at a time. It should be at least twice the number that its rollouts
    hold, so that one long completion does not block the others."""
    recording_mb: int = Field(default=64, ge=0, le=MAX_MIB)
    """Maximum size in MiB of the recording of events, from which `starling replay` reconstructs any state; 0 for
    none."""
    deadlines: DeadlineSettings = DeadlineSettings()
    """Time limits after which a replica that has not answered is considered hung."""


class ControllerProcess(ServiceSettings):
    """All settings of a controller process."""

    data: DataSettings
    sft: SftSettings = SftSettings()
    preference: PreferenceSettings = PreferenceSettings()
    rl: RlSettings = RlSettings()
    sampling: SamplingSettings = SamplingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    controller: ControllerSettings = ControllerSettings()
    logging: LoggingSettings = LoggingSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_kind()
        if problem := self._groups_problem():
            raise ValueError(problem)
        num_groups = num_slots(self.rl.prompts_per_step, self.rl.max_staleness)
        if num_groups > MAX_GROUPS:
            raise ValueError(
                f"rl.prompts_per_step = {self.rl.prompts_per_step} and rl.max_staleness = {self.rl.max_staleness} make "
                f"{num_groups} groups exist at a time, and {MAX_GROUPS} are possible; lower one of them"
            )
        if self.controller.num_rewards == 0:
            if self.kind.learns_from_rewards and self.controller.num_teachers == 0:
                raise ValueError(
                    "controller.num_rewards = 0 leaves nothing to learn from; set it or controller.num_teachers"
                )
            if self.kind.only_scores:
                raise ValueError("controller.num_rewards = 0 leaves nothing to evaluate by; set it")
            self._check_unscored()
        if (self.evaluation.at_start or self.evaluation.at_end or self.evaluation.every) and self.data.held_out == 0:
            raise ValueError("data.held_out = 0 leaves nothing to evaluate on; set it, or turn evaluation off")
        return self

    def _groups_problem(self) -> str:
        """Return why groups cannot be recorded, or why a step of them may not fit into a message; empty if they can."""
        if not self.kind.has_rl_steps:
            return ""
        rl, sampling = self.rl, self.sampling.to_wire()
        has_teacher = self.controller.num_teachers > 0
        return recording_problem(sampling, rl.group_size) or (
            step_problem(
                rl.prompts_per_step,
                rl.group_size,
                sampling,
                has_teacher=has_teacher,
                scorers=self.trained_scorers,
                denoises=self.controller.denoising,
            )
            if self.kind.trains
            else ""
        )

    def _check_kind(self) -> None:
        """Refuse steps and evaluations that a run of this kind would silently not make."""
        self._check_examples()
        kind, evaluation = self.kind, self.evaluation
        evaluates = evaluation.at_start or evaluation.at_end or evaluation.every
        if evaluates and kind.no_evaluation:
            raise ValueError(f"[evaluation] is on, but run.kind = '{kind.name}' {kind.no_evaluation}; turn it off")
        if self.rl.dynamic_sampling and not kind.filters_groups:
            raise ValueError(f"rl.dynamic_sampling = true, but run.kind = '{kind.name}' keeps all groups; turn it off")
        has_rollouts = kind.trains and kind.has_rl_steps and not kind.reads_trajectories
        if self.controller.autoscale.max and not has_rollouts:
            raise ValueError(
                f"controller.autoscale.max = {self.controller.autoscale.max}, but run.kind = '{kind.name}' has no "
                "policy that waits for rollouts; remove [controller.autoscale]"
            )
        if self.controller.autoscale.max and self.controller.colocate:
            raise ValueError(
                f"controller.autoscale.max = {self.controller.autoscale.max}, but policies and rollouts that share "
                "their devices (launch.colocate) wait for each other in any case; remove one of the two"
            )
        if kind.reads_trajectories and not self.data.source.startswith(TRAJECTORIES):
            raise ValueError(
                f"data.source = {self.data.source!r}, but run.kind = '{kind.name}' trains from trajectories; write "
                f"{TRAJECTORIES}FOLDER"
            )

    def _check_examples(self) -> None:
        """Refuse steps of examples that a run of this kind does not make, and a run that lacks them."""
        kind, num_sft, num_preference = self.kind, self.sft.num_steps, self.preference.num_steps
        if num_sft and not kind.trains:
            raise ValueError(f"sft.num_steps = {num_sft}, but run.kind = '{kind.name}' trains nothing; remove [sft]")
        if num_sft and kind.reads_trajectories and self.sft.data is None:
            raise ValueError(f"sft.data is missing: [data] of run.kind = '{kind.name}' has no examples; set it")
        if kind.learns_from_examples_only and self.examples.num_steps == 0:
            section, steps = kind.examples_section, "such steps" if kind.learns_from_pairs else "supervised steps"
            raise ValueError(f"{section}.num_steps = 0, but run.kind = '{kind.name}' makes nothing but {steps}; set it")
        if num_sft and kind.learns_from_pairs:
            raise ValueError(
                f"sft.num_steps = {num_sft}, but run.kind = '{kind.name}' makes no steps of [sft]; make them in "
                "a run of their own, and begin this one from its checkpoint"
            )
        if num_preference and not kind.learns_from_pairs:
            raise ValueError(
                f"preference.num_steps = {num_preference}, but run.kind = '{kind.name}' learns from no pairs; "
                "set run.kind to 'dpo' or 'reward_model', or remove [preference]"
            )

    def _check_unscored(self) -> None:
        """A run in which nothing scores learns from its teachers, and from nothing that needs rewards."""
        evaluation = self.evaluation
        if self.rl.dynamic_sampling:
            raise ValueError(
                "rl.dynamic_sampling = true compares rewards, and nothing scores in this run; add [[reward.scorers]] "
                "or turn it off"
            )
        if evaluation.at_start or evaluation.at_end or evaluation.every:
            raise ValueError(
                "[evaluation] is on, and nothing scores in this run; add [[reward.scorers]] or turn it off"
            )

    @property
    def kind(self) -> RunKind:
        """Kind of the run."""
        return KINDS[self.run.kind]

    @property
    def trained_scorers(self) -> tuple[TrainedScorer, ...]:
        """Scorers whose scores the policies get one by one."""
        return tuple(scorer.to_core() for scorer in self.controller.trained_scorers)

    @property
    def examples(self) -> SftSettings | PreferenceSettings:
        """The section that the steps of examples follow."""
        return self.preference if self.kind.learns_from_pairs else self.sft

    @property
    def answering(self) -> SamplingSettings:
        """How prompts are answered that are each answered once: by [sampling], at the evaluation's temperature."""
        return self.sampling.model_copy(update={"temperature": self.evaluation.temperature, **NOTHING_RECORDED})

    def plan(self) -> RunPlan:
        """Return the numbers that the core decides by."""
        kind = self.kind
        answers = kind.answers_each_prompt
        per_step = ANSWERS_PER_FILE if answers else self.rl.prompts_per_step
        return RunPlan(
            seed=self.run.seed,
            sampling=self.answering.to_wire() if answers else self.sampling.to_wire(),
            eval_sampling=self.sampling.without_truncation(self.evaluation.temperature).to_wire(),
            kind=kind,
            num_prompts=self.rl.num_steps * self.rl.prompts_per_step if kind.writes_tokens else 0,
            records=kind.learns_from_rewards and self.logging.trajectories,
            num_supervised_steps=self.examples.num_steps,
            examples_per_step=self.examples.examples_per_step,
            num_steps=self.rl.num_steps if kind.has_rl_steps else 0,
            prompts_per_step=per_step,
            group_size=self.evaluation.num_completions if answers else self.rl.group_size,
            max_staleness=self.controller.window // per_step if not kind.trains else self.rl.max_staleness,
            sync_every=self.rl.sync_every,
            sync_every_s=self.rl.sync_every_s,
            max_tries=self.rl.max_tries,
            dynamic_sampling=self.rl.dynamic_sampling,
            filter_limit=self.rl.filter_limit,
            evaluate_at_start=self.evaluation.at_start,
            evaluate_at_end=self.evaluation.at_end,
            evaluate_every=self.evaluation.every,
            eval_share=self.evaluation.share,
            evaluation_s=self.evaluation.timeout_s,
            samples_per_step=self.logging.samples_per_step,
            samples_every=self.logging.samples_every,
            save_every=self.controller.save_every,
            relay_from_bytes=int(self.controller.relay_from_mb * (1 << 20)),
            save_rest_s=self.controller.save_rest_s,
            begin_version=self.controller.begin_version,
            begin_prompt=self.controller.begin_prompt,
            colocate=self.controller.colocate,
            single_roles=frozenset(self.controller.single_roles),
            num_policies=self.controller.num_policies,
            eval_completions=self.evaluation.num_completions,
            num_rollouts=self.controller.num_rollouts,
            num_rewards=self.controller.num_rewards if kind.is_scored else 0,
            num_teachers=self.controller.num_teachers,
            heartbeat_s=self.network.heartbeat_s,
            lease_s=self.network.lease_s,
            start_s=self.controller.start_s,
            drain_s=self.controller.drain_s,
            stop_s=self.controller.stop_s,
            host=self.network.host,
            encrypt_weights=self.network.encrypt_weights,
            rollout_transport=self.controller.rollout_transport,
            max_model_len=self.controller.max_model_len,
            max_media_bytes=self.controller.max_media_bytes,
            teacher_top_k=self.controller.teacher_top_k,
            num_scorers=self.controller.num_scorers,
            scorers=self.trained_scorers,
            compares_scores=self.controller.compares_scores,
            evaluation_scorers=self.controller.evaluation_scorers,
            evaluated_share=self.evaluation.training_share,
            alarm_steps=self.evaluation.alarm_steps,
            autoscale=self.controller.autoscale.to_core(),
            fans_out=self.controller.fan_out and not kind.trains,
            timeouts=LeaseTimeouts(**self.controller.deadlines.model_dump()),
        )
