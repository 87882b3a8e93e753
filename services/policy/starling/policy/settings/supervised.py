"""Settings of steps on examples: supervised fine-tuning, preference pairs, reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starling.common.ranges import MAX_COEFFICIENT
from starling.common.settings import SettingsSection
from starling.policy.settings.optimizer import OptimizerSettings


class SftStepSettings(SettingsSection):
    """Supervised steps, with their own optimizer."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """Optimizer of supervised steps; reinforcement learning starts with a fresh one."""


class DpoSettings(SettingsSection):
    """Training on pairs of a chosen and a rejected response (`run.kind = "dpo"`)."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-6)
    """Optimizer of DPO steps."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO (arXiv:2305.18290) or IPO (arXiv:2310.12036)."""
    beta: float = Field(default=0.1, gt=0.0, le=MAX_COEFFICIENT)
    """Strength of the pull towards the reference."""
    use_reference: bool = True
    """Compare with the initial model; without it the loss has no anchor, and takes less memory."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Assumed share of pairs with swapped labels (`sigmoid` only)."""


class RewardModelSettings(SettingsSection):
    """Training of a model that scores responses, on the same pairs (`run.kind = "reward_model"`)."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """Optimizer of reward-model steps."""
    center_coefficient: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Weight of the term that keeps the mean of a pair's two scores at 0."""
