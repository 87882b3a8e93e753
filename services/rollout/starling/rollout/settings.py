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
    """Most tokens of a prompt with its completion; without it, what the model can be trained on: its context or, where
    layers attend to a window only, that."""
    max_media_bytes: int = Field(default=256 << 20, ge=1, le=900_000_000)
    """Most bytes of a prompt's images and videos as the model takes them, some 25 MB for a megapixel, and of the same
    decoded, 3 MB for a megapixel of each as it is. They travel and are journaled with the completions; more than this
    bound the journal cannot take."""
    media_timeout_s: float = Field(default=60.0, gt=0)
    """How long a prompt's images and videos may take, once they are being read, before another rollout is asked."""
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


class TeacherSettings(Section):
    """How a teacher scores the tokens of others."""

    path: str = ""
    """A Hugging Face model folder, with weights. Its tokenizer must be that of the model that is trained."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Element type of its weights; log-probabilities are taken in float32."""
    device: str = "auto"
    """Where to compute: `cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    top_k: int = Field(default=0, ge=0)
    """How many of its likeliest tokens it tells at each place; 0 for none, only the log-probability of each sampled
    token."""
    num_slots: int = Field(default=4, ge=1)
    """Groups that the controller may give this teacher at a time; it works on one, and has the others ready."""
    tokens_per_forward: int = Field(default=8192, ge=1)
    """Most tokens, padding included, of one forward pass; a completion that is longer by itself has its own."""


class TeacherProcess(ServiceSettings):
    """All settings of a teacher process."""

    model: ModelSettings = ModelSettings()
    teacher: TeacherSettings = TeacherSettings()
