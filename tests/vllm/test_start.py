"""What vLLM is started with, and what is refused before it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import transformers
from engines import checkpoint, spec_of

from starling.common.errors import ConfigError
from starling.common.settings import LoraSettings
from starling.rollout.engine.base import EngineLostError
from starling.rollout.engine.vllm import start
from starling.rollout.engine.vllm.engine import VllmEngine
from starling.rollout.engine.vllm.processes import engine_processes


def test_the_version_is_one_that_this_was_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start.check_version().startswith("vllm")
    monkeypatch.setattr(start, "TOO_NEW", (0, 32))
    with pytest.raises(ConfigError, match=r"wants vllm >=0.32,<0.32, and vllm\S* 0.\d+.* is installed"):
        start.check_version()
    monkeypatch.setattr(start, "DISTRIBUTIONS", ("no-such-engine",))
    with pytest.raises(ConfigError, match=r"there is none; install starling-rollout\[vllm\]"):
        start.check_version()


@pytest.mark.parametrize(
    ("engine_args", "sentence"),
    [
        ({"max_num_batch_tokens": 1}, "did you mean 'max_num_batched_tokens'"),
        ({"qqqq": 1}, "'qqqq', which vLLM does not know; remove it"),
        ({"tensor_parallel_size": 2}, "which other settings decide"),
    ],
)
def test_arguments_that_there_are_not(engine_args: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start.arguments(spec_of(tmp_path, vllm={"engine_args": engine_args}))


def test_heads_that_the_build_for_cpus_cannot_compute(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(hidden_size=64, num_attention_heads=4, head_dim=16, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="heads have 16 values, and vLLM's build for CPUs computes with 32, 64"):
        VllmEngine(spec_of(tmp_path))
    assert not engine_processes()


def test_settings_become_arguments(tmp_path: Path) -> None:
    made = start.arguments(
        spec_of(tmp_path, max_rows=7, load_weights=True, vllm={"kv_cache_mb": 3, "engine_args": {"block_size": 64}})
    )
    assert made["kv_cache_memory_bytes"] == 3 << 20
    assert (made["max_num_seqs"], made["load_format"], made["block_size"]) == (7, "auto", 64)
    assert start.arguments(spec_of(tmp_path))["load_format"] == "dummy"


def test_adapters_need_another_engine(tmp_path: Path) -> None:
    import dataclasses

    spec = spec_of(tmp_path)
    model = spec.model.model_copy(update={"lora": LoraSettings()})
    with pytest.raises(ConfigError, match="vllm takes whole weights only"):
        start.check_spec(dataclasses.replace(spec, model=model))


def test_the_environment_is_that_of_the_engine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_TEST_GIVEN", "mine")
    with start.with_environment({"STARLING_TEST_GIVEN": "ours", "STARLING_TEST_NEW": "ours"}):
        assert os.environ["STARLING_TEST_GIVEN"] == "mine"
        assert os.environ["STARLING_TEST_NEW"] == "ours"
        os.environ["STARLING_TEST_BY_VLLM"] = "x"
    assert "STARLING_TEST_NEW" not in os.environ
    assert "STARLING_TEST_BY_VLLM" not in os.environ


def test_an_engine_that_does_not_come_up_leaves_nothing(tmp_path: Path) -> None:
    before = engine_processes()
    with pytest.raises(EngineLostError, match="start_timeout_s = 2 s"):
        VllmEngine(spec_of(checkpoint(tmp_path / "model", "llama", 0), vllm={"start_timeout_s": 2.0}))
    assert engine_processes() == before
