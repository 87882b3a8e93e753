"""Recorded layouts of workers whose layers vLLM processes after loading, against vLLM's own loading of checkpoints.

Without the engine's patch, vLLM's build for CPUs packs the weight of each linear layer and leaves an empty parameter.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import DEADLINE_S
from safetensors.torch import load_file
from test_layouts_vllm import CONFIGS
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from workers import engine_config, in_workers

from starling.common.errors import WeightsError
from starling.rollout.engine.vllm.quantised import VLLM_FORMATS
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.vllm.recorded import PartLoader, PublishedModel, record_worker


def loaded(config: VllmConfig, file: Path) -> torch.nn.Module:
    """Let vLLM load and process a checkpoint."""
    config.compilation_config.static_forward_context.clear()
    module = initialize_model(config)
    module.load_weights(iter(load_file(file).items()))
    process_weights_after_loading(module, config.model_config, torch.device("cpu"))
    return module


def check_processed(rank: int, folder: Path, config: VllmConfig) -> None:
    """Pull two versions into one instance, and compare each with another instance that vLLM has loaded."""
    module = loaded(config, folder / "0" / "model.safetensors")
    published = PublishedModel.of(config)
    recorded = record_worker(module, config, published, f"worker {rank}")
    assert recorded.whole == ()
    packed = {name for name, layer in linear_layers(module).items() if not layer.weight.numel()}
    assert packed
    assert set(recorded.processed) == packed
    full = [torch.load(folder / str(seed) / "trained.pt") for seed in range(2)]
    loader = PartLoader(module, config, published, recorded)
    assert loader.part_bytes < sum(tensor.nbytes for tensor in full[0].values()) / 4
    with (
        Publisher(layout_of(full[0], "policy-0"), transport="tcp") as publisher,
        closing(Puller(recorded.layout)) as puller,
    ):
        plan = make_plan(publisher.layout, recorded.layout)
        for version in (1, 0):
            offer = publisher.publish(2 - version, full[version])
            puller.pull(offer, plan, deadline_s=DEADLINE_S)
            assert puller.switch_in_parts(loader.parts_to_fill(), offer).root == offer.root
            compare(module, loaded(config, folder / str(version) / "model.safetensors"))


def linear_layers(module: torch.nn.Module) -> dict[str, Any]:
    """Return the linear layers by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LinearBase)}


def compare(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Compare parameters, and the products of linear layers."""
    parameters = dict(found.named_parameters())
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameters[name], parameter), name
    layers = linear_layers(found)
    for name, layer in linear_layers(expected).items():
        x = torch.randn(3, getattr(layer, "input_size_per_partition", layer.input_size))
        products = [one.quant_method.apply(one, x, one.bias) for one in (layers[name], layer)]
        assert torch.equal(*products), name


@pytest.mark.parametrize(("name", "tp"), [("llama tied with biases", 2), ("qwen3 tied", 1)])
def test_processed_layers_equal_those_of_a_loaded_checkpoint(
    name: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, made = CONFIGS[name]
    for seed in range(2):
        torch.manual_seed(seed)
        module = getattr(transformers, kind)(made)
        for tensor in module.parameters():
            tensor.data.normal_()
        module.save_pretrained(tmp_path / str(seed))
        torch.save(dict(module.named_parameters()), tmp_path / str(seed) / "trained.pt")
    in_workers(check_processed, engine_config(tmp_path / "0", tp, 1), tmp_path, monkeypatch)


def check_reasons(rank: int, folder: Path, config: VllmConfig) -> None:
    """Check what is said of loaders that cannot be recorded."""
    module = initialize_model(config)
    published = PublishedModel.of(config)
    spec = published.tensors.pop("model.norm.weight")
    with pytest.raises(
        WeightsError, match=r"fills model.norm.weight \(1 such\) with no tensor of the transformers cla"
    ):
        record_worker(module, config, published, "worker 0")
    published.tensors[spec.name] = type(spec)(name=spec.name, shape=(7,), dtype=spec.dtype)
    with pytest.raises(WeightsError, match=r"does not take what transformers would save at model.norm.weight: "):
        record_worker(module, config, published, "worker 0")


def test_loaders_that_cannot_be_recorded_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, made = CONFIGS["llama"]
    getattr(transformers, kind)(made).save_pretrained(tmp_path)
    in_workers(check_reasons, engine_config(tmp_path, 1, 1), tmp_path, monkeypatch)


def check_cache_scales(rank: int, folder: Path, config: VllmConfig) -> None:
    """Check the error for scales of the cache, which nothing sets where weights are not quantised."""
    module = initialize_model(config)
    with pytest.raises(WeightsError, match=r"fills model.layers.0.self_attn.attn.\w_scale .* with no tensor"):
        record_worker(module, config, PublishedModel.of(config), "worker 0")


def test_scales_of_the_cache_that_no_version_fills_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, made = CONFIGS["llama"]
    getattr(transformers, kind)(made).save_pretrained(tmp_path)
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    only_cache = VLLM_FORMATS["fp8_row"].config(["re:.*"]) | {"kv_cache_scheme": scheme}
    config = engine_config(tmp_path, 1, 1, hf_overrides={"quantization_config": only_cache})
    in_workers(check_cache_scales, config, tmp_path, monkeypatch)
