"""Biases of routers that balance experts: changed by the load of a step, alone and on a mesh."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from small_steps import VOCABULARY, Array, make_examples, make_model, make_settings

from starling.common.errors import ConfigError
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.fit import check_fit
from starling.policy.train.learner import Learner
from starling.policy.train.parallel.mesh import Mesh

RATE = 0.25
"""Large enough to change choices in the second step."""
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def deepseek() -> Any:
    """Return a small model whose second block has four experts."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        first_k_dense_replace=1,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        initializer_range=0.1,
        **sizes,
        **heads,
        **experts,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.model.layers[1].mlp.gate.weight.copy_(torch.randn(4, 32))
        return model.eval()


def learner_of(parallel: dict[str, Any]) -> Learner:
    settings = make_settings(**parallel).model_copy(update={"router_bias_rate": RATE})
    return Learner(deepseek, settings, mesh=Mesh(ParallelSettings(**parallel)) if parallel else None)


def biases_after_steps(_: int, parallel: dict[str, Any]) -> list[tuple[Array, float]]:
    """Return the bias, and the load of the most used expert, of each of three steps."""
    learner, found = learner_of(parallel), []
    for number in (1, 2, 3):
        metrics = learner.supervise(make_examples(seed=number), num_steps=4)
        found.append((learner.tensors[BIAS].numpy().copy(), metrics["expert_load_max"]))
    return found


def test_bias_follows_the_load_of_the_step() -> None:
    """By a fixed amount, down for the experts that received more than the mean; a skipped step changes nothing."""
    learner = learner_of({})
    chosen: list[torch.Tensor] = []
    experts = learner.model.model.layers[1].mlp.experts
    handle = experts.register_forward_pre_hook(
        lambda _, args, kwargs: chosen.append((args[1] if len(args) > 1 else kwargs["top_k_index"]).flatten()),
        with_kwargs=True,
    )
    learner.supervise(make_examples(), num_steps=2)
    handle.remove()
    load = torch.bincount(torch.cat(chosen), minlength=4).double()
    assert load.max() > load.min()
    np.testing.assert_array_equal(learner.tensors[BIAS].numpy(), (RATE * torch.sign(load.mean() - load)).numpy())
    with torch.no_grad():
        learner.model.model.norm.weight.fill_(float("nan"))
    assert learner.supervise(make_examples(), num_steps=2)["skipped_step"] == 1.0
    np.testing.assert_array_equal(learner.tensors[BIAS].numpy(), (RATE * torch.sign(load.mean() - load)).numpy())


@pytest.mark.parametrize(
    "parallel",
    [
        {"dp_shard": 2},
        pytest.param({"dp_shard": 2, "ep": 2}, marks=pytest.mark.campaign),
        pytest.param({"dp_replicate": 2}, marks=pytest.mark.campaign),
    ],
    ids=str,
)
def test_every_rank_has_the_bias_of_a_single_process(parallel: dict[str, Any]) -> None:
    """From the load of all ranks; and it balances."""
    expected = biases_after_steps(0, {})
    assert expected[-1][1] < expected[0][1]
    for found in run_ranks(2, biases_after_steps, parallel):
        for (bias, load), (correct, correct_load) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(bias, correct)
            assert load == pytest.approx(correct_load)


def test_routers_without_a_bias_are_refused() -> None:
    """With what balances them."""
    settings = PolicySettings(router_bias_rate=RATE)
    with pytest.raises(
        ConfigError, match=r"router_bias_rate needs routers with a bias .* Qwen3MoeForCausalLM has none"
    ):
        check_fit(make_model("qwen3_moe", False), settings, "sft")
    check_fit(deepseek(), settings, "sft")
