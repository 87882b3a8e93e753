"""Adapters against plain matrices: results, training, and file formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from states_on_disk import resume, save
from vocabulary import VOCABULARY

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.train.checkpoint.header import find_state
from starling.policy.train.checkpoint.huggingface import save_hf
from starling.policy.train.checkpoint.state import WEIGHTS, SavedState
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.learner import Learner
from starling.policy.train.model.load import freeze, use_liger, version_tensors
from starling.policy.train.model.lora import export_model, load_adapters, save_adapters
from starling.policy.train.optim.optimizer import ModelOptimizer
from starling.weightsync.tensors.adapters import add_adapters, base_digest, is_adapter

Make = Callable[..., Any]
IDS = torch.arange(24).reshape(2, 12) % VOCABULARY
FORMS = {
    "plain": LoraSettings(rank=4, alpha=6.0),
    "rslora": LoraSettings(rank=4, alpha=6.0, rslora=True, init="gaussian"),
    "patterns": LoraSettings(rank=4, rank_pattern={"q_proj": 2}, alpha_pattern={r"layers\.1\.mlp\..*": 3.0}),
    "dora": LoraSettings(rank=4, dora=True, targets=r".*\.(q|v|down)_proj"),
    "whole": LoraSettings(rank=2, targets=("v_proj",), modules_to_save=("lm_head", "norm")),
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


def adapted(model: Any, settings: LoraSettings, seed: int = 3) -> Any:
    """Add adapters with non-zero values to `model`."""
    add_adapters(model, settings, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model: Any) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


def loss(model: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits(model)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


class Plain(torch.nn.Module):
    """A layer with an adapter, as in the papers."""

    def __init__(self, weight: torch.Tensor, adapter: dict[str, torch.Tensor], scale: float) -> None:
        super().__init__()
        self.weight, self.scale = weight, scale
        self.parts = torch.nn.ParameterDict({part: tensor.detach().clone() for part, tensor in adapter.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight + self.scale * self.parts["lora_B"] @ self.parts["lora_A"]
        if "lora_magnitude_vector" in self.parts:
            length = weight.detach().norm(dim=1, keepdim=True)  # a constant, as in section 4.3
            weight = self.parts["lora_magnitude_vector"][:, None] * weight / length
        return x @ weight.T


def plain(model: Any, base: Any, settings: LoraSettings) -> dict[str, torch.nn.Parameter]:
    """Replace layers of `base` by plain layers with the adapters of `model`; return the parameters by name."""
    parameters = {}
    for name, module in list(base.named_modules()):
        own = {key: value for key, value in model.named_parameters() if key.startswith(f"{name}.lora_")}
        if not own or not isinstance(module, torch.nn.Linear):
            continue
        by_part = {key.removeprefix(f"{name}.").partition(".")[0]: (key, value) for key, value in own.items()}
        rank = len(by_part["lora_A"][1])
        alpha = 3.0 if settings.alpha_pattern and ".1.mlp." in name else settings.alpha
        scale = alpha / (math.sqrt(rank) if settings.rslora else rank)
        layer = Plain(module.weight.detach(), {part: value for part, (_, value) in by_part.items()}, scale)
        base.set_submodule(name, layer)
        parameters |= {key: layer.parts[part] for part, (key, _) in by_part.items()}
    return parameters


@pytest.mark.parametrize("form", ["plain", "rslora", "patterns", "dora"])
def test_adapters_equal_the_papers_formula(tiny: Make, form: str) -> None:
    model, reference = adapted(tiny().double(), FORMS[form]), tiny().double()
    theirs = plain(model, reference, FORMS[form])
    mine = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    assert mine.keys() == theirs.keys()
    torch.testing.assert_close(logits(model), logits(reference), atol=1e-10, rtol=1e-10)
    torch.autograd.backward([loss(model), loss(reference)])
    for name, parameter in mine.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("init", ["kaiming", "gaussian", "orthogonal"])
def test_new_adapters_are_neutral_and_follow_the_seed(tiny: Make, init: str) -> None:
    models = []
    for seed in (1, 1, 2):
        model = tiny()
        torch.rand(seed)
        before = torch.get_rng_state()
        add_adapters(model, LoraSettings(rank=4, init=init), seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(logits(model), logits(tiny()), atol=1e-5, rtol=1e-5)
        models.append(version_tensors(model))
    first, same, other = models
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("form", FORMS)
def test_only_adapters_are_trained(tiny: Make, form: str) -> None:
    model = adapted(tiny(tied=False), FORMS[form])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = ModelOptimizer(model, OptimizerSettings(learning_rate=1e-2, weight_decay=0.1), 1)
    loss(model).backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == set(
        version_tensors(model)
    )
    optimizer.apply(1.0)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == set(version_tensors(model))
    assert all(is_adapter(name) for name in changed)


def test_adapters_are_float32_on_bfloat16_base(tiny: Make) -> None:
    model = adapted(tiny().to(torch.bfloat16), FORMS["dora"])
    assert {tensor.dtype for tensor in version_tensors(model).values()} == {torch.float32}
    assert logits(model).dtype == torch.bfloat16


def small_experts(tiny: Make, folder: Path) -> tuple[Any, LoraSettings]:
    """Return a model with experts from a folder with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = {**tiny().config.to_dict(), **EXPERTS, "model_type": "qwen3_moe", "layer_types": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config)).save_pretrained(folder)
    settings = LoraSettings(
        rank=4, targets=("q_proj",), parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    )
    return AutoModelForCausalLM.from_pretrained(folder).eval(), settings


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", [*FORMS, "experts"])
def test_adapters_are_saved_separately_and_merged(tiny: Make, tmp_path: Path, form: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base, settings = tmp_path / "base", FORMS.get(form)
    if settings is None:
        model, settings = small_experts(tiny, base)
    else:
        tiny(tied=False).save_pretrained(base)
        model = AutoModelForCausalLM.from_pretrained(base).eval()
    adapted(model, settings)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_hf(model, None, tmp_path / "adapters")
    save_hf(model, None, tmp_path / "merged", weights=export_model(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    assert not (tmp_path / "adapters/model.safetensors").exists()
    fresh = AutoModelForCausalLM.from_pretrained(base).eval()
    assert torch.equal(logits(PeftModel.from_pretrained(fresh, tmp_path / "adapters")), logits(model))
    if not settings.dora:  # whose lengths of rows transformers 5.19 does not find in the file, and only warns
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()), logits(model))

    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    torch.testing.assert_close(logits(merged.eval()), logits(model), atol=1e-5, rtol=1e-5)

    again = AutoModelForCausalLM.from_pretrained(base).eval()
    add_adapters(again, settings, seed=8)
    load_adapters(again, tmp_path / "adapters")
    assert torch.equal(logits(again), logits(model))


def test_export_model_without_adapters_is_unchanged(tiny: Make) -> None:
    model = tiny()
    exported = export_model(model)
    assert exported.keys() == model.state_dict().keys() - {"lm_head.weight"}, "the output layer is the embedding"
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in exported.items())


def test_base_is_identified_by_digest(tiny: Make) -> None:
    def digest(base: Any, **changes: Any) -> str:
        settings = LoraSettings(**({"rank": 4} | changes))
        return base_digest(adapted(base, settings), settings)

    known = digest(tiny())
    assert digest(tiny(), merged=True, init="gaussian") == known, "neither changes the base weights"
    others = [digest(tiny(seed=1)), digest(tiny().to(torch.bfloat16)), digest(tiny(), alpha=31.0)]
    others += [digest(tiny(), rslora=True), digest(tiny(), alpha_pattern={"q_proj": 1.0})]
    assert len({known, *others}) == 6
    assert base_digest(tiny(), None) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": ("q_proj", "qproj")}, "model.lora.targets lists 'qproj', and nothing"),
        ({"targets": ("nothing",)}, "nothing"),
        ({"targets": r".*\.nothing"}, "nothing"),
        ({"targets": ("input_layernorm",)}, "does not fit the model: Target module"),
        ({"targets": ("embed_tokens",)}, "model.lora.targets include model.embed_tokens, an embedding"),
        ({"modules_to_save": ("score",)}, "model.lora.modules_to_save lists 'score'"),
        ({"modules_to_save": ("lm_head",)}, "[model.lora] names lm_head, whose weights are both"),
        ({"exclude": ("visual",)}, "model.lora.exclude lists 'visual'"),
        ({"rank_pattern": {"qproj": 2}}, "model.lora.rank_pattern has 'qproj'"),
        ({"alpha_pattern": {"qproj": 2.0}}, "model.lora.alpha_pattern has 'qproj'"),
        (
            {"targets": ("q_proj",), "parameters": ("experts.down_proj",)},
            "model.lora.parameters lists 'experts.down_proj'",
        ),
        ({"rank": 3, "init": "orthogonal"}, "does not fit the model"),
    ],
)
def test_adapters_matching_no_layer_are_refused(tiny: Make, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        add_adapters(tiny(), LoraSettings(**changes), seed=0)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_dora_on_experts_is_refused(tiny: Make, tmp_path: Path) -> None:
    model, settings = small_experts(tiny, tmp_path)
    with pytest.raises(ConfigError, match="dora"):
        add_adapters(model, settings.model_copy(update={"dora": True}), seed=0)


def test_adapter_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0.1 would make the trainer's log-probabilities differ"):
        LoraSettings(dropout=0.1)


@pytest.mark.parametrize(
    "changes",
    [{"rank_pattern": {"q_proj": 0}}, {"alpha_pattern": {"q_proj": float("inf")}}, {"rank": 0}, {"alpha": -1}],
)
def test_adapter_rank_and_alpha_must_be_positive(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"above 0|greater than|finite number"):
        LoraSettings(**changes)


def test_adapters_exclude_patterns(tiny: Make) -> None:
    model = tiny()
    add_adapters(model, LoraSettings(exclude=r".*\.layers\.0\..*"), seed=0)
    assert {name.split(".")[2] for name in version_tensors(model)} == {"1"}


def test_adapters_exclude_vision_tower() -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    both = {"hidden_size": 32, "intermediate_size": 32}
    tower = {**both, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": VOCABULARY}
    text = {**both, **heads, "rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}
    text |= {"bos_token_id": None, "eos_token_id": None}
    for exclude, parts in ((".*visual.*", {"language_model"}), ((), {"language_model", "visual"})):
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower))
        add_adapters(model, LoraSettings(rank=2, exclude=exclude), seed=0)
        assert {name.split(".")[1] for name in version_tensors(model)} == parts


def test_liger_without_gpu_is_refused(tiny: Make) -> None:
    with pytest.raises(
        ConfigError, match=r"policy.liger = true needs a CUDA device, and the model is on cpu: remove it"
    ):
        use_liger(tiny())


def test_load_adapters_of_other_layers_is_refused(tiny: Make, tmp_path: Path) -> None:
    save_adapters(adapted(tiny(), LoraSettings(rank=4, targets=("q_proj",))), tmp_path / "other")
    for settings, reason in (
        (LoraSettings(rank=4, targets=("v_proj",)), "are of other layers"),
        (LoraSettings(rank=2, targets=("q_proj",)), r"have r = 4, and \[model.lora\] 2"),
        (LoraSettings(rank=4, targets=("q_proj",), rslora=True), "use_rslora = False"),
    ):
        model = adapted(tiny(), settings)
        with pytest.raises(ConfigError, match=reason):
            load_adapters(model, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"has no adapter_config.json"):
        load_adapters(model, tmp_path)
    damaged = (
        ("adapter_model.safetensors", b"{"),
        *(("adapter_config.json", text) for text in (b"{", b"[" * 99_999, b"[]")),
    )
    for name, content in damaged:
        (tmp_path / "other" / name).write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_adapters(model, tmp_path / "other")


def test_state_of_adapters_resumes_bitwise(
    tiny: Make, make_groups: Callable[..., Sequence[ScoredGroup]], tmp_path: Path
) -> None:
    settings = PolicySettings(optimizer=OptimizerSettings(learning_rate=1e-2))

    def load() -> Any:
        return adapted(tiny(), FORMS["dora"])

    def step(learner: Learner, number: int) -> None:
        groups = make_groups([(3, [4, 2]), (2, [3, 5])], seed=number, version=number - 1)
        learner.reinforce(groups, step=number, num_steps=3)

    first = Learner(load, settings)
    for number in (1, 2):
        step(first, number)
    folder = save(first, tmp_path, 2)
    held = SavedState.of(find_state(str(folder))).read(WEIGHTS)
    assert held.keys() == first.tensors.keys()
    second = Learner(load, settings)
    assert resume(second, tmp_path) == 2
    for learner in (first, second):
        step(learner, 3)
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items())
    assert any(
        not torch.equal(tensor, new)
        for tensor, new in zip(version_tensors(load()).values(), first.tensors.values(), strict=True)
    )


def test_frozen_parameters_do_not_change(tiny: Make) -> None:
    model = tiny(tied=False)
    freeze(model, [r"layers\.0\.", "embed"])
    before = {name: tensor.clone() for name, tensor in version_tensors(model).items()}
    optimizer = ModelOptimizer(model, OptimizerSettings(learning_rate=1e-2), 1)
    loss(model).backward()
    optimizer.apply(1.0)
    after = version_tensors(model)
    assert after.keys() == before.keys(), "frozen parameters are part of a version, too"
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if "layers.0." in name or "embed" in name}


def test_freeze_matches_either_name_of_tied_weights(tiny: Make) -> None:
    model = tiny(tied=True)
    freeze(model, ["lm_head"])
    assert not model.get_input_embeddings().weight.requires_grad


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("visual", "matches the name of no parameter; the first of"), ("(", "not a regular expression")],
)
def test_freeze_unmatched_pattern_is_refused(tiny: Make, pattern: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        freeze(tiny(), [pattern])
