"""What only the model shows to be wrong in the settings: said before the first step."""

from __future__ import annotations

from typing import Literal

import torch

from starling.policy.settings.policy import PolicySettings
from starling.policy.train.optimizer import check_optimizer


def check(model: torch.nn.Module, settings: PolicySettings, kind: Literal["rl", "sft", "dpo", "reward_model"]) -> None:
    """Find out whether the steps of a run of `kind` can be made of `model`. Changes nothing.

    Raises:
        ConfigError: an optimizer's pattern matches no trainable parameter, or what its kind needs is not installed.
    """
    if kind == "rl":
        check_optimizer(model, settings.optimizer, "policy.optimizer")
    # Supervised steps may come before reinforcement learning; their defaults hold for every model.
    if kind in ("rl", "sft"):
        check_optimizer(model, settings.sft.optimizer, "policy.sft.optimizer")
    elif kind == "dpo":
        check_optimizer(model, settings.dpo.optimizer, "policy.dpo.optimizer")
    else:
        check_optimizer(model, settings.reward_model.optimizer, "policy.reward_model.optimizer")
