"""Liger's fused kernels, for who has installed them and has a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module


def use_liger(model: PreTrainedModel) -> None:
    """Have `model` compute its norms, rotations and gated layers with Liger's kernels, in place.

    Liger's fused losses are left out: they would take the place of the model's forward pass, and Starling has losses of
    its own.

    Raises:
        ConfigError: `model` is not on a CUDA device, Liger is not installed, or has nothing for such a model.
    """
    if model.device.type != "cuda":
        raise ConfigError(
            f"policy.liger = true needs a CUDA device, and the model is on {model.device}: "
            "remove it, or set model.device"
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance
    except ImportError:
        raise ConfigError("policy.liger = true needs Liger: install starling-policy[liger]") from None
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ConfigError(f"policy.liger = true, and Liger has no kernels for a {kind}: remove it")
    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
