"""Where states and checkpoints are kept, and which of them stay."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from starling.common.settings import SettingsSection


class SavingSettings(SettingsSection):
    """States to continue from, and exports of the model. See `docs/how-to/checkpoints.md`."""

    folder: str = ""
    """Where they go: a folder, or a URL that fsspec knows, such as ``s3://bucket/prefix``; in it, each attempt has a
    folder named by its id. Empty for the run's folder."""
    storage_options: dict[str, Any] = Field(default_factory=dict)
    """What fsspec wants to know for `folder` and `begin_from`, such as ``endpoint_url``. Keep secrets out of it: it is
    written to the run's folder."""
    begin_from: str = ""
    """A state of another run that this one continues from; `starling run --from` sets it."""
    begin_kind: Literal["sft", "rl", "dpo", "reward_model"] | None = None
    """What the first step after that state learns from; `starling run --from` sets it. The state's optimizer is taken
    up if it is of that kind; unset, always."""
    max_keep: int = Field(default=2, ge=2)
    """States that stay, the newest ones: at least two, for one may be found damaged."""
    best: str = ""
    """A state that stays besides: the best by a metric, as ``reward_mean`` or ``eval/reward_mean``; with a minus
    before it, as ``-loss``, the one with the least."""
    hf_every: int = Field(default=0, ge=0)
    """Steps between two exports in Hugging Face form, besides the one at the end; 0 for none."""
    shard_mb: int = Field(default=5000, ge=1)
    """Most MiB of one file of such an export."""
    patience_s: float = Field(default=1800.0, gt=0.0)
    """How long one save may hold up the next one, which fails then."""

    @model_validator(mode="after")
    def _best_is_named(self) -> Self:
        if self.best and not self.best.lstrip("+-"):
            raise ValueError(f"best = {self.best!r} names no metric; write for example '-loss'")
        return self
