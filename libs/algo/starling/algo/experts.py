"""Experts of a mixture: modules with the interface of transformers, whose arguments are the routers' choices."""

from __future__ import annotations

import torch


def find_experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the experts of each mixture of `model`, by name of the module.

    Their arguments are hidden states [T, H], the experts of each token [T, K], and the weights of those. Every
    parameter has one row for each expert.
    """
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def mixture_name(name: str) -> str:
    """Return the name of the module that has the experts called `name`, which adapters may have wrapped, and their
    router."""
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return name.rpartition(".")[0]


def num_experts(experts: torch.nn.Module) -> int:
    """Return the number of experts of a mixture, those on other ranks included."""
    return int(next(experts.parameters()).shape[0])
