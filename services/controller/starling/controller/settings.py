"""The controller's settings: the data, the steps, the bounds."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from starling.common.settings import Section, ServiceSettings
from starling.common.wire.messages import Sampling
from starling.controller.core.plan import RunPlan
from starling.controller.data.settings import DataSettings


class SamplingSettings(Section):
    """How rollouts draw tokens in training."""

    max_tokens: int = Field(default=256, ge=1)
    """Most tokens of one completion."""
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


class SftSettings(Section):
    """Supervised steps: the whole run when `run.kind = "sft"`, else a warm-up before reinforcement learning."""

    num_steps: int = Field(default=0, ge=0)
    """Supervised optimizer steps."""
    examples_per_step: int = Field(default=32, ge=1)
    """Examples of one step."""
    data: DataSettings | None = None
    """The examples; without it, those of [data]."""


class RlSettings(Section):
    """Reinforcement learning."""

    num_steps: int = Field(default=100, ge=0)
    """Optimizer steps."""
    prompts_per_step: int = Field(default=16, ge=1)
    """Groups that one step trains."""
    group_size: int = Field(default=8, ge=2)
    """Completions of one prompt."""
    max_staleness: int = Field(default=1, ge=0)
    """Most versions that a trained token may be behind the weights that it trains; 0 is synchronous training."""
    max_tries: int = Field(default=2, ge=0)
    """How often a group is generated again when a scorer fails, before its prompt is dropped."""


class EvaluationSettings(Section):
    """Evaluation on the held-out prompts of [data]."""

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


class DeadlineSettings(Section):
    """How long one piece of work may take. Who heartbeats and does not answer by then hangs, and must leave."""

    generate_s: float = Field(default=3600.0, gt=0)
    """One group of completions."""
    score_s: float = Field(default=900.0, gt=0)
    """The rewards of one group."""
    train_s: float = Field(default=7200.0, gt=0)
    """One optimizer step."""
    publish_s: float = Field(default=900.0, gt=0)
    """Putting a version on offer."""
    adopt_s: float = Field(default=900.0, gt=0)
    """Pulling a version and switching to it."""
    save_s: float = Field(default=3600.0, gt=0)
    """Writing a checkpoint or a state."""


class ControllerSettings(Section):
    """What the controller itself needs."""

    num_policies: int = Field(default=1, ge=1)
    """Policy replicas that must have joined before training begins."""
    num_rollouts: int = Field(default=1, ge=1)
    """Rollout replicas that must have joined before reinforcement learning begins."""
    num_rewards: int = Field(default=1, ge=1)
    """Reward replicas that must have joined before reinforcement learning begins."""
    start_s: float = Field(default=120.0, gt=0)
    """How long the run waits for a role that has too few replicas, before it fails."""
    drain_s: float = Field(default=15.0, gt=0)
    """How long replicas get to leave at the end."""
    stop_s: float = Field(default=240.0, gt=0)
    """How long an orderly stop may take (the step in hand, its publication, the checkpoint) before the run fails."""
    save_every: int = Field(default=20, ge=0)
    """Steps between two saved states of the policy, from which it continues after a crash; 0 saves only at a stop."""
    save_rest_s: float = Field(default=10.0, ge=0)
    """Least seconds between two saved states, where steps are short."""
    journal_s: float = Field(default=60.0, gt=0)
    """How long the controller waits for room when the disk of its journal is full, before the run fails."""
    recording_mb: int = Field(default=64, ge=0)
    """Most MiB of the recording of events, from which `starling replay` makes any state again; 0 for none."""
    deadlines: DeadlineSettings = DeadlineSettings()
    """After which a replica that has not answered is taken to hang."""


class ControllerProcess(ServiceSettings):
    """All settings of a controller process."""

    data: DataSettings
    sft: SftSettings = SftSettings()
    rl: RlSettings = RlSettings()
    sampling: SamplingSettings = SamplingSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    controller: ControllerSettings = ControllerSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.run.kind == "sft" and self.sft.num_steps == 0:
            raise ValueError("sft.num_steps = 0, but run.kind = 'sft' makes nothing but supervised steps; set it")
        if (self.evaluation.at_start or self.evaluation.at_end or self.evaluation.every) and self.data.held_out == 0:
            raise ValueError("data.held_out = 0 leaves nothing to evaluate on; set it, or turn evaluation off")
        return self

    def plan(self) -> RunPlan:
        """Return the numbers that the core decides by."""
        grpo = self.run.kind == "grpo"
        greedy = {"temperature": self.evaluation.temperature, "top_p": 1.0, "top_k": 0}
        return RunPlan(
            seed=self.run.seed,
            sampling=self.sampling.to_wire(),
            eval_sampling=self.sampling.model_copy(update=greedy).to_wire(),
            num_sft_steps=self.sft.num_steps,
            examples_per_step=self.sft.examples_per_step,
            num_steps=self.rl.num_steps if grpo else 0,
            prompts_per_step=self.rl.prompts_per_step,
            group_size=self.rl.group_size,
            max_staleness=self.rl.max_staleness,
            max_tries=self.rl.max_tries,
            evaluate_at_start=self.evaluation.at_start,
            evaluate_at_end=self.evaluation.at_end,
            evaluate_every=self.evaluation.every,
            eval_share=self.evaluation.share,
            evaluation_s=self.evaluation.timeout_s,
            save_every=self.controller.save_every,
            save_rest_s=self.controller.save_rest_s,
            num_policies=self.controller.num_policies,
            eval_completions=self.evaluation.num_completions,
            num_rollouts=self.controller.num_rollouts,
            num_rewards=self.controller.num_rewards,
            heartbeat_s=self.network.heartbeat_s,
            lease_s=self.network.lease_s,
            start_s=self.controller.start_s,
            drain_s=self.controller.drain_s,
            stop_s=self.controller.stop_s,
            **self.controller.deadlines.model_dump(),
        )
