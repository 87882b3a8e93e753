"""Steps with experts divided over ranks: every gradient is that of a single process, as is the load of the experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from small_steps import Array, check_mesh, make_model

from starling.algo.experts import find_experts
from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.loss.experts import load_metrics
from starling.policy.train.parallel.expert import check_experts, divide_experts
from starling.policy.train.parallel.mesh import Mesh
from starling.policy.train.parallel.weights.shards import local_part

TP_TOLERANCE = 4e-6
"""As in the steps with tensor parallelism."""
STEPS = [("qwen3_moe", "rl"), ("qwen3_moe", "sft")]
OTHERS = [("deepseek_v3", "rl"), ("gpt_oss", "rl")]
"""With latent attention and shared experts; with biases."""


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        ({"dp_shard": 2, "ep": 2}, STEPS),
        ({"dp_shard": 2, "tp": 2, "ep": 4}, STEPS[:1]),
        *(
            pytest.param(mesh, OTHERS, marks=pytest.mark.campaign)
            for mesh in (
                {"dp_shard": 2, "ep": 2},
                {"dp_shard": 2, "tp": 2, "ep": 4},
                {"cp": 2, "ep": 2},
                {"dp_shard": 4, "ep": 4},
            )
        ),
        *(
            pytest.param(mesh, STEPS, marks=pytest.mark.campaign)
            for mesh in (
                {"dp_shard": 2, "tp": 2, "ep": 4},
                {"tp": 2, "ep": 2},
                {"dp_shard": 4, "ep": 2},
                {"dp_shard": 4, "ep": 4},
                {"dp_shard": 2, "tp": 2, "ep": 2},
                {"tp": 4, "ep": 2},
                {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
                {"dp_replicate": 2, "tp": 2, "ep": 2},
            )
        ),
    ],
    ids=str,
)
def test_every_gradient_is_that_of_a_single_process(mesh: dict[str, int], steps: list[tuple[str, str]]) -> None:
    """With the routers' loss, which each rank of tp computes from a part of every sequence."""
    check_mesh(mesh, steps, TP_TOLERANCE if mesh.get("tp") else 2e-6)


@pytest.mark.campaign
def test_every_gradient_in_double_precision_is_that_of_a_single_process() -> None:
    """In single precision, that of the bias of a router is 4.2e-6 from it. Norms and log-probabilities
    are computed in single precision even there."""
    check_mesh({"tp": 2, "ep": 2}, OTHERS, dtype=torch.float64)


def unused_experts(_: int) -> list[Array]:
    """Return output and gradients of experts of which one rank receives no token, on each of two ranks."""
    model = make_model("qwen3_moe", False)
    divide_experts(model, Mesh(ParallelSettings(dp_shard=2, ep=2)))
    experts = next(iter(find_experts(model).values()))
    output = experts(*arguments())
    output.square().sum().backward()
    return [output.detach().numpy(), *(local_part(parameter.grad).numpy() for parameter in experts.parameters())]


def arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, and experts 0 and 1 of four for each."""
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return hidden, torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.full((3, 2), 0.5)


def test_rank_whose_experts_receive_no_token_has_gradients_of_zero() -> None:
    """It takes part in all exchanges."""
    experts = next(iter(find_experts(make_model("qwen3_moe", False)).values()))
    expected = experts(*arguments())
    expected.square().sum().backward()
    ranks = run_ranks(2, unused_experts)
    for output, *_ in ranks:
        np.testing.assert_allclose(output, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    for number, parameter in enumerate(experts.parameters(), start=1):
        assert parameter.grad is not None
        together = np.concatenate([ranks[0][number], ranks[1][number]])
        # Both ranks sent the same tokens.
        np.testing.assert_allclose(together, 2.0 * parameter.grad.numpy(), rtol=1e-4, atol=1e-5)
        assert not ranks[1][number].any()


def test_models_that_ranks_cannot_divide_are_refused() -> None:
    """With the numbers that would fit."""
    with pytest.raises(ConfigError, match="ep = 3 does not divide the 4 experts: use one of 1, 2, 4"):
        check_experts(make_model("qwen3_moe", False), 3)
    with pytest.raises(ConfigError, match=r"ep = 2 needs a mixture of experts .* Qwen3ForCausalLM is none"):
        check_experts(make_model("qwen3", False), 2)


def test_load_of_experts() -> None:
    """Even use, use of one expert only, and no tokens."""
    assert load_metrics(torch.tensor([[3, 3], [5, 5]])) == pytest.approx(
        {"expert_load_max": 1.0, "expert_load_entropy": 1.0, "experts_unused": 0.0}
    )
    assert load_metrics(torch.tensor([[4, 4], [8, 0]])) == pytest.approx(
        {"expert_load_max": 2.0, "expert_load_entropy": 0.5, "experts_unused": 0.25}
    )
    assert load_metrics(torch.zeros(1, 2, dtype=torch.int64)) == {}
