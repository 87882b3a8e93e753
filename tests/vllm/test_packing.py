"""Quantised weights in vLLM's layers: after an adoption they are bitwise those that vLLM's loader produces.

For each parallelism, one process per worker builds the real class twice. The first instance loads a checkpoint of
torchao's codes and scales through vLLM. The second starts with random weights and adopts two versions that a publisher
quantises. All parameters and buffers of both must then have the same bits, and those of the second their old addresses.
What is recorded of vLLM's loader must equal the layout by the family's table.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import spec_of
from quantised_checkpoints import dequantised, quantised_checkpoint
from safetensors.torch import load_file, save_file
from test_architectures import write_folder
from test_layouts_vllm import shards_by_place
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from workers import DEADLINE_S, engine_config, in_workers

from starling.common.errors import WeightsError
from starling.rollout.engine.vllm.quantised import VLLM_FORMATS, overrides, published_model, recipe_of
from starling.rollout.engine.vllm.worker import cpu_kernels
from starling.weightsync.layouts.families import FAMILIES
from starling.weightsync.layouts.fused import layout_of_parameters, transformers_table
from starling.weightsync.layouts.parameters import in_terms_of
from starling.weightsync.layouts.strided import BoxCopy
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.plan.compact import to_compact
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.quantise.layouts import packing_bytes, received_layout
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.vllm.cpu import keep_weights
from starling.weightsync.vllm.quantised import QuantisedModel, record_quantised
from starling.weightsync.vllm.recorded import PartLoader, PublishedModel

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,  # no padding, of which loading makes zeros and random weights do not
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 256, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
CONFIGS: dict[str, Any] = {
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3 tied": transformers.Qwen3Config(**SIZES, head_dim=64, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=64),
    # Without a table: fused in files, other norms, and computed by classes of transformers.
    "phi3": transformers.Phi3Config(**SIZES, pad_token_id=0),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, head_dim=64, query_pre_attn_scalar=64),
    "olmo2": transformers.Olmo2Config(**SIZES),
}


def write_model(folder: Path, name: str, form: str, seed: int) -> dict[str, torch.Tensor]:
    """Write a random model in full precision and quantised."""
    torch.manual_seed(seed)
    config = CONFIGS[name]
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_()
    dtype = torch.bfloat16 if form == "nvfp4" else torch.float32
    model.to(dtype).save_pretrained(folder)
    torch.save(dict(model.named_parameters()), folder / "trained.pt")
    full = load_file(folder / "model.safetensors")
    save_file(quantised_checkpoint(form, full), folder / "codes.safetensors")
    return full


def load_quantised(folder: Path, config: VllmConfig) -> torch.nn.Module:
    """Build the model, and let vLLM load and pack the quantised checkpoint."""
    config.compilation_config.static_forward_context.clear()
    module = initialize_model(config)
    module.load_weights(iter(load_file(folder / "codes.safetensors").items()))
    pack(module, config)
    return module


def build_random(config: VllmConfig) -> torch.nn.Module:
    """Build the model with random weights, like a rollout that waits for its first version, in a process of its own."""
    keep_weights()
    cpu_kernels.install_kernels()
    module = initialize_model(config)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(module, config.model_config)
    pack(module, config)
    return module


def pack(module: torch.nn.Module, config: VllmConfig) -> None:
    """Process the weights as vLLM does after loading."""
    process_weights_after_loading(module, config.model_config, torch.device("cpu"))


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | {f"buffer {name}": tensor for name, tensor in module.named_buffers()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def form_of(folder: Path) -> str:
    return (folder / "form").read_text()


def check_worker(rank: int, folder: Path, config: VllmConfig) -> None:
    """Load one instance, adopt two versions in another, and compare both."""
    form, tp = form_of(folder), config.parallel_config.tensor_parallel_size
    module = build_random(config)
    before = {name: tensor.data_ptr() for name, tensor in state(module).items()}
    published = published_model(PublishedModel.of(config), form)
    recorded = record_quantised(module, config, published, f"worker {rank}")
    layout = recorded.layout
    if config.model_config.hf_config.model_type in FAMILIES:
        assert shards_by_place(layout) == by_the_table(rank, folder, config, form)
    loader = PartLoader(module, config, published, recorded)
    assert loader.part_bytes == packing_bytes(to_compact(layout)).max()
    full = [torch.load(folder / str(seed) / "trained.pt") for seed in range(2)]
    with (
        Publisher(layout_of(full[0], "policy-0"), transport="tcp", quantise=recipe_of(form)) as publisher,
        closing(Puller(layout)) as puller,
    ):
        plan = make_plan(publisher.layout, layout)
        for version, weights in enumerate(full):
            offer = publisher.publish(version, weights)
            report = puller.pull(offer, plan, deadline_s=DEADLINE_S)
            experts = sum(tensor.nbytes for name, tensor in weights.items() if ".experts." in name)
            others = sum(tensor.nbytes for tensor in weights.values()) - experts
            assert report.size_bytes < 0.6 * others + experts  # codes, not numbers, except of experts
            root = puller.switch_in_parts(loader.parts_to_fill(), offer).root
            assert (puller.version, root) == (version, offer.root)
            expected = state(load_quantised(folder / str(version), config))
            found = state(module)
            assert {*found} == {*expected}
            for name, tensor in expected.items():
                assert (found[name].shape, found[name].stride()) == (tensor.shape, tensor.stride()), name
                assert found[name].dtype == tensor.dtype, name
                assert torch.equal(bits(found[name]), bits(tensor)), f"{name} of version {version}"
                assert found[name].data_ptr() == before[name], f"{name} moved"
            check_product(module, dequantised(form, weights), rank, tp)


def by_the_table(rank: int, folder: Path, config: VllmConfig, form: str) -> dict[tuple[str, str], list[BoxCopy]]:
    """Return the shards by the family's table, with vLLM's names of codes and scales."""
    written = json.loads((folder / "0" / "config.json").read_text())
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    canonical = worker_table(written, rank, tp=config.parallel_config.tensor_parallel_size, dtype=dtype)
    table = in_terms_of(canonical, transformers_table(written, dtype))
    plain = layout_of_parameters("worker", table.tensors, [table.parameters])
    layout = received_layout(plain, recipe_of(form))
    scaled = {name.rpartition(".")[0] for name, _ in shards_by_place(layout) if "weight_scale" in name}
    return {
        (VLLM_FORMATS[form].parameter(name) if name.rpartition(".")[0] in scaled else name, tensor): copies
        for (name, tensor), copies in shards_by_place(layout).items()
    }


def check_product(module: torch.nn.Module, full: dict[str, torch.Tensor], rank: int, tp: int) -> None:
    """Compare the output of a layer with the product by its dequantised weight."""
    name = "model.layers.1.mlp.down_proj"
    layer: Any = module.get_submodule(name)
    weight = full[f"{name}.weight"].chunk(tp, dim=1)[rank]
    x = torch.randn(5, weight.shape[1], dtype=weight.dtype)
    assert torch.equal(layer.quant_method.apply(layer, x), torch.nn.functional.linear(x, weight))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("form", "name", "tp"),
    [
        ("mxfp8", "qwen2", 2),
        ("mxfp4", "qwen3 tied", 2),
        ("nvfp4", "qwen2", 2),
        ("fp8_row", "qwen3_moe", 2),
        ("fp8_block", "qwen3_moe", 1),
        ("fp8_row", "phi3", 2),
        ("mxfp8", "gemma3", 2),
        ("mxfp4", "olmo2", 2),
        ("nvfp4", "phi3", 1),
        pytest.param("fp8_row", "qwen2", 1, marks=pytest.mark.campaign),
        pytest.param("fp8_row", "qwen3 tied", 2, marks=pytest.mark.campaign),
        pytest.param("fp8_block", "qwen2", 2, marks=pytest.mark.campaign),
    ],
)
def test_adoption_equals_loading_a_checkpoint(
    form: str, name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = "bfloat16" if form == "nvfp4" else "float32"
    for seed in range(2):
        write_model(tmp_path / str(seed), name, form, seed)
    (tmp_path / "form").write_text(form)
    spec = spec_of(tmp_path / "0", quantise=form, dtype=dtype)
    config = engine_config(tmp_path / "0", tp, 1, dtype=dtype, hf_overrides=overrides(spec))
    in_workers(check_worker, config, tmp_path, monkeypatch)


def exchanged(name: str) -> str:
    """Return vLLM's name of a part, with the scales of two whole tensors exchanged."""
    layers = [f"model.layers.{layer}.self_attn.o_proj.weight_scale_2" for layer in range(2)]
    return layers[1 - layers.index(name)] if name in layers else VLLM_FORMATS["nvfp4"].parameter(name)


def check_rejections(rank: int, folder: Path, config: VllmConfig) -> None:
    """Check the errors for layers that vLLM has in full precision, and for scales that belong to other layers."""
    form = form_of(folder)
    module = build_random(config)
    full = PublishedModel.of(config)
    if form == "nvfp4":
        apart = QuantisedModel(full, linear_weights(form), VLLM_FORMATS[form].parameter)
        with pytest.raises(WeightsError, match=r"one scale for all of .*q_proj.weight and .*k_proj.weight, and each"):
            record_quantised(module, config, apart, "worker 0")
        moved = QuantisedModel(full, recipe_of(form), exchanged)
        with pytest.raises(
            WeightsError, match=r"does not put all scales of model.layers.0.self_attn.o_proj.weight bes"
        ):
            record_quantised(module, config, moved, "worker 0")
        return
    with pytest.raises(WeightsError, match=r"vLLM's loader of .* does not take .*0.mlp.down_proj.weight.* Leave weig"):
        record_quantised(module, config, published_model(full, form), "worker 0")


@pytest.mark.parametrize("form", ["fp8_row", "nvfp4"])
def test_parameters_that_differ_from_the_format_are_rejected(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path / "0", "qwen2", form, 0)
    (tmp_path / "form").write_text(form)
    dtype = "bfloat16" if form == "nvfp4" else "float32"
    changed = overrides(spec_of(tmp_path / "0", quantise=form, dtype=dtype))
    if form == "fp8_row":
        changed["quantization_config"]["ignore"].append("model.layers.0.mlp.down_proj")
    config = engine_config(tmp_path / "0", 1, 1, dtype=dtype, hf_overrides=changed)
    in_workers(check_rejections, config, tmp_path, monkeypatch)


REFUSED = {
    ("gpt2", "fp8_row", 1): r"does not take what transformers would save at transformer.h.0.attn.c_attn.weight_scale",
    ("mistral", "mxfp4", 2): r"one scale for 1 x 32 elements, .* would hold 64 x 48 of model.layers.0.mlp.down_proj.w",
}


def check_refused(rank: int, folder: Path, config: VllmConfig) -> None:
    """Check the sentence for a model that does not fit the format."""
    kind, form = form_of(folder).split()
    module = build_random(config)
    with pytest.raises(WeightsError, match=REFUSED[kind, form, config.parallel_config.tensor_parallel_size]):
        record_quantised(module, config, published_model(PublishedModel.of(config), form), f"worker {rank}")


@pytest.mark.parametrize(("kind", "form", "tp"), REFUSED)
def test_models_that_do_not_fit_the_format_are_refused(
    kind: str, form: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "0", kind)
    (tmp_path / "form").write_text(f"{kind} {form}")
    config = engine_config(tmp_path / "0", tp, 1, hf_overrides=overrides(spec_of(tmp_path / "0", quantise=form)))
    in_workers(check_refused, config, tmp_path, monkeypatch)
