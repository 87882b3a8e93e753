"""Quantised weights in vLLM's layers: after an adoption they are bitwise those that vLLM's loader produces.

For each parallelism, one process per worker builds the real class twice. The first instance loads a checkpoint of
torchao's codes and scales through vLLM. The second starts with random weights and adopts two versions that a publisher
quantises. All parameters and buffers of both must then have the same bits, and those of the second their old addresses.
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
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from workers import DEADLINE_S, engine_config, in_workers

from starling.common.errors import WeightsError
from starling.rollout.engine.vllm.quantised import overrides, recipe_of
from starling.rollout.engine.vllm.worker import cpu_kernels
from starling.rollout.engine.vllm.worker.packing import Packer, packed_layout
from starling.weightsync.layouts.vllm import worker_table
from starling.weightsync.plan.compact import to_compact
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.quantise.layouts import packing_bytes
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.vllm.cpu import keep_weights

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
    """Process the weights as vLLM does after loading, except quantised experts, which vLLM cannot run on CPUs."""
    for layer in module.modules():
        if isinstance(layer, RoutedExperts):
            layer.quant_method.process_weights_after_loading = lambda _: None
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
    written = json.loads((folder / "0" / "config.json").read_text())
    table = worker_table(written, rank, tp=tp, dtype=str(config.model_config.dtype).removeprefix("torch."))
    layout = packed_layout(module, f"worker {rank}", table, form)
    packer = Packer(module, layout, 0, form, config)
    assert packer.layer_bytes == packing_bytes(to_compact(layout)).max()
    full = [load_file(folder / str(seed) / "model.safetensors") for seed in range(2)]
    with (
        Publisher(layout_of(full[0], "policy-0"), transport="tcp", quantise=recipe_of(form)) as publisher,
        closing(Puller(layout)) as puller,
    ):
        plan = make_plan(publisher.layout, layout)
        for version, weights in enumerate(full):
            offer = publisher.publish(version, weights)
            report = puller.pull(offer, plan, deadline_s=DEADLINE_S)
            assert report.size_bytes < 0.6 * sum(tensor.nbytes for tensor in weights.values())  # codes, not numbers
            root = puller.switch_in_parts(packer.layers_to_fill(), offer).root
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


def check_rejections(rank: int, folder: Path, config: VllmConfig) -> None:
    """Check the errors for a layout of another format, and for layers that vLLM does not have."""
    form = form_of(folder)
    written = json.loads((folder / "0" / "config.json").read_text())
    module = build_random(config)
    other = packed_layout(module, "worker 0", worker_table(written, rank), "mxfp8")
    with pytest.raises(WeightsError, match=r"qkv_proj.weight_scale has 6144 bytes by the model's table, and 3072 in"):
        Packer(module, other, 0, form, config)
    untied = worker_table(written | {"tie_word_embeddings": False}, rank)
    with pytest.raises(WeightsError, match=r"vLLM has no parameter for lm_head.weight, which the model's table lists"):
        Packer(module, packed_layout(module, "worker 0", untied, form), 0, form, config)


def test_parameters_that_differ_from_the_layout_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "0", "qwen3 tied", "fp8_row", 0)
    (tmp_path / "form").write_text("fp8_row")
    config = engine_config(tmp_path / "0", 1, 1, hf_overrides=overrides(spec_of(tmp_path / "0", quantise="fp8_row")))
    in_workers(check_rejections, config, tmp_path, monkeypatch)
