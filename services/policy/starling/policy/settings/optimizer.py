"""The optimizer: its kind, its schedule, what differs between parameters, and the bound on the gradient."""

from __future__ import annotations

import math
import re
from typing import Literal, Self

from pydantic import Field, model_validator

from starling.common.settings import SettingsSection


class OptimizerSettings(SettingsSection):
    """How gradients become weights."""

    kind: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """`adamw`; `adamw_8bit`, the same with averages of a byte instead of four (torchao); or `muon` for the matrices of
    the hidden layers, with AdamW for all else, at the learning rate and weight decay that suit AdamW."""
    learning_rate: float = Field(default=1e-6, gt=0.0, allow_inf_nan=False)
    """Highest learning rate, reached at the end of the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises in equal parts; 0 starts at the highest."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """What the learning rate does after the warm-up: stay; fall until the last step, evenly or along half a wave; or
    stay, and fall over the last `decay_steps` (`wsd`)."""
    decay_steps: int = Field(default=0, ge=0)
    """Last steps, over which `wsd` lets the learning rate fall."""
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """How `wsd` falls: evenly, or with one minus the square root of the way."""
    final_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the highest learning rate at which every fall ends, one step after the last."""
    rates: dict[str, float] = Field(default_factory=dict)
    """Factors on the learning rate, by regular expressions that are searched for in the names of the model's
    parameters (Hugging Face's); the first that is found counts, and where none is, the factor is 1."""
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Decoupled weight decay of the matrices; vectors (norms, biases) are never decayed."""
    no_decay: tuple[str, ...] = ()
    """Regular expressions for the names of further parameters that are not decayed."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's averages of the gradient and of its square."""
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    """Added to AdamW's denominator."""
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay rate of Muon's average of the gradient."""
    ema_decay: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay rate, per update, of an average of the weights that is kept beside them; 0 keeps none."""
    max_grad_norm: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    """Largest Euclidean norm of the whole gradient, which is scaled down to it; 0 leaves the gradient alone."""

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
                'leave it out, or take schedule = "wsd"'
            )
        return self

    @model_validator(mode="after")
    def _patterns_are_regular_expressions(self) -> Self:
        for name, patterns in (("rates", self.rates), ("no_decay", self.no_decay)):
            for pattern in patterns:
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name} has {pattern!r}, which is no regular expression: {error}") from None
        return self

    @model_validator(mode="after")
    def _factors_in_range(self) -> Self:
        for pattern, factor in self.rates.items():
            if not (factor > 0.0 and math.isfinite(factor)):
                raise ValueError(f"rates has {factor:g} for {pattern!r}: a factor must be finite and more than 0")
        return self
