"""Settings of the samples that a diffusion model makes, shared by what draws them and what trains on them."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COEFFICIENT, MAX_COUNT
from starling.common.settings import SettingsSection

Dynamics = Literal["sde", "dance", "cps", "ode"]
MAX_PIXELS: Final = 1 << 14
"""Largest height and width."""


class SamplerSettings(SettingsSection):
    """Samples of a diffusion model, and the denoising trajectories that end in them. With this section `model.path` is
    the folder of a pipeline of diffusers."""

    dynamics: Dynamics = "sde"
    """Steps that add noise: `sde` the reverse SDE (Flow-GRPO, arXiv:2505.05470), `dance` that of DanceGRPO
    (arXiv:2505.07818), `cps` with less noise (Flow-CPS, arXiv:2509.05952). `ode`: none, for DiffusionNFT."""
    num_steps: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Steps of a trajectory."""
    noise_level: float = Field(default=0.7, ge=0.0, le=MAX_COEFFICIENT)
    """How much noise the steps add."""
    first_noisy_step: int = Field(default=0, ge=0, le=MAX_COUNT)
    """First step that adds noise; those before it follow the probability flow."""
    num_noisy_steps: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Steps that add noise, from `first_noisy_step` on (Flow-GRPO-Fast, MixGRPO); 0 for all further ones."""
    shift: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Shift of the noise levels towards noise; 0 for that of the pipeline's scheduler."""
    height: int = Field(default=480, ge=1, le=MAX_PIXELS)
    """Height in pixels."""
    width: int = Field(default=832, ge=1, le=MAX_PIXELS)
    """Width in pixels."""
    num_frames: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Frames; 1 for an image."""
    guidance: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Scale of classifier-free guidance; 0 for none. It takes a second pass of the model for each step, and policies
    train on the density without it."""
    negative_prompt: str = ""
    """What guidance leads away from."""
    same_start: bool = False
    """All trajectories of a group begin with the same noise."""
    stored: Literal["float32", "float16"] = "float32"
    """Element type of the states of trajectories."""
    text_length: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Tokens that the embeddings of a prompt are padded to; 0 for those that models of this family are trained with."""
    text_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of the pipeline's text encoders."""
    text_cache: str = ""
    """Folder of a cache of prompts' embeddings, which runs can share; empty for none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dynamics == "cps" and self.noise_level > 1.0:
            raise ValueError(
                f"noise_level = {self.noise_level:g} with dynamics = 'cps', whose levels are at most 1; lower it"
            )
        if self.first_noisy_step + self.num_noisy_steps > self.num_steps:
            raise ValueError(
                f"first_noisy_step = {self.first_noisy_step} and num_noisy_steps = {self.num_noisy_steps} end after "
                f"num_steps = {self.num_steps}; lower one of them"
            )
        return self

    @property
    def window(self) -> range | None:
        """The steps that may add noise; None for all."""
        if not self.first_noisy_step and not self.num_noisy_steps:
            return None
        end = self.first_noisy_step + self.num_noisy_steps if self.num_noisy_steps else self.num_steps
        return range(self.first_noisy_step, end)
