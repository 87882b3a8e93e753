"""Optimizer settings: kind, learning-rate schedule, differences between parameters, gradient clipping."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COEFFICIENT, MAX_LEARNING_RATE, MAX_STEPS
from starling.common.settings import SettingsSection


class OptimizerSettings(SettingsSection):
    """Optimizer and learning-rate schedule."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw`; `adamw_8bit`, with moments of one byte instead of four (torchao); or `muon` for the matrices of hidden
    layers and AdamW for all other parameters, at a learning rate and weight decay suited to AdamW."""
    learning_rate: float = Field(default=1e-6, gt=0.0, le=MAX_LEARNING_RATE)
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps of linear warm-up; 0 starts at the peak."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up: constant; linear or cosine decay to the last step; or constant, then decay over
    the last `decay_steps` (`wsd`)."""
    decay_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Number of last steps over which `wsd` decays the learning rate."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """Shape of the decay of `wsd`: linear, or one minus the square root of the progress."""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the peak learning rate at which a decay ends, one step after the last."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Factors on the learning rate, by regular expressions searched for in the (Hugging Face) names of parameters; the
    first match counts, and without a match the factor is 1."""
    weight_decay: float = Field(default=0.0, ge=0.0, le=MAX_COEFFICIENT)
    """Decoupled weight decay of matrices; vectors (norms, biases) are never decayed."""
    no_decay: tuple[str, ...] = ()
    """Regular expressions for the names of further parameters without weight decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments: of the gradient, and of its square."""
    eps: float = Field(default=1e-8, gt=0.0, le=1.0)
    """Added to AdamW's denominator."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay rate of Muon's momentum."""
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay rate, per update, of an exponential moving average of the weights; 0 keeps none."""
    max_grad_norm: float = Field(default=1.0, ge=0.0, le=MAX_COEFFICIENT)
    """Maximum Euclidean norm of the whole gradient, which is clipped to it; 0 disables clipping."""

    @model_validator(mode="after")
    def _betas_in_range(self) -> Self:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas are {self.betas}: each must be at least 0 and less than 1")
        return self

    @model_validator(mode="after")
    def _decay_where_there_is_one(self) -> Self:
        if self.schedule == "wsd" and not self.decay_steps:
            raise ValueError('schedule = "wsd" with decay_steps = 0 would never decay: set decay_steps')
        if self.schedule != "wsd" and self.decay_steps:
            raise ValueError(
                f"decay_steps = {self.decay_steps} has no effect with schedule = {self.schedule!r}: "
                'remove it, or set schedule = "wsd"'
            )
        return self

    @model_validator(mode="after")
    def _patterns_are_regular_expressions(self) -> Self:
        for name, patterns in (("rates", self.rates), ("no_decay", self.no_decay)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name} has {pattern!r}, which is not a regular expression: {error}") from None
        return self

    @model_validator(mode="after")
    def _factors_in_range(self) -> Self:
        for pattern, factor in self.rates.items():
            if not 0.0 < factor <= MAX_COEFFICIENT:
                raise ValueError(
                    f"rates has {factor:g} for {pattern!r}: a factor must be more than 0 and at most "
                    f"{MAX_COEFFICIENT:g}"
                )
        return self
