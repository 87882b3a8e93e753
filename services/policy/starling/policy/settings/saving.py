"""Saving settings: the location of states and checkpoints, and which of them to keep."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COUNT, MAX_MIB, MAX_STEPS
from starling.common.settings import Seconds, SettingsSection


class SavingSettings(SettingsSection):
    """States to resume from, and exports of the model. See `docs/how-to/checkpoints.md`."""

    folder: str = ""
    """Location: a folder, or a URL supported by fsspec, such as ``s3://bucket/prefix``; each attempt has a subfolder
    named by its id. Empty for the run's folder."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of fsspec for `folder`, `begin_from` and `policy.weights_from`, such as ``endpoint_url``. Do not put
    secrets here: they are written to the run's folder."""
    begin_from: str = ""
    """State of another run to start from; set by `starling run --from`."""
    begin_kind: Literal["sft", "rl", "dpo", "reward_model"] | None = None
    """Kind of the first step after that state; set by `starling run --from`. The state's optimizer is restored if it is
    of that kind; unset, always."""
    max_keep: int = Field(default=2, ge=2, le=MAX_COUNT)
    """Number of newest states to keep: at least two, in case one is damaged."""
    best: str = ""
    """Additional state to keep: the best by a metric, such as ``reward_mean`` or ``eval/reward_mean``; with a minus
    before it, such as ``-loss``, the lowest."""
    hf_every: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps between exports in Hugging Face format, in addition to the one at the end; 0 for none."""
    shard_mb: int = Field(default=5000, ge=1, le=MAX_MIB)
    """Maximum size of one file of an export, in MiB."""
    patience_s: Seconds = 1800.0
    """Time that one save may delay the next one before that fails; also that the end of the run waits for a save."""
    leave_s: Seconds = 20.0
    """Time that a policy which got SIGTERM waits for what it writes; 5 s later the process ends. Raise it with the time
    that the scheduler gives, such as ``terminationGracePeriodSeconds`` of Kubernetes, which is 30 s by default."""

    @model_validator(mode="after")
    def _best_is_named(self) -> Self:
        if self.best and not self.best.lstrip("+-"):
            raise ValueError(f"best = {self.best!r} names no metric; use for example '-loss'")
        return self
