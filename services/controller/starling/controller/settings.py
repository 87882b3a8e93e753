"""The controller's settings: the data, the steps, the bounds."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator

from starling.common.settings import ServiceSettings, SettingsSection
from starling.common.wire.messages import Sampling
from starling.controller.core.kinds import KINDS, RunKind
from starling.controller.core.plan import RunPlan
from starling.controller.data.settings import DataSettings
from starling.controller.data.trajectories import TRAJECTORIES

ANSWERS_PER_FILE = 64
"""Prompts whose answers are written together."""


class SamplingSettings(SettingsSection):
    """How rollouts draw tokens in training."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of one completion. The room that its prompt leaves in `rollout.max_model_len` may end it before;
    either way it counts as truncated."""
    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of most likely tokens whose probabilities sum to this; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, besides the tokenizer's end-of-sequence token."""

    def to_wire(self) -> Sampling:
        """Return these settings as rollouts get them."""
        return Sampling(**self.model_dump())


class SftSettings(SettingsSection):
    """Supervised steps: the whole run when `run.kind = "sft"`, else a warm-up before reinforcement learning."""

    num_steps: int = Field(default=0, ge=0)
    """Supervised steps, each of which makes one version."""
    examples_per_step: int = Field(default=32, ge=1)
    """Examples of one step."""
    data: DataSettings | None = None
    """The examples; without it, those of [data]."""


class PreferenceSettings(SettingsSection):
    """Steps that learn from pairs of responses: the whole run when `run.kind` is "dpo" or "reward_model"."""

    num_steps: int = Field(default=0, ge=0)
    """Optimizer steps."""
    examples_per_step: int = Field(default=32, ge=1)
    """Pairs of one step."""
    data: DataSettings | None = None
    """The pairs, chosen in its `reference_column` and rejected in its `rejected_column`; without it, those of
    [data]."""


class RlSettings(SettingsSection):
    """Reinforcement learning."""

    num_steps: int = Field(default=100, ge=0)
    """Optimizer steps."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Groups that one step trains."""
    group_size: int = 8
    """Completions of one prompt."""
    max_staleness: int = Field(default=1, ge=0)
    """Most versions that a trained token may be behind the weights that it trains; 0 is synchronous training."""
    max_tries: int = Field(default=2, ge=0)
    """How often a group is generated again when a scorer fails, before its prompt is dropped."""
    dynamic_sampling: bool = False
    """Set groups aside whose rewards are all equal, and generate for the next prompts instead, until each step has
    `prompts_per_step` groups that teach something (DAPO, arXiv:2503.14476, equation 11)."""
    filter_limit: int = Field(default=0, ge=0)
    """The run fails when so many groups in a row were set aside; 0 for ten times `prompts_per_step`."""

    @field_validator("group_size")
    @classmethod
    def _comparable(cls, group_size: int) -> int:
        if group_size < 2:
            raise ValueError(
                f"{group_size} is too few: a completion is judged against the others of its group, so a group of one "
                "teaches nothing; set at least 2"
            )
        return group_size


class TaskSettings(SettingsSection):
    """One of several datasets that are evaluated together."""

    name: str = Field(min_length=1)
    """By which its results are told; scorers may be for it alone."""
    data: DataSettings
    """Its prompts: the held-out ones, or all where it holds none out."""


class EvaluationSettings(SettingsSection):
    """Evaluation on the held-out prompts of [data], and how `run.kind = "evaluate"` and "infer" answer prompts."""

    at_start: bool = False
    """Evaluate before the first step of reinforcement learning."""
    at_end: bool = False
    """Evaluate after the last step."""
    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps of reinforcement learning; 0 for not."""
    share: float = Field(default=0.25, gt=0, le=1)
    """Share of the rollouts, at least one, that an evaluation is bound to; of a single one it takes half the slots."""
    timeout_s: float = Field(default=7200.0, gt=0)
    """How long one evaluation may take; what is not scored by then counts as failed."""
    num_completions: int = Field(default=1, ge=1)
    """Completions of each prompt."""
    temperature: float = Field(default=0.0, ge=0)
    """Divisor of the logits; 0 takes the most likely token."""
    tasks: tuple[TaskSettings, ...] = ()
    """What `run.kind = "evaluate"` evaluates instead of [data]."""

    @field_validator("tasks")
    @classmethod
    def _told_apart(cls, tasks: tuple[TaskSettings, ...]) -> tuple[TaskSettings, ...]:
        names = [task.name for task in tasks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tasks are called {name!r}; give one of them another name")
        return tasks


class DeadlineSettings(SettingsSection):
    """How long one piece of work may take. Who heartbeats and does not answer by then hangs, and must leave."""

    generate_s: float = Field(default=3600.0, gt=0)
    """One group of completions."""
    score_s: float = Field(default=900.0, gt=0)
    """The rewards of one group."""
    teach_s: float = Field(default=900.0, gt=0)
    """What a teacher makes of one group."""
    train_s: float = Field(default=7200.0, gt=0)
    """One step, however many optimizer updates it makes."""
    publish_s: float = Field(default=900.0, gt=0)
    """Putting a version on offer."""
    adopt_s: float = Field(default=900.0, gt=0)
    """Pulling a version and switching to it."""
    save_s: float = Field(default=3600.0, gt=0)
    """Writing a checkpoint or a state."""
    sleep_s: float = Field(default=300.0, gt=0)
    """Giving the devices to others, or taking them back, where `launch.colocate` shares them."""


class LoggingSettings(SettingsSection):
    """What people see of a run besides `metrics.jsonl`; see `docs/reference/metrics.md`."""

    loggers: tuple[str, ...] = ()
    """Where metrics go too: `tensorboard`, `wandb`, `trackio`, or your own `module:name` or `path/to/file.py:name`."""
    project: str = "starling"
    """Under which wandb and trackio keep the run."""
    offline: bool = False
    """Let wandb keep its records in the run's folder, for `wandb sync` to send later."""
    queue_steps: int = Field(default=1000, ge=1)
    """Most steps that wait for a slow logger; what comes beyond is dropped, counted, and told."""
    deadline_s: float = Field(default=60.0, gt=0)
    """A logger that takes longer for one step hangs, and gets no more."""
    close_s: float = Field(default=30.0, gt=0)
    """How long the end of the run waits for what loggers still have to write."""
    samples_per_step: int = Field(default=4, ge=0, le=1000)
    """Completions of a step that go to `samples.jsonl` and the loggers, with prompt and rewards; 0 for none."""
    samples_every: int = Field(default=1, ge=1)
    """Only of every so-manieth step."""
    samples_mb: int = Field(default=64, ge=1)
    """Most MiB of `samples.jsonl` and its predecessor `samples.old.jsonl` together."""
    trajectories: bool = False
    """Keep all groups that reinforcement learning trains in `trajectories/`, from which `run.kind = "replay"` trains
    again. `run.kind = "generate"` always does; see `docs/how-to/replay.md`."""


class ControllerSettings(SettingsSection):
    """What the controller itself needs."""

    num_policies: int = Field(default=1, ge=1)
    """Policy replicas that must have joined before training begins."""
    num_rollouts: int = Field(default=1, ge=1)
    """Rollout replicas that must have joined before reinforcement learning begins."""
    num_rewards: int = Field(default=1, ge=0)
    """Reward replicas that must have joined before reinforcement learning begins; 0 where nothing scores, and teachers
    are all that the policy learns from."""
    num_teachers: int = Field(default=0, ge=0)
    """Teachers that must have joined before reinforcement learning begins; 0 for a run without."""
    colocate: bool = False
    """Policies and rollouts share their devices, and take turns; `launch.colocate` sets it."""
    start_s: float = Field(default=120.0, gt=0)
    """How long the run waits for a role that has too few replicas, before it fails."""
    drain_s: float = Field(default=15.0, gt=0)
    """How long replicas get to leave at the end."""
    stop_s: float = Field(default=240.0, gt=0)
    """How long an orderly stop may take (the step in hand, its publication, the checkpoint) before the run fails."""
    save_every: int = Field(default=20, ge=0)
    """Steps between two saved states of the policy, from which it continues after a crash; 0 saves only at a stop."""
    begin_version: int = Field(default=0, ge=0)
    """The version of the state that the run continues from; `starling run --from` sets it."""
    begin_prompt: int = Field(default=0, ge=0)
    """Position in the data that goes with it."""
    save_rest_s: float = Field(default=10.0, ge=0)
    """Least seconds between two saved states, where steps are short."""
    journal_s: float = Field(default=60.0, gt=0)
    """How long the controller waits for room when the disk of its journal is full, before the run fails."""
    window: int = Field(default=1024, ge=1)
    """Prompts that a run without a policy works on at a time: twice what its rollouts hold, or more, so that one long
    completion holds nothing up."""
    recording_mb: int = Field(default=64, ge=0)
    """Most MiB of the recording of events, from which `starling replay` makes any state again; 0 for none."""
    deadlines: DeadlineSettings = DeadlineSettings()
    """After which a replica that has not answered is taken to hang."""


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
        if self.controller.num_rewards == 0:
            if self.kind.learns_from_rewards and self.controller.num_teachers == 0:
                raise ValueError("controller.num_rewards = 0 leaves nothing to learn from; set it, or have teachers")
            if self.kind.only_scores:
                raise ValueError("controller.num_rewards = 0 leaves nothing to evaluate by; set it")
            self._check_unscored()
        if (self.evaluation.at_start or self.evaluation.at_end or self.evaluation.every) and self.data.held_out == 0:
            raise ValueError("data.held_out = 0 leaves nothing to evaluate on; set it, or turn evaluation off")
        return self

    def _check_kind(self) -> None:
        """Refuse steps and evaluations that a run of this kind would silently not make."""
        self._check_examples()
        kind, evaluation = self.kind, self.evaluation
        evaluates = evaluation.at_start or evaluation.at_end or evaluation.every
        if evaluates and kind.no_evaluation:
            raise ValueError(f"[evaluation] is on, but run.kind = '{kind.name}' {kind.no_evaluation}; turn it off")
        if self.rl.dynamic_sampling and not kind.filters_groups:
            raise ValueError(f"rl.dynamic_sampling = true, but run.kind = '{kind.name}' keeps all groups; turn it off")
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
                "rl.dynamic_sampling = true compares rewards, and nothing scores in this run; have scorers, or turn it "
                "off"
            )
        if evaluation.at_start or evaluation.at_end or evaluation.every:
            raise ValueError("[evaluation] is on, and nothing scores in this run; have scorers, or turn it off")

    @property
    def kind(self) -> RunKind:
        """What the run does."""
        return KINDS[self.run.kind]

    @property
    def examples(self) -> SftSettings | PreferenceSettings:
        """The section that the steps of examples follow."""
        return self.preference if self.kind.learns_from_pairs else self.sft

    @property
    def answering(self) -> SamplingSettings:
        """How prompts are answered that are each answered once: by [sampling], at the evaluation's temperature."""
        return self.sampling.model_copy(update={"temperature": self.evaluation.temperature})

    def plan(self) -> RunPlan:
        """Return the numbers that the core decides by."""
        kind = self.kind
        answers = kind.answers_each_prompt
        per_step = ANSWERS_PER_FILE if answers else self.rl.prompts_per_step
        greedy = {"temperature": self.evaluation.temperature, "top_p": 1.0, "top_k": 0}
        return RunPlan(
            seed=self.run.seed,
            sampling=self.answering.to_wire() if answers else self.sampling.to_wire(),
            eval_sampling=self.sampling.model_copy(update=greedy).to_wire(),
            kind=kind,
            num_prompts=self.rl.num_steps * self.rl.prompts_per_step if kind.writes_tokens else 0,
            records=kind.learns_from_rewards and self.logging.trajectories,
            num_supervised_steps=self.examples.num_steps,
            examples_per_step=self.examples.examples_per_step,
            num_steps=self.rl.num_steps if kind.has_rl_steps else 0,
            prompts_per_step=per_step,
            group_size=self.evaluation.num_completions if answers else self.rl.group_size,
            max_staleness=self.controller.window // per_step if not kind.trains else self.rl.max_staleness,
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
            save_rest_s=self.controller.save_rest_s,
            begin_version=self.controller.begin_version,
            begin_prompt=self.controller.begin_prompt,
            colocate=self.controller.colocate,
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
            **self.controller.deadlines.model_dump(),
        )
