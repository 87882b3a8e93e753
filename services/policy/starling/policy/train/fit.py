"""Check of a policy's settings against its model, by the names and shapes of its parameters alone.

A policy checks the model that it has loaded, and `starling run --dry-run` one without memory (`load.outline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starling.policy.train.loss.balance import check_biases
from starling.policy.train.loss.router import find_routers
from starling.policy.train.optim.optimizer import check_optimizers
from starling.policy.train.precision.layers import check_precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from starling.common.ids import TrainerKind
    from starling.policy.settings.policy import PolicySettings


def check_fit(
    model: PreTrainedModel, settings: PolicySettings, trainer: TrainerKind, names: Sequence[str] | None = None
) -> None:
    """Check the settings of a run that ends with steps of `trainer`, before its first one. Changes nothing.

    `names`: of all trainable parameters, where `model` is a part of one on several ranks.

    Raises:
        ConfigError: `model` has no routers for the loss or bias that `settings` ask for, no parameters for a pattern
            of an optimizer, sizes that the ranks cannot divide, a setting that they do not have, or no layer that
            computes in low precision.
    """
    if settings.router_aux_coefficient:
        find_routers(model)
    if settings.router_bias_rate:
        check_biases(model)
    # A model with memory has been checked when it was whole, by `use_precision` and `parallelise`.
    if model.device.type == "meta":
        if settings.parallel.has_mesh:
            from starling.policy.train.parallel.available import check_available  # torch's distributed tensors

            check_available(model, settings)
        if settings.precision.kind != "none":
            check_precision(model, settings)
    check_optimizers(model, settings, trainer, names)
