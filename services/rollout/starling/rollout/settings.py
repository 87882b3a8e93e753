"""The rollout's settings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from starling.common.settings import ModelSettings, Section, ServiceSettings, WeightsSettings


class RolloutSettings(Section):
    """How one replica generates and adopts."""

    num_slots: int = Field(default=16, ge=1)
    """Groups that the controller may give this replica at a time."""
    max_rows: int = Field(default=128, ge=1)
    """Most sequences that are generated together."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt with its completion; without it, what the model declares."""
    exclusive: bool = False
    """Generate each group in a batch of its own: slower, but batching cannot change a bit."""
    pull_timeout_s: float = Field(default=60.0, gt=0)
    """How long the pull of one version may take before it fails and the old version stays."""
    version_timeout_s: float = Field(default=600.0, gt=0)
    """How long a group may wait here for weights that may sample it, before it goes back to the controller."""
    transport: Literal["ucx", "tcp", "local", "nccl", "gloo", "nixl"] = "ucx"
    """How weights travel from this replica to others that adopt from it; as `policy.transport`."""


class RolloutProcess(ServiceSettings):
    """All settings of a rollout process."""

    model: ModelSettings = ModelSettings()
    weights: WeightsSettings = WeightsSettings()
    rollout: RolloutSettings = RolloutSettings()
