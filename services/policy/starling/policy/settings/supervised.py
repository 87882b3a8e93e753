"""Steps that learn from examples: supervised fine-tuning, preferences, reward models."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starling.common.settings import SettingsSection
from starling.policy.settings.optimizer import OptimizerSettings


class SftStepSettings(SettingsSection):
    """The supervised steps, with an optimizer of their own."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """The optimizer of the supervised steps; reinforcement learning starts with a fresh one."""


class DpoSettings(SettingsSection):
    """Learning from pairs of a chosen and a rejected response (`run.kind = "dpo"`)."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-6)
    """Its optimizer."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO (arXiv:2305.18290) or IPO (arXiv:2310.12036)."""
    beta: float = Field(default=0.1, gt=0.0, allow_inf_nan=False)
    """How strongly the reference holds."""
    use_reference: bool = True
    """Measure against the initial model; without it, against nothing (less memory, no anchor)."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of pairs that are taken to be labelled the wrong way round (`sigmoid` only)."""


class RewardModelSettings(SettingsSection):
    """Training a model that scores responses, from the same pairs (`run.kind = "reward_model"`)."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    """Its optimizer."""
    center_coefficient: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Weight of the term that keeps the mean of the two scores at 0."""
