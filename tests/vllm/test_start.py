"""Launch parameters of vLLM, and settings that are rejected before it starts."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from engines import (
    DEADLINE_S,
    checkpoint,
    engine_driver,
    forward_logprobs,
    random_prompt,
    read_model,
    spec_of,
)

from starling.common.errors import ConfigError
from starling.common.observe.process import ServiceStopped, StopSignal
from starling.rollout.engine.base import EngineLostError
from starling.rollout.engine.vllm import async_llm, cpu, launch
from starling.rollout.engine.vllm.engine import VllmEngine
from starling.rollout.engine.vllm.processes import engine_processes
from starling.rollout.settings import VllmSettings
from starling.weightsync.vllm import versions


def test_check_version_rejects_unsupported_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.check_version().startswith("vllm")
    monkeypatch.setattr(versions, "TOO_NEW", (0, 32))
    with pytest.raises(ConfigError, match=r"needs vllm >=0.32,<0.34, and vllm\S* 0.\d+.* is installed"):
        launch.check_version()
    monkeypatch.setattr(versions, "DISTRIBUTIONS", ("no-such-engine",))
    with pytest.raises(ConfigError, match=r"none is installed; install starling-rollout\[vllm\]"):
        launch.check_version()


@pytest.mark.parametrize(
    ("engine_args", "sentence"),
    [
        ({"max_num_batch_tokens": 1}, "did you mean 'max_num_batched_tokens'"),
        ({"qqqq": 1}, "'qqqq', which vLLM does not know; remove it"),
        ({"tensor_parallel_size": 2}, "which other settings decide"),
        ({"data_parallel_size": 2}, "data_parallel_size = 2: a version would be adopted by one of several engines"),
        ({"enable_eplb": True}, "enable_eplb = True: experts that move between workers"),
        ({"enable_lora": True}, r"adapters are those of \[model.lora\]; remove it"),
        ({"logprobs_mode": "processed_logprobs"}, "training needs those of softmax"),
    ],
)
def test_invalid_engine_args_are_rejected(engine_args: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        launch.arguments(spec_of(tmp_path, vllm={"engine_args": engine_args}), on_cpu=True)


def test_head_size_without_cpu_support_is_rejected(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="heads have size 16, and vLLM's build for CPUs supports 32, 64"):
        VllmEngine(spec_of(tmp_path))
    assert not engine_processes()


def test_expert_parallelism_on_cpus_is_rejected(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(hidden_size=64, num_attention_heads=2, head_dim=32, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    vllm = {"tensor_parallel_size": 2, "engine_args": {"enable_expert_parallel": True}}
    with pytest.raises(ConfigError, match="enable_expert_parallel, which vLLM's build for CPUs does not support"):
        VllmEngine(spec_of(tmp_path, vllm=vllm))
    assert not engine_processes()


MOE = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "tp", "sentence"),
    [
        (transformers.Qwen3MoeConfig(**MOE, hidden_size=80), 1, "hidden size 80, and vLLM's .* multiples of 32"),
        (transformers.MixtralConfig(**MOE, hidden_size=48), 2, "hidden size 48"),
        (transformers.GptOssConfig(**MOE, hidden_size=96, intermediate_size=96), 2, "size per worker 48"),
    ],
)
def test_experts_that_cpus_cannot_pack_are_rejected(config: Any, tp: int, sentence: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{sentence}.*set rollout.engine = 'transformers'"):
        VllmEngine(spec_of(tmp_path, vllm={"tensor_parallel_size": tp}))
    assert not engine_processes()


@pytest.mark.campaign
def test_experts_of_other_sizes_start(tmp_path: Path) -> None:
    """The kernel pads the intermediate size, here 40; see the conditions of vLLM itself in `cpu_moe`."""
    folder, prompt = checkpoint(tmp_path, "qwen3_moe of odd sizes", 0), random_prompt(9, 0)
    with engine_driver(folder, load_weights=True) as engine:
        result = engine.generate(prompt, max_tokens=8)
    (completion,) = result.completions
    expected = forward_logprobs(read_model(folder), prompt, completion.token_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_dense_models_of_any_size_are_accepted() -> None:
    cpu.check_experts(VllmSettings(), transformers.Qwen3Config(hidden_size=80))
    cpu.check_experts(VllmSettings(), transformers.GptOssConfig(hidden_size=96, intermediate_size=64))


def test_arguments_follow_the_settings(tmp_path: Path) -> None:
    vllm = {"kv_cache_mb": 3, "engine_args": {"block_size": 64, "nnodes": 1}}
    made = launch.arguments(spec_of(tmp_path, max_rows=7, load_weights=True, vllm=vllm), on_cpu=True)
    assert made["kv_cache_memory_bytes"] == 3 << 20
    assert (made["max_num_seqs"], made["load_format"], made["block_size"]) == (7, "hf", 64)
    assert launch.arguments(spec_of(tmp_path), on_cpu=True)["load_format"] == "dummy"


def test_sleep_mode_is_for_gpus_only(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, vllm={"engine_args": {"enable_sleep_mode": True}})
    assert launch.arguments(spec, on_cpu=False)["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in launch.arguments(spec, on_cpu=True)


def test_quantisation_is_passed_in_the_model_configuration(tmp_path: Path) -> None:
    spec = spec_of(checkpoint(tmp_path / "model", "qwen3", 0), quantise="mxfp4")
    made = launch.arguments(spec, on_cpu=True)
    quantisation = made["hf_overrides"]["quantization_config"]
    assert (quantisation["quant_method"], quantisation["format"]) == ("compressed-tensors", "mxfp4-pack-quantized")
    assert {"lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_norm"} <= {*quantisation["ignore"]}
    assert not any("proj" in name for name in quantisation["ignore"])
    assert r"re:.*\.experts\..*" in quantisation["ignore"]
    spec = spec_of(spec.path, quantise="mxfp4", vllm={"engine_args": {"quantization": "fp8"}})
    with pytest.raises(ConfigError, match="'quantization', which other settings decide"):
        launch.arguments(spec, on_cpu=True)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("qwen3", {"quantise": "fp8_row", "load_weights": True}, "those of model.path .rollout.load_weights.; leave"),
        ("qwen3", {"quantise": "nvfp4"}, "'nvfp4' on vllm computes in bfloat16 only; set model.dtype"),
        (
            "qwen3",
            {"quantise": "fp8_block"},
            "one scale of 128 x 128 elements, and worker 0 of vllm would hold 128 x 64 of",
        ),
        (
            "qwen3",
            {"quantise": "mxfp4", "vllm": {"tensor_parallel_size": 2}},
            "one scale of 1 x 32 elements, and worker 0 of vllm would hold 64 x 48 of model.layers.0.mlp.down_proj",
        ),
    ],
)
def test_unsupported_quantisation_is_rejected(
    family: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        launch.check_spec(spec_of(checkpoint(tmp_path / "model", family, 0), **changes))


def test_quantised_latent_attention_is_rejected(tmp_path: Path) -> None:
    transformers.DeepseekV3Config(num_hidden_layers=1, hidden_size=128).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="derives further weights from those of latent attention"):
        launch.check_spec(spec_of(tmp_path, quantise="fp8_row"))


@pytest.mark.parametrize(("form", "least"), [("fp8_row", 7.5), ("fp8_block", 7.5), ("mxfp4", 8.0), ("nvfp4", 7.5)])
def test_old_gpus_are_rejected(form: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's platform queries are patched to those of an old GPU."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    path = checkpoint(tmp_path / "model", "qwen3", 0)
    config = json.loads((path / "config.json").read_text()) | {"hidden_size": 128, "intermediate_size": 128}
    (path / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    spec = spec_of(path, quantise=form, dtype="bfloat16")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(7, 0))
    with pytest.raises(ConfigError, match=f"needs a GPU of compute capability {least} for vllm, and this one has 7.0"):
        launch.check_spec(spec)
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *_: DeviceCapability(9, 0))
    launch.check_spec(spec)


def test_with_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_TEST_GIVEN", "mine")
    with launch.with_environment({"STARLING_TEST_GIVEN": "ours", "STARLING_TEST_NEW": "ours"}):
        assert os.environ["STARLING_TEST_GIVEN"] == "mine"
        assert os.environ["STARLING_TEST_NEW"] == "ours"
        os.environ["STARLING_TEST_BY_VLLM"] = "x"
    assert "STARLING_TEST_NEW" not in os.environ
    assert "STARLING_TEST_BY_VLLM" not in os.environ


def test_groups_of_workers_on_one_host_listen_on_it_alone(tmp_path: Path) -> None:
    """vLLM unpickles what they send, and gloo asks for no key."""
    spec = spec_of(tmp_path, vllm={"tensor_parallel_size": 2})
    assert launch.environment(spec, on_cpu=True)["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.usefixtures("cold_processes")
def test_start_timeout_leaves_no_process(tmp_path: Path) -> None:
    before = engine_processes()
    with pytest.raises(EngineLostError, match="start_timeout_s = 2 s"):
        VllmEngine(spec_of(checkpoint(tmp_path / "model", "llama", 0), vllm={"start_timeout_s": 2.0}))
    assert engine_processes() == before


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    stop = StopSignal()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("cold_processes")
@pytest.mark.parametrize("poll_s", [async_llm.POLL_S, pytest.param(DEADLINE_S, marks=pytest.mark.campaign)])
def test_cancelled_start_leaves_no_process(
    tmp_path: Path, stop: StopSignal, monkeypatch: pytest.MonkeyPatch, poll_s: float
) -> None:
    """Cancelled both during the start and after it, before the first poll."""
    monkeypatch.setattr(async_llm, "POLL_S", poll_s)
    folder, before = checkpoint(tmp_path / "model", "llama", 0), engine_processes()

    def terminate() -> None:
        end = time.monotonic() + DEADLINE_S
        while engine_processes() == before and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    with pytest.raises(ServiceStopped), stop.interruptible():
        VllmEngine(spec_of(folder))
    thread.join()
    assert engine_processes() == before
