"""Replay of routing: families of models, against their own choice and against plain code of their routers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from starling.algo.experts import find_experts
from starling.algo.routing import Routing
from starling.common.errors import ConfigError
from starling.common.wire.messages import ModelExperts
from starling.policy.settings.memory import MemorySettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.data.replay import UNRECORDED, Replay
from starling.policy.train.memory.setup import apply_memory_settings
from starling.policy.train.model.routing import (
    NotReplayedError,
    copy_routing,
    declared_experts,
    find_routing,
    replaying,
)
from starling.policy.train.parallel.weights.sample import small_copy
from starling.policy.train.rl import RlTrainer

VOCABULARY, EXPERTS, CHOSEN = 64, 8, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "num_experts_per_tok": CHOSEN,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
GROUPED = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen2_moe": {"norm_topk_prob": False, "shared_expert_intermediate_size": 16},
    "gpt_oss": {"sliding_window": 5},
    "deepseek_v3": GROUPED | LATENT | {"routed_scaling_factor": 1.5},
    "mixtral": {},
    "olmoe": {"num_key_value_heads": 4},
    "granitemoe": {},
    "glm4_moe": GROUPED,
    "dots1": GROUPED,
    "minimax_m2": {},
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": CHOSEN, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"moe_topk": CHOSEN},
}
"""Configurations, besides or instead of `SIZES`."""


def make(kind: str, **changes: Any) -> Any:
    """Return a small model of a family, with biases of its choice that matter."""
    sizes = {name: one for name, one in (SIZES | FAMILIES.get(kind, {}) | changes).items() if one is not None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.add_(0.3 * torch.randn_like(buffer))
    return model


TOKENS = torch.arange(14).reshape(2, 7) * 4 % VOCABULARY


def outcome(model: Any, replay: Replay | None) -> list[torch.Tensor]:
    """Return the logits of some tokens and all gradients."""
    model.zero_grad()
    with replaying(replay):
        logits = model(input_ids=TOKENS, use_cache=False).logits
    (logits.float().log_softmax(-1)[..., 5] ** 2).sum().backward()
    return [logits.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def arriving(model: Any, replay: Replay | None) -> torch.Tensor:
    """Return the experts of each token in each layer, [T, M, K]."""
    found: list[torch.Tensor] = []
    handles = [
        one.register_forward_pre_hook(lambda _, args: found.append(args[1])) for one in find_experts(model).values()
    ]
    with torch.no_grad(), replaying(replay):
        model(input_ids=TOKENS, use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack(found, dim=1).to(torch.int16)


def others(num_layers: int, seed: int = 0) -> torch.Tensor:
    """Return random experts of each token."""
    generator = np.random.default_rng(seed)
    found = [generator.permutation(EXPERTS)[:CHOSEN] for _ in range(TOKENS.numel() * num_layers)]
    return torch.from_numpy(np.array(found, np.int16).reshape(-1, num_layers, CHOSEN))


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_own_choice_replayed_gives_the_same_bits(kind: str) -> None:
    model = make(kind)
    sizes = find_routing(model)
    assert sizes is not None
    assert (sizes.num_experts, sizes.num_chosen) == (EXPERTS, CHOSEN)
    own = arriving(model, None)
    assert own.shape == (TOKENS.numel(), sizes.num_layers, CHOSEN)
    replay = Replay(own)
    expected = outcome(model, None)
    for one, other in zip(expected, outcome(model, replay), strict=True):
        assert torch.equal(one, other)
    assert replay.take_counts().tolist() == [0, own.numel()]


@pytest.mark.parametrize("changed", [{"num_slots": 13}, {"num_chosen": 2}])
def test_pass_that_replays_nothing_raises(changed: dict[str, int]) -> None:
    model = make("mixtral")
    find_routing(model)
    wanted = others(2)[: changed.get("num_slots"), :, : changed.get("num_chosen")]
    with pytest.raises(NotReplayedError, match=r"the router of layer 0 .* cannot be replayed"):
        outcome(model, Replay(wanted))
    assert torch.isfinite(outcome(model, None)[0]).all()


@pytest.mark.parametrize("kind", list(FAMILIES))
def test_tokens_without_recorded_experts_keep_their_own(kind: str) -> None:
    model = make(kind)
    find_routing(model)
    own = arriving(model, None)
    wanted = others(own.shape[1])
    wanted[::3] = UNRECORDED
    replay = Replay(wanted)
    found = arriving(model, replay)
    assert torch.equal(found[1::3], wanted[1::3])
    assert torch.equal(found[0, 0], own[0, 0])
    assert (found[::3] >= 0).all()
    nothing = outcome(model, Replay(torch.full_like(wanted, UNRECORDED)))
    for one, other in zip(outcome(model, None), nothing, strict=True):
        assert torch.equal(one, other)
    differing, total = replay.take_counts().tolist()
    assert total == int((wanted != UNRECORDED).sum())
    assert 0 < differing < total


# --- routers in plain code, with given experts -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "hunyuan_v1_moe"])
def test_experts_without_any_probability_are_not_replayed(kind: str) -> None:
    """The model divides by their sum: a group with such experts kept every step from changing the weights."""
    model = make(kind)
    assert find_routing(model) is not None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.shape == (EXPERTS, SIZES["hidden_size"]):
                weight.mul_(300)
    found = outcome(model, Replay(others(2)))
    assert len(found) > 10
    assert all(one.isfinite().all() for one in found)
    own, replay = arriving(model, None), Replay(others(2))
    is_own = (arriving(model, replay) == own).all(-1)
    assert is_own.any()
    assert not is_own.all(), "experts with a probability are replayed"
    of_own = (replay.experts[:, 0, :, None] == own[:, 0, None, :]).any(-1)
    assert int(replay.differing[0]) == int((~of_own).sum()), "all that the policy would not have chosen are counted"


def soft_then_chosen(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    weights = logits.softmax(-1).take_along_dim(router.given, -1)
    return logits, weights / weights.sum(-1, keepdim=True), router.given


def chosen_then_soft(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T + router.bias
    return logits, logits.take_along_dim(router.given, -1).softmax(-1), router.given


def sigmoids_without_the_bias(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    weights = logits.sigmoid().take_along_dim(router.given, -1)
    return logits, 1.5 * weights / weights.sum(-1, keepdim=True), router.given


PLAIN: dict[str, tuple[str, Callable[..., Any]]] = {
    "qwen3_moe": ("gate", soft_then_chosen),
    "gpt_oss": ("router", chosen_then_soft),
    "deepseek_v3": ("gate", sigmoids_without_the_bias),
}


def plain(kind: str, experts: torch.Tensor) -> Any:
    """Return the model with routers in plain code that choose `experts`."""
    model, (name, route) = make(kind), PLAIN[kind]
    routers = [one for key, one in model.named_modules() if key.endswith(f"mlp.{name}") and hasattr(one, "top_k")]
    assert len(routers) == experts.shape[1]
    for layer, router in enumerate(routers):
        router.given = experts[:, layer].to(torch.int64)
        router.forward = MethodType(route, router)
    return model


@pytest.mark.parametrize("kind", list(PLAIN))
def test_another_choice_is_that_of_plain_code(kind: str) -> None:
    model = make(kind)
    sizes = find_routing(model)
    assert sizes is not None
    experts = others(sizes.num_layers)
    expected = outcome(plain(kind, experts), None)
    found = outcome(model, Replay(experts))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert not torch.allclose(found[0], outcome(model, None)[0], atol=1e-3)


@pytest.mark.parametrize(("kind", "checkpointing"), [(kind, how) for kind in PLAIN for how in ("full", "selective")])
def test_recomputed_blocks_choose_the_same_again(kind: str, checkpointing: Any) -> None:
    """Also after the forward pass of another microbatch."""
    model = make(kind)
    sizes = find_routing(model)
    assert sizes is not None
    apply_memory_settings(model, MemorySettings())
    replays = [Replay(others(sizes.num_layers, seed)) for seed in (0, 1)]
    expected = [outcome(model, replay) for replay in replays]
    model = make(kind)
    apply_memory_settings(model, MemorySettings(checkpointing=checkpointing))
    losses = []
    for replay in replays:
        with replaying(replay):
            logits = model(input_ids=TOKENS, use_cache=False).logits
        losses.append((logits.float().log_softmax(-1)[..., 5] ** 2).sum())
    for loss, one, replay in zip(losses, expected, replays, strict=True):
        counts = replay.take_counts().tolist()
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient, other in zip(gradients, one[1:], strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-6, atol=1e-8)
        assert counts[1] == replay.experts.numel()
        assert replay.take_counts().tolist() == [0, 0], "what is recomputed is not counted"


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("phimoe", {"num_experts_per_tok": 2, "num_experts": None}),
        (
            "deepseek_v2",
            GROUPED | LATENT | {"topk_method": "group_limited_greedy", "num_experts": None, "num_local_experts": None},
        ),
    ],
)
def test_models_whose_routers_choose_otherwise_cannot_replay(kind: str, changes: dict[str, Any]) -> None:
    assert find_routing(make(kind, **changes)) is None


def test_what_a_sample_shows_holds_for_its_model() -> None:
    """A model without memory, which is observed by a sample of fewer blocks."""
    model = make("qwen3_moe", num_hidden_layers=4)
    outline = make("qwen3_moe", num_hidden_layers=4).to("meta")
    sample = small_copy(outline, torch.device("cpu"))
    assert find_routing(sample) == ModelExperts(num_layers=1, num_experts=EXPERTS, num_chosen=CHOSEN)
    copy_routing(sample, outline)
    assert find_routing(outline) == ModelExperts(num_layers=4, num_experts=EXPERTS, num_chosen=CHOSEN)
    assert declared_experts(outline) == find_routing(outline)
    outline.to_empty(device="cpu").load_state_dict(model.state_dict())
    for module, filled in zip(model.modules(), outline.modules(), strict=True):
        for name, buffer in module._buffers.items():
            filled._buffers[name] = buffer
    assert torch.equal(arriving(outline, Replay(others(4))), others(4))


def test_failed_pass_leaves_no_mode_behind() -> None:
    model = make("qwen3_moe")
    find_routing(model)
    experts = next(iter(find_experts(model).values()))

    def fail(*_: Any) -> None:
        raise ValueError("no")

    handle = experts.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no"):
        arriving(model, Replay(others(2)))
    handle.remove()
    scores = torch.arange(8.0)[None].expand(14, 8)
    assert scores.topk(CHOSEN).indices[0].tolist() == [7, 6, 5]


# --- steps -----------------------------------------------------------------------------------------------------------

SETTINGS = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.0}, "algorithm": {"kl_coefficient": 0.1}}


def routed(groups: list[ScoredGroup], num_layers: int, seed: int = 0) -> list[ScoredGroup]:
    """Return `groups` with random experts, and none of each completion's last token."""
    generator = np.random.default_rng(seed)

    def experts(num: int) -> Any:
        found = [generator.permutation(4)[:2] for _ in range(num * num_layers)]
        return np.array(found, np.uint8).reshape(num, num_layers, 2)

    found = []
    for group in groups:
        completions = experts(len(group.completion_ids))
        completions[np.cumsum(group.lengths) - 1] = 255
        found.append(replace(group, routing=Routing(experts(len(group.prompt_ids)), completions)))
    return found


def step_of(model: Any, groups: list[ScoredGroup], **changes: Any) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    settings = PolicySettings.model_validate(SETTINGS | changes)
    apply_memory_settings(model, settings.memory)
    metrics = RlTrainer(model, settings, total_steps=1).step(groups, step=1)
    return metrics, {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


SHAPES = [(6, (4, 9, 1)), (20, (2, 7, 5)), (11, (1, 1, 12))]
PACKINGS: list[dict[str, Any]] = [
    {"tokens_per_microbatch": 1000},
    {"tokens_per_microbatch": 24},
    {"tokens_per_microbatch": 1000, "memory": {"checkpointing": "full"}},
    {"tokens_per_microbatch": 1000, "share_prompts": False},
]


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", PACKINGS)
def test_step_is_that_of_one_sequence_at_a_time(
    tiny: Callable[..., Any], make_groups: Callable[..., Any], packing: dict[str, Any]
) -> None:
    """Where shared prompts are computed once, in packed rows, in several microbatches, and with recomputation."""
    groups = routed(make_groups(SHAPES), 2)
    expected = step_of(tiny("qwen3_moe"), groups, tokens_per_microbatch=1, share_prompts=False)
    found = step_of(tiny("qwen3_moe"), groups, **packing)
    for name, one in expected[1].items():
        torch.testing.assert_close(found[1][name], one, rtol=1e-4, atol=1e-6)
    assert found[0]["loss"] == pytest.approx(expected[0]["loss"], rel=1e-4)
    assert 0.2 < found[0]["router_replay_share"] < 0.8
    other = step_of(tiny("qwen3_moe"), make_groups(SHAPES), **packing)
    assert "router_replay_share" not in other[0]
    assert any(not torch.allclose(other[1][name], one, atol=1e-5) for name, one in expected[1].items())


def test_biases_follow_the_own_choice_of_the_routers(make_groups: Callable[..., Any]) -> None:
    """The bias of an expert that a rollout sends for all its tokens would fall without end, and the tokens of others
    would no longer reach that expert."""
    model, groups = make("glm4_moe"), make_groups([(6, (4, 9)), (8, (5, 3))])
    before = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"].clone()
    moved = []
    for false in (False, True):
        sent = [one if not false else replace(one, routing=first_experts(one)) for one in groups]
        model = make("glm4_moe")
        metrics, _ = step_of(model, sent, tokens_per_microbatch=1000, router_bias_rate=0.01)
        moved.append(dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"] - before)
        assert (metrics["expert_load_max"] == pytest.approx(EXPERTS / CHOSEN)) == false, "what is computed is shown"
    assert moved[0].abs().max() > 0
    assert torch.equal(moved[0], moved[1])


def first_experts(group: ScoredGroup) -> Routing:
    """Return the same experts for all tokens of a group, in one layer."""
    numbers = len(group.prompt_ids), len(group.completion_ids)
    return Routing(*[np.tile(np.arange(CHOSEN, dtype=np.uint8), (num, 1, 1)) for num in numbers])


@pytest.mark.parametrize("prompts", ["equal", "beginning alike"])
def test_experts_of_a_group_reach_no_other_group(
    tiny: Callable[..., Any], make_groups: Callable[..., Any], prompts: str
) -> None:
    """Tokens with which two prompts begin were computed once for both, with the experts of one of them, which may come
    from another rollout."""
    one, other = make_groups([(6, (4, 9)), (8, (5, 3))])
    begun = np.concatenate([one.prompt_ids, other.prompt_ids[6:]])
    other = replace(other, prompt_ids=one.prompt_ids if prompts == "equal" else begun)
    groups = [*routed([one], 2, seed=1), *routed([other], 2, seed=2)]
    expected = step_of(tiny("qwen3_moe"), groups, tokens_per_microbatch=1, share_prompts=False)
    found = step_of(tiny("qwen3_moe"), groups, tokens_per_microbatch=1000)
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_log_probabilities_of_a_rollout_with_its_experts_are_the_same(
    tiny: Callable[..., Any], make_groups: Callable[..., Any]
) -> None:
    """Also those of the separate pass, by which several updates are compared; not those of the reference."""
    model = tiny("qwen3_moe")
    find_routing(model)
    groups = routed(make_groups([(6, (4, 9))]), 2)
    (group,) = groups
    assert group.routing is not None
    logprobs, begin = [], 0
    for length in group.lengths:
        ids = np.concatenate([group.prompt_ids, group.completion_ids[begin : begin + length]])
        experts = np.concatenate([group.routing.prompt, group.routing.completions[begin : begin + length]])
        with torch.no_grad(), replaying(Replay.of(experts, "cpu")):
            logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False).logits[0]
        rows = logits.log_softmax(-1)[len(group.prompt_ids) - 1 : -1]
        logprobs.append(rows.gather(1, torch.from_numpy(ids[len(group.prompt_ids) :].astype(np.int64))[:, None])[:, 0])
        begin += length
    exact = replace(group, logprobs=torch.cat(logprobs).numpy())
    for algorithm in ({}, {"old": "proximal", "num_passes": 2}):
        metrics, _ = step_of(tiny("qwen3_moe"), [exact], algorithm={"kl_coefficient": 0.1, **algorithm})
        assert metrics["mismatch_max"] < 1e-4
        assert metrics["kl_reference"] > 1e-4, "the reference chooses for itself"
    metrics, _ = step_of(tiny("qwen3_moe"), [replace(exact, routing=None)])
    assert metrics["mismatch_max"] > 1e-2


def test_experts_that_do_not_match_their_tokens_are_refused(make_groups: Callable[..., Any]) -> None:
    (group,) = routed(make_groups([(6, (4, 9))]), 2)
    assert group.routing is not None
    with pytest.raises(ConfigError, match="experts of 12 tokens came with 13 tokens"):
        replace(group, routing=Routing(group.routing.prompt, group.routing.completions[1:]))
