"""Training state of a policy that trains a diffusion model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from starling.algo.diffusion.folder import PipelineFolder, pipeline_sampler
from starling.algo.diffusion.models import condition_widths, takes_frames
from starling.algo.diffusion.settings import SamplerSettings
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.common.wire.messages import DenoisingForm, ModelLimits
from starling.policy.settings.policy import PolicySettings, changed
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.diffusion.groups import check_alike, read_group
from starling.policy.train.diffusion.nft import NftTrainer
from starling.policy.train.diffusion.trainer import DiffusionTrainer
from starling.policy.train.learner import Learner, TrainerLike


class DiffusionLearner(Learner):
    """Makes the weight versions of a diffusion transformer; see `Learner`."""

    def __init__(
        self,
        load: Callable[[], Any],
        settings: PolicySettings,
        folder: PipelineFolder,
        diffusion: SamplerSettings,
        *,
        base_of: Callable[[Iterable[tuple[str, Tensor]]], str] = lambda _: "",
    ) -> None:
        """Start with version 0.

        Args:
            load: loads that version, see `Learner`.
            settings: defaults of every step.
            folder: of the pipeline.
            diffusion: of its samples and trajectories, those of the rollouts.
            base_of: see `Learner`.

        Raises:
            ConfigError: the model cannot be loaded, or there is no such sampler.
        """
        self._sampler = pipeline_sampler(folder, diffusion)
        check_method(settings, diffusion)
        self._text_length = folder.text_length
        self._shape = folder.latent_shape(diffusion.height, diffusion.width, diffusion.num_frames)
        super().__init__(load, settings, base_of=base_of)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def limits(self) -> ModelLimits:
        """What the model can be trained on: these trajectories, behind a prompt of one token."""
        sampler, (text_width, pooled_width) = self._sampler, condition_widths(self.model)
        form = DenoisingForm(
            first_step=sampler.recorded.start,
            num_steps=len(sampler.recorded),
            num_states=len(sampler.actions) + 1 if sampler.actions else 0,
            dtype="float16" if sampler.stored == "float16" else "float32",
            latents=self._shape,
            text_length=self._text_length,
            text_width=text_width,
            pooled_width=pooled_width,
            takes_frames=takes_frames(self.model),
        )
        return ModelLimits(vocabulary_size=sampler.num_steps, longest=1 + sampler.num_steps, denoising=form)

    @property
    def batch_digest(self) -> int:
        """Digest of the groups of the last step; 0 if that was none of reinforcement learning."""
        return self.trainer.batch_digest if isinstance(self.trainer, DiffusionTrainer | NftTrainer) else 0

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
        """Make version `step` from `groups`; see `Learner.reinforce`. There is no temperature and no token limit."""
        del temperature, max_tokens
        settings = changed(self._settings, changes or {})
        if self.trainer is None:
            self.trainer = self._fresh("rl", num_steps)
        trainer = self.trainer
        assert isinstance(trainer, DiffusionTrainer | NftTrainer), "a diffusion model has no other steps"
        device = self.model.device
        with self._stepping(trainer, num_steps):
            read = [read_group(group, group.denoising, self._text_length, device) for group in groups]
            check_alike(read)
            self.metrics = trainer.step(read, step=step, settings=settings)
        return dict(self.metrics)

    def _fresh(self, kind: TrainerKind, num_steps: int) -> TrainerLike:
        """Return a new trainer, after dropping the active one. Raises ConfigError for steps of examples."""
        if kind != "rl":
            raise ConfigError(NO_EXAMPLES)
        self.trainer = None
        trainer = NftTrainer if self._settings.diffusion.method == "nft" else DiffusionTrainer
        return trainer(
            self.model,
            self._sampler,
            self._settings,
            total_steps=num_steps,
            clock=self.clock,
            initial=self._reload,
        )


NO_EXAMPLES = "a diffusion model is trained by run.kind = 'rl' only: remove [sft] and [preference]"


def check_method(settings: PolicySettings, diffusion: SamplerSettings) -> None:
    """Refuse settings that do not fit the trajectories. Raises ConfigError."""
    has_actions = diffusion.dynamics != "ode" and diffusion.noise_level > 0.0
    if settings.diffusion.method == "policy_gradient" and not has_actions:
        raise ConfigError(
            f"diffusion.dynamics = {diffusion.dynamics!r} with diffusion.noise_level = {diffusion.noise_level:g} adds "
            "no noise, so that no step has a density: set dynamics = 'sde', or policy.diffusion.method = 'nft'"
        )
    if settings.diffusion.data_coefficient:
        raise ConfigError(
            f"policy.diffusion.data_coefficient = {settings.diffusion.data_coefficient:g} needs samples of a dataset, "
            "and this run has none: set it to 0"
        )
    if settings.parallel.num_ranks > 1 or settings.parallel.has_mesh:
        raise ConfigError(
            "a diffusion model is trained by a single rank: set the sizes of policy.parallel to 1, and elastic to false"
        )
