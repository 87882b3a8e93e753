"""All that a step changes: the model, and the trainer of the kind of steps that is in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Literal

import structlog
import torch
from torch import Tensor

from starling.policy.settings.policy import PolicySettings, changed
from starling.policy.train.checkpoint.header import TrainerKind, TrainerState
from starling.policy.train.checkpoint.state import (
    REFERENCE,
    TRAINER,
    WEIGHTS,
    HostBuffers,
    SavedState,
    StateMetadata,
    StateSnapshot,
    in_section,
    take_state,
)
from starling.policy.train.data.examples import PreferencePair
from starling.policy.train.data.groups import ScoredGroup, SftExample
from starling.policy.train.errors import StepBrokenError
from starling.policy.train.memory.offload import DeviceOffload
from starling.policy.train.metrics.clock import StepClock
from starling.policy.train.model.load import version_tensors as model_tensors
from starling.policy.train.model.lora import export_model
from starling.policy.train.preference import DpoTrainer, RewardModelTrainer
from starling.policy.train.rl import RlTrainer
from starling.policy.train.sft import SftTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


log = structlog.get_logger(__name__)

Trainer = SftTrainer | RlTrainer | DpoTrainer | RewardModelTrainer
_KINDS: Final[Mapping[type[Trainer], TrainerKind]] = {
    SftTrainer: "sft",
    RlTrainer: "rl",
    DpoTrainer: "dpo",
    RewardModelTrainer: "reward_model",
}


class Learner:
    """Makes the versions of one replica, one step at a time.

    The first step of another kind than the one before begins with a fresh trainer. What a learner has saved, another
    one takes up, and from there both make the same versions, bit for bit, of the same steps.
    """

    def __init__(self, load: Callable[[], PreTrainedModel], settings: PolicySettings) -> None:
        """Begin with version 0.

        Args:
            load: loads that version, the same bits each time: it may be needed once more as the reference of a KL term.
            settings: what to do, where a step does not say otherwise.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        self._load, self._settings = load, settings
        self.model = load()
        self.tensors = model_tensors(self.model)
        """What makes up a version; changed in place by every step."""
        self.clock = StepClock(self.model.device)
        """Where the time of each step goes; the trainers enter their phases."""
        self.trainer: Trainer | None = None
        self.next_prompt = 0
        """Position in the data of the first prompt that no step so far has trained."""
        self.metrics: dict[str, float] = {}
        """Of the step that made this version."""
        self._room = HostBuffers()
        self._parking = DeviceOffload()
        self._broken: StepBrokenError | None = None
        """Why the weights are no version any more."""

    def supervise(
        self, examples: Sequence[SftExample], *, num_steps: int, changes: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Make the next version out of `examples`; see `SftTrainer.step`.

        Args:
            examples: those of the step.
            num_steps: supervised steps in the whole run.
            changes: what this step does otherwise than the settings say, by key of the recipe.

        Raises:
            StepBrokenError: this step, or one before it, broke off after it had changed the weights.
            ConfigError: it cannot be made; the weights are as they were.
        """
        settings = changed(self._settings, changes or {})
        if not isinstance(self.trainer, SftTrainer):
            self.trainer = self._fresh("sft", num_steps)
            assert isinstance(self.trainer, SftTrainer)
        self.trainer.descent.total_steps = num_steps  # of this run, which may go on from a shorter one's state
        with self._stepping():
            return self._made(self.trainer.step(examples, settings))

    def reinforce(
        self,
        groups: Sequence[ScoredGroup],
        *,
        step: int,
        num_steps: int,
        temperature: float = 1.0,
        max_tokens: int = 0,
        changes: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Make version `step` out of `groups`; see `RlTrainer.step`, and `supervise` for the rest."""
        settings = changed(self._settings, changes or {})
        if not isinstance(self.trainer, RlTrainer):
            self.trainer = self._fresh("rl", num_steps)
            assert isinstance(self.trainer, RlTrainer)
        self.trainer.descent.total_steps = num_steps
        with self._stepping():
            return self._made(
                self.trainer.step(
                    groups, step=step, temperature=temperature, settings=settings, longest_completion=max_tokens
                )
            )

    def prefer(
        self,
        pairs: Sequence[PreferencePair],
        *,
        objective: Literal["dpo", "reward_model"],
        step: int,
        num_steps: int,
        changes: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Make version `step` out of `pairs`; see `DpoTrainer.step`, `RewardModelTrainer.step`, and `supervise`."""
        settings = changed(self._settings, changes or {})
        if not isinstance(self.trainer, DpoTrainer | RewardModelTrainer):
            self.trainer = self._fresh(objective, num_steps)
            assert isinstance(self.trainer, DpoTrainer | RewardModelTrainer)
        self.trainer.descent.total_steps = num_steps
        with self._stepping():
            return self._made(self.trainer.step(pairs, step=step, settings=settings))

    def check_whole(self) -> None:
        """See that the weights are a version. Raises StepBrokenError when a step broke off and left others."""
        if self._broken is not None:
            raise StepBrokenError(
                f"the weights are no version since a step broke off ({self._broken}): "
                "go on from the newest state in a fresh process"
            ) from self._broken

    def take_state(self, version: int, *, run: str = "", metrics: Mapping[str, float] | None = None) -> StateSnapshot:
        """Take the state of this moment, as `version`: a copy in memory, which holds until the next one is taken.

        Args:
            version: of the weights.
            run: whose state it is.
            metrics: what is known of that version, beside what its step measured.

        Raises:
            StepBrokenError: the weights are no version.
        """
        self.check_whole()
        trainer, progress = self.trainer, None
        tensors = in_section(WEIGHTS, self.tensors)
        if trainer is not None:
            reference = trainer.reference if isinstance(trainer, RlTrainer | DpoTrainer) else None
            progress = TrainerState(
                kind=_KINDS[type(trainer)],
                num_steps=trainer.descent.num_steps,
                total_steps=trainer.descent.total_steps,
                begun_at=-1 if reference is None else reference.version,
            )
            tensors |= in_section(TRAINER, trainer.descent.state_tensors())
            # The initial model can be loaded again.
            if reference is not None and reference.version > 0:
                tensors |= in_section(REFERENCE, reference.tensors)
        told = StateMetadata(
            run=run,
            version=version,
            next_prompt=self.next_prompt,
            trainer=progress,
            metrics={**self.metrics, **(metrics or {})},
        )
        return take_state(told, tensors, self.model.device, self._room)

    def resume(self, saved: SavedState, *, next_kind: TrainerKind | None = None) -> int:
        """Take up what was saved. Returns its version.

        Args:
            saved: the state.
            next_kind: what the next step learns from, where the state is of another run. The trainer of another kind
                is then left where it is: no step will need it, and its settings may be others in this run.

        Raises:
            ConfigError: the state is of another model, or of another optimizer.
        """
        saved.restore(WEIGHTS, self.tensors)
        self.next_prompt, self.metrics = saved.state.next_prompt, saved.state.metrics
        trainer = saved.state.trainer
        if trainer is not None and next_kind in (None, trainer.kind):
            self._resume_trainer(saved, trainer)
        elif trainer is not None:
            log.info("the optimizer of the state is not taken up", of=trainer.kind, next_step=next_kind)
        saved.restore_random(self.model.device)
        return saved.state.version

    @property
    def asleep(self) -> bool:
        """Say whether others have the devices."""
        return self._parking.is_parked

    def sleep(self) -> int:
        """Take all that stays between two steps off the devices. Returns how many bytes that frees there."""
        held = [*self.model.parameters(), *self.model.buffers()]
        if self.trainer is not None:
            self.trainer.descent.clear()
            held += self.trainer.descent.state_tensors().values()
            if isinstance(self.trainer, RlTrainer | DpoTrainer):
                held += self.trainer.reference.tensors.values()
        return self._parking.park(held)

    def wake(self) -> None:
        """Take the devices back; everything is as it was, bit for bit."""
        self._parking.bring_back()

    def exported(self, *, merged: bool = False) -> dict[str, Tensor]:
        """Return a copy of what an export holds, in memory; it holds until the next copy is taken.

        Of a model with adapters that is the adapters, or, with `merged`, the weights of a model without any.

        Raises:
            StepBrokenError: the weights are no version.
        """
        self.check_whole()
        copies = self._room.take(in_section(WEIGHTS, export_model(self.model) if merged else self.tensors))
        return {name.removeprefix(WEIGHTS): tensor for name, tensor in copies.items()}

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Let a step be made, and remember when it breaks off with the weights changed."""
        self.check_whole()
        try:
            yield
        except StepBrokenError as error:
            self._broken = error
            raise

    def _made(self, metrics: dict[str, float]) -> dict[str, float]:
        self.metrics = metrics
        return dict(metrics)

    def _resume_trainer(self, saved: SavedState, progress: TrainerState) -> None:
        self.trainer = trainer = self._fresh(progress.kind, progress.total_steps)
        if isinstance(trainer, RlTrainer | DpoTrainer):
            trainer.reference.version = progress.begun_at
            if saved.has(REFERENCE):
                saved.restore(REFERENCE, trainer.reference.keep())
        self.trainer.descent.num_steps = progress.num_steps
        self.trainer.descent.load_state_tensors(saved.read(TRAINER))

    def _fresh(self, kind: TrainerKind, num_steps: int) -> Trainer:
        """Return a new trainer, in place of the one in force: there may be no room for the optimizers of both."""
        self.trainer = None
        model, settings, clock = self.model, self._settings, self.clock
        match kind:
            case "sft":
                return SftTrainer(model, settings, total_steps=num_steps, clock=clock)
            case "dpo":
                return DpoTrainer(model, settings, total_steps=num_steps, clock=clock, initial=self._reload)
            case "reward_model":
                return RewardModelTrainer(model, settings, total_steps=num_steps, clock=clock)
            case "rl":
                return RlTrainer(model, settings, total_steps=num_steps, clock=clock, initial=self._reload)

    def _reload(self) -> PreTrainedModel:
        """Load version 0 once more. Whatever that draws, the steps go on as if it had drawn nothing."""
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return self._load().requires_grad_(False)
