"""All that a step changes: the model, and the trainer of the kind of steps that is in force."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from starling.policy.settings import PolicySettings, changed
from starling.policy.train.groups import Example, Group
from starling.policy.train.model import frozen_copy, tensors
from starling.policy.train.sft import SftTrainer
from starling.policy.train.state import SavedState, Trained, TrainerState, newest_state, save_state
from starling.policy.train.step import GrpoTrainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


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
        self.tensors = tensors(self.model)
        """What makes up a version; changed in place by every step."""
        self.trainer: SftTrainer | GrpoTrainer | None = None

    def supervise(
        self, examples: Sequence[Example], *, num_steps: int, changes: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Make the next version out of `examples`; see `SftTrainer.step`.

        Args:
            examples: those of the step.
            num_steps: supervised steps in the whole run.
            changes: what this step does otherwise than the settings say, by key of the recipe.
        """
        settings = changed(self._settings, changes or {})
        if not isinstance(self.trainer, SftTrainer):
            self.trainer = self._sft(num_steps)
        return self.trainer.step(examples, settings)

    def reinforce(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        num_steps: int,
        temperature: float = 1.0,
        changes: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Make version `step` out of `groups`; see `GrpoTrainer.step`, and `supervise` for the rest."""
        settings = changed(self._settings, changes or {})
        if not isinstance(self.trainer, GrpoTrainer):
            self.trainer = self._grpo(num_steps)
        return self.trainer.step(groups, step=step, temperature=temperature, settings=settings)

    def save(self, folder: Path, version: int) -> Path:
        """Write all of this, as `version`, below `folder`; see `save_state`."""
        trainer, trained = self.trainer, None
        if trainer is not None:
            begun_at, reference = -1, None
            if isinstance(trainer, GrpoTrainer):
                begun_at = trainer.begun_at
                reference = trainer.reference if begun_at > 0 else None
            descent = trainer.descent
            progress = TrainerState(
                kind="sft" if isinstance(trainer, SftTrainer) else "grpo",
                num_steps=descent.num_steps,
                total_steps=descent.total_steps,
                begun_at=begun_at,
            )
            trained = Trained(progress, descent.optimizer, reference)
        return save_state(folder, version, self.model, trained)

    def resume(self, folder: Path) -> int:
        """Take up the newest state below `folder`. Returns its version, 0 when there is none.

        Raises:
            ConfigError: the state is of another model.
        """
        saved = newest_state(folder)
        if saved is None:
            return 0
        saved.restore_weights(self.model)
        if saved.state.trainer is not None:
            self._resume_trainer(saved, saved.state.trainer)
        saved.restore_random(self.model.device)
        return saved.state.version

    def _resume_trainer(self, saved: SavedState, progress: TrainerState) -> None:
        if progress.kind == "sft":
            self.trainer = self._sft(progress.total_steps)
        else:
            self.trainer = grpo = self._grpo(progress.total_steps)
            grpo.begun_at = progress.begun_at
            if saved.has_reference:
                grpo.reference = frozen_copy(self.model)
                saved.restore_reference(grpo.reference)
        self.trainer.descent.num_steps = progress.num_steps
        saved.restore_optimizer(self.trainer.descent.optimizer, self.model)

    def _sft(self, num_steps: int) -> SftTrainer:
        return SftTrainer(self.model, self._settings, total_steps=num_steps)

    def _grpo(self, num_steps: int) -> GrpoTrainer:
        return GrpoTrainer(self.model, self._settings, total_steps=num_steps, initial=self._reload)

    def _reload(self) -> PreTrainedModel:
        """Load version 0 once more. Whatever that draws, the steps go on as if it had drawn nothing."""
        device = self.model.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            return self._load().requires_grad_(False)
