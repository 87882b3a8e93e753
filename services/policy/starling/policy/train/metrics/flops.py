"""Model FLOPs of a step and their share of the device's peak, MFU (PaLM, arXiv:2204.02311, appendix B).

    step = 6 * (N * tokens + head * predicted) + 12 * L * H * Q * sum over segments of length * reach

N are the weights that a token is multiplied with: all matrices but the input embedding, and of a mixture of experts
only as many experts as a token is routed to; a multiplication and an addition for each of them, once forward and twice
backward. A weight that is not trained needs no gradient: it counts 4 and not 6. The output layer counts by predicted
tokens, since only those reach it. L layers with H heads of size Q score and weight the pairs of a segment's tokens with
themselves and with its ancestors'. A segment's reach is its length plus twice the tokens of its ancestors: of a
sequence that shares nothing this counts the whole square, like PaLM, although half of it is masked, and the segments of
any sequence add up to its square. Layers with a window count at most the window, layers of linear attention nothing.

These are FLOPs of the *model*: padding, recomputation of activations, and towers for images do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_VISION: Final = ("visual.", "vision_")
_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")

PEAK_TFLOPS: Final[tuple[tuple[str, float], ...]] = (
    ("GB200", 2500.0),
    ("GH200", 989.4),
    ("B200", 2250.0),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A10", 125.0),
    ("A10G", 70.0),
    ("A40", 149.7),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)
"""Dense bfloat16 TFLOP/s of one device by words of its name, from the vendors' data sheets (without sparsity). The
first entry whose words are all in the name applies."""


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a model that determine its FLOPs."""

    body: float
    """Weights below the output layer that each token is multiplied with."""
    trained_body: float
    """Those of them that are trained."""
    head: float
    """Weights of the output layer."""
    trained_head: float
    attention: float
    """L * H * Q of the layers with full attention."""
    windowed: float = 0.0
    """L * H * Q of the layers that attend to `window` tokens."""
    window: int = 0


def model_cost(model: PreTrainedModel) -> ModelCost:
    """Count the weights and heads of a causal language model."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    body = trained = 0.0
    for name, parameter in model.named_parameters():
        looked_up = id(parameter) in embeddings or parameter is head_weight
        if parameter.dim() < 2 or looked_up or name.endswith("bias") or any(part in name for part in _VISION):
            continue
        weights = parameter.numel() * (_active_share(config) if ".experts." in name else 1.0)
        body += weights
        trained += weights * parameter.requires_grad
    head_size = float(head_weight.numel()) if head_weight is not None else 0.0
    trained_head = head_size if head_weight is not None and head_weight.requires_grad else 0.0
    return ModelCost(body, trained, head_size, trained_head, *_attention(config))


def step_flops(cost: ModelCost, lengths: Sequence[int], reach: Sequence[int], num_predicted: int) -> float:
    """Return the FLOPs of one forward and backward pass.

    Args:
        cost: of the model.
        lengths: tokens of each segment.
        reach: of each segment, see `starling.algo.attention.forest.Forest.reach`; a sequence that shares nothing is
            one segment, and its reach its length.
        num_predicted: trained tokens.
    """
    tokens = float(sum(lengths))
    forward = cost.body * tokens + cost.head * num_predicted
    weights = cost.trained_body * tokens + cost.trained_head * num_predicted
    pairs = sum(float(length) * keys for length, keys in zip(lengths, reach, strict=True))
    seen = sum(float(length) * min(keys, cost.window) for length, keys in zip(lengths, reach, strict=True))
    return 4.0 * forward + 2.0 * weights + 12.0 * (cost.attention * pairs + cost.windowed * seen)


def peak_tflops(device_name: str) -> float | None:
    """Return the dense bfloat16 TFLOP/s of a device by its name; None for an unknown one, such as a CPU."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    return next((peak for name, peak in PEAK_TFLOPS if set(name.split()) <= words), None)


def peak_of(device: torch.device, configured: float | None = None) -> float | None:
    """Return the peak TFLOP/s for the utilisation: `configured` if set, else that of `device` if it is known."""
    if configured is not None or device.type != "cuda":
        return configured
    return peak_tflops(torch.cuda.get_device_name(device))


def utilisation(flops: float, seconds: float, peak: float | None) -> dict[str, float]:
    """Return ``tflops`` (model TFLOP/s over `seconds`), and ``mfu`` if the `peak` (TFLOP/s) is known."""
    if seconds <= 0.0:
        return {}
    tflops = flops / seconds / 1e12
    return {"tflops": tflops} | ({"mfu": tflops / peak} if peak else {})


def _active_share(config: Any) -> float:
    """Return the share of the experts that one token is routed to."""
    num_experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), 1)
    return float(getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts


def _attention(config: Any) -> tuple[float, float, int]:
    """Return L * H * Q of layers with full attention, that of layers with a window, and the window."""
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:  # recurrent layers only
        return 0.0, 0.0, 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    qk_dim = getattr(config, "qk_head_dim", None) or head_dim
    v_dim = getattr(config, "v_head_dim", None) or head_dim
    width = heads * (qk_dim + v_dim) / 2
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None) or 0
    windowed = sum(kind == "sliding_attention" for kind in kinds) if window else 0
    full = sum(kind != "linear_attention" for kind in kinds) - windowed
    return full * width, windowed * width, window
