"""Load-balancing loss of routers: packed steps against one sequence at a time, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeRMSNorm,
    Qwen3MoeTopKRouter,
    load_balancing_loss_func,
)

from starling.common.errors import ConfigError
from starling.common.settings import validate
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.data.examples import PreferencePair, SftExample
from starling.policy.train.fit import check_fit
from starling.policy.train.loss.router import find_routers
from starling.policy.train.preference import DpoTrainer, RewardModelTrainer
from starling.policy.train.rl import RlTrainer
from starling.policy.train.sft import SftTrainer

COEFFICIENT, EXPERTS, CHOSEN = 0.5, 4, 2
PLAIN = {"learning_rate": 1e-3, "max_grad_norm": 0.0}
SHAPES = [(6, (4, 9, 1)), (1, (2, 7, 5)), (11, (1, 1, 12))]
PACKINGS = [
    {"tokens_per_microbatch": 1000},
    {"tokens_per_microbatch": 24},
    {"tokens_per_microbatch": 1},
    {"tokens_per_microbatch": 1000, "share_prompts": False},
]

Parameters = dict[str, torch.Tensor]


def settings_with(coefficient: float, **changes: Any) -> PolicySettings:
    sections = {kind: {"optimizer": PLAIN} for kind in ("sft", "dpo", "reward_model")}
    tree = {"router_aux_coefficient": coefficient, "optimizer": PLAIN, **sections, **changes}
    return validate(PolicySettings, tree)


def moe(tiny: Callable[..., Any]) -> Any:
    return in_double(tiny("qwen3_moe"))


def in_double(model: Any) -> Any:
    """Return `model` without its norms and routers that compute in single precision whatever the dtype."""
    model.set_experts_implementation("eager")
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, Qwen3MoeRMSNorm):
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm)
            elif isinstance(child, Qwen3MoeTopKRouter):
                child.forward = MethodType(route, child)
    return model.double().eval()


def route(router: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return logits, weights and experts of each token, as `Qwen3MoeTopKRouter` does."""
    logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
    weights, experts = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True), experts


def gradient(model: Any) -> Parameters:
    return {
        name: torch.zeros_like(one) if one.grad is None else one.grad.clone() for name, one in model.named_parameters()
    }


def own_part(make: Callable[[], Any], step: Callable[[Any, PolicySettings], Any], **changes: Any) -> Parameters:
    """Return the gradient of a step with the routers' loss, less that of the same step without."""
    found = []
    for coefficient in (COEFFICIENT, 0.0):
        model = make()
        step(model, settings_with(coefficient, **changes))
        found.append(gradient(model))
    return {name: one - found[1][name] for name, one in found[0].items()}


def one_at_a_time(model: Any, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the loss by its formula in double precision, checked against the function of transformers."""
    losses = []
    for ids in sequences:
        output = model.base_model(input_ids=torch.tensor([list(ids)]), output_router_logits=True)
        for logits in output.router_logits:
            probabilities = logits.softmax(-1)
            sent = torch.zeros_like(probabilities).scatter(1, probabilities.topk(CHOSEN).indices, 1.0)
            loss = EXPERTS * (sent.mean(0) * probabilities.mean(0)).sum()
            theirs = load_balancing_loss_func((logits,), EXPERTS, CHOSEN)
            assert loss.item() == pytest.approx(theirs.item(), rel=1e-5)
            losses.append(loss)
    return torch.stack(losses).mean()


def check_gradient(found: Parameters, model: Any, sequences: Sequence[Sequence[int]]) -> float:
    """Compare `found` with the gradient of the loss of `sequences`. Returns this loss."""
    loss = one_at_a_time(model, sequences)
    (COEFFICIENT * loss).backward()  # type: ignore[no-untyped-call]
    expected = gradient(model)
    assert any(float(one.abs().max()) > 1e-3 for name, one in expected.items() if "gate.weight" in name)
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-7, atol=1e-8)
    return loss.item()


def sequences_of(groups: Sequence[Any]) -> list[list[int]]:
    """Return the input tokens of each completion: the last one predicts nothing."""
    found = []
    for group in groups:
        ends = np.cumsum(group.lengths)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            found.append([*group.prompt_ids.tolist(), *group.completion_ids[start : end - 1].tolist()])
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("packing", PACKINGS)
def test_reinforcement_has_the_gradient_of_one_sequence_at_a_time(
    tiny: Callable[..., Any], make_groups: Callable[..., Any], packing: dict[str, Any]
) -> None:
    groups, reported = make_groups(SHAPES), []

    def step(model: Any, settings: PolicySettings) -> None:
        reported.append(RlTrainer(model, settings, total_steps=1).step(groups, step=1).get("router_aux_loss"))

    found = own_part(lambda: moe(tiny), step, **packing)
    expected = check_gradient(found, moe(tiny), sequences_of(groups))
    assert reported == [pytest.approx(expected, rel=1e-6), None]


def test_completions_without_an_advantage_are_balanced_too(
    tiny: Callable[..., Any], make_groups: Callable[..., Any]
) -> None:
    groups = make_groups([(5, (3, 4))])
    object.__setattr__(groups[0], "rewards", (1.0, 1.0))
    found = own_part(lambda: moe(tiny), lambda model, s: RlTrainer(model, s, total_steps=1).step(groups, step=1))
    check_gradient(found, moe(tiny), sequences_of(groups))


def test_metric_of_several_updates_is_their_mean(tiny: Callable[..., Any], make_groups: Callable[..., Any]) -> None:
    groups = make_groups([(4, (3, 3)), (4, (3, 3))])
    still = {"optimizer": PLAIN | {"learning_rate": 1e-12}, "algorithm": {"num_minibatches": 2, "num_passes": 2}}
    settings = settings_with(COEFFICIENT, **still)
    metrics = RlTrainer(moe(tiny), settings, total_steps=1).step(groups, step=1)
    assert metrics["num_updates"] == 4
    expected = one_at_a_time(moe(tiny), sequences_of(groups)).item()
    assert metrics["router_aux_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.sample(2)
@pytest.mark.parametrize("packing", PACKINGS[:3])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_supervision_has_the_gradient_of_one_sequence_at_a_time(
    tiny: Callable[..., Any], packing: dict[str, Any], checkpointing: str
) -> None:
    from starling.policy.train.memory.setup import apply_memory_settings

    generator = np.random.default_rng(0)
    pairs = [[generator.integers(31, size=num).astype(np.int32) for num in shape] for shape in [(5, 4), (3, 9), (7, 1)]]
    examples = [SftExample(prompt, response) for prompt, response in pairs]

    def step(model: Any, settings: PolicySettings) -> None:
        apply_memory_settings(model, settings.memory)
        SftTrainer(model, settings, total_steps=1).step(examples)

    found = own_part(lambda: moe(tiny), step, memory={"checkpointing": checkpointing}, **packing)
    check_gradient(found, moe(tiny), [[*prompt, *response[:-1]] for prompt, response in pairs])


def preference_pairs() -> list[PreferencePair]:
    generator = np.random.default_rng(0)
    return [
        PreferencePair(*(generator.integers(31, size=num).astype(np.int32) for num in shape))
        for shape in [(5, 4, 2), (3, 1, 9), (7, 6, 6)]
    ]


@pytest.mark.parametrize("packing", PACKINGS[:3])
def test_preferences_have_the_gradient_of_one_sequence_at_a_time(
    tiny: Callable[..., Any], packing: dict[str, Any]
) -> None:
    pairs = preference_pairs()
    found = own_part(
        lambda: moe(tiny), lambda model, s: DpoTrainer(model, s, total_steps=1).step(pairs, step=1), **packing
    )
    sequences = [[*p.prompt_ids, *ids[:-1]] for p in pairs for ids in (p.chosen_ids, p.rejected_ids)]
    check_gradient(found, moe(tiny), sequences)


def test_reward_model_has_the_gradient_of_one_sequence_at_a_time(tiny: Callable[..., Any]) -> None:
    pairs, config = preference_pairs(), moe(tiny).config
    config.num_labels = 1

    def make() -> Any:
        torch.manual_seed(0)
        return in_double(AutoModelForSequenceClassification.from_config(config))

    found = own_part(make, lambda model, s: RewardModelTrainer(model, s, total_steps=1).step(pairs, step=1))
    # All tokens of a response are inputs: its score is read at the last one.
    check_gradient(found, make(), [[*p.prompt_ids, *ids] for p in pairs for ids in (p.chosen_ids, p.rejected_ids)])


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "phimoe", "gpt_oss", "granitemoe"])
def test_routers_of_a_family_are_those_that_transformers_reads(kind: str) -> None:
    sizes = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(kind, **sizes, **heads, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    found = []
    routers = find_routers(model)
    for router, index in routers:
        router.register_forward_hook(lambda _, args, output, index=index: found.append(output[index]))
    expected = model.base_model(input_ids=torch.tensor([[1, 2, 3]]), output_router_logits=True).router_logits
    assert len(found) == len(expected) == 2
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_dense_model_is_refused(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_coefficient.*Qwen3ForCausalLM"):
        SftTrainer(tiny(), settings_with(COEFFICIENT), total_steps=1)


def test_dense_model_is_refused_before_the_first_step(tiny: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"router_aux_coefficient.*Qwen3ForCausalLM"):
        check_fit(tiny(), settings_with(COEFFICIENT), "sft")


def test_compiled_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"router_aux_coefficient = 0.5.*memory.compile"):
        settings_with(COEFFICIENT, memory={"compile": True})
