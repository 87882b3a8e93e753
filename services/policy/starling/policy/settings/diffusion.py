"""Settings of training diffusion models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starling.common.ranges import MAX_COEFFICIENT, MAX_COUNT
from starling.common.settings import SettingsSection


class DiffusionSettings(SettingsSection):
    """Steps of reinforcement learning on denoising trajectories."""

    method: Literal["policy_gradient", "nft"] = "policy_gradient"
    """`policy_gradient`: the loss of `policy.algorithm` on the densities of trajectories' noisy steps (Flow-GRPO,
    arXiv:2505.05470). `nft`: DiffusionNFT (arXiv:2509.16117), on samples alone; take `diffusion.dynamics = "ode"`."""
    actions_per_microbatch: int = Field(default=8, ge=1, le=MAX_COUNT)
    """Steps of trajectories that are computed at a time; bounds the memory of activations."""
    divergence: Literal["mean", "velocity"] = "mean"
    """What `policy.algorithm.kl_coefficient` weighs: the divergence of each step's distribution from the reference's,
    by its mean, or the mean square between the velocities, the same for all steps."""
    ratio: Literal["plain", "normalised"] = "plain"
    """Importance ratios: of densities, or normalised to a mean of 1 and one spread at all noise levels (GRPO-Guard),
    which needs `policy.algorithm.old = "proximal"`."""
    data_coefficient: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the flow-matching loss on the dataset that is added to each update (DDRL); 0 for none."""
    levels_per_sample: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Noise levels at which each sample is trained by DiffusionNFT, of those of the sampler."""
    nft_beta: float = Field(default=1.0, gt=0.0, le=MAX_COEFFICIENT)
    """How far DiffusionNFT's positive and negative velocities are from those at the start of the step."""
    advantage_bound: float = Field(default=5.0, gt=0.0, le=MAX_COEFFICIENT)
    """Largest size of an advantage that DiffusionNFT tells from others."""
