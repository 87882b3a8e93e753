"""`starling plan`: from words or files to a page, a chart or JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_weights_plan import whole

from starling.cli.main import main
from starling.weightsync.layouts.symbolic import model_layout, shard_layout
from starling.weightsync.plan.layout import encode

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
NUM_BYTES = 2 * (2 * 256 * 64 + 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128 + 2 * 64))
"""Of the tiny model in bfloat16."""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_plan_prints_numbers_for_a_parallelism(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "fsdp4", "tp2", "--model", config, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    norms = 2 * 5 * 64  # each rank of the destination has them all
    assert found["estimate"]["total_bytes"] == NUM_BYTES + norms
    assert sum(num_bytes for _, _, num_bytes in found["pairs"]) == NUM_BYTES + norms
    assert {source for source, _, _ in found["pairs"]} == {0, 1, 2, 3}
    assert NUM_BYTES // 4 <= found["snapshots_bytes"] // 2 <= NUM_BYTES // 4 + 64 * 32  # a quarter of it, padded
    parts = [found["estimate"][name] for name in ("pack_s", "wire_s", "unpack_s", "wait_s")]
    assert found["estimate"]["seconds"] == pytest.approx(sum(parts))


def test_publisher_bytes_do_not_grow_with_replicas(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "fsdp4", "tp1 x8", "--model", config, "--json", "--bucket-mib", "0.01"])
    found = json.loads(capsys.readouterr().out)
    assert found["replicas"] == 8
    assert found["estimate"]["total_bytes"] == 8 * NUM_BYTES
    assert found["estimate"]["publisher_bytes"] == NUM_BYTES == found["one_replica"]["total_bytes"]


def test_quantised_plan_has_fewer_bytes(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("policy", "fsdp4"), ("rollout", "tp1")):
        (tmp_path / name).write_bytes(encode(shard_layout(model_layout(TINY, words), f"{name}-0")))
    kept = 2 * (2 * 256 * 64 + 64 + 2 * 2 * 64)
    codes = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    num_rows = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    for sides in (["fsdp4", "tp1", "--model", config], [str(tmp_path / "policy"), str(tmp_path / "rollout")]):
        assert main(["plan", *sides, "--quantise", "fp8_row", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["estimate"]["total_bytes"] == kept + codes + 4 * num_rows
        assert found["packing_bytes"] == 2 * 128 * 64 + 4 * 2 * 128  # gate and up: one layer in vLLM
    assert main(["plan", "fsdp4", "tp2", "--model", config, "--quantise", "fp8_row"]) == 0
    assert "repacking         8.70 kB on a rank of vllm: one layer" in capsys.readouterr().out
    assert main(["plan", "fsdp4", "tp2", "--model", config]) == 0
    assert "repacking" not in capsys.readouterr().out
    assert main(["plan", "fsdp4", "tp1", "--model", config, "--quantise", "fp7"]) != 0
    assert "There is no format 'fp7'" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".svg", ".png"])
@pytest.mark.parametrize("destination", ["tp2", "tp2 x3"])
def test_plan_draws_a_chart(
    ending: str, destination: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"plan{ending}"
    assert main(["plan", "fsdp2", destination, "--model", config, "--picture", str(path)]) == 0
    page = capsys.readouterr().out
    assert "peak staging" in page
    assert ("replica 2" if "x3" in destination else "engine-0") in (
        path.read_text() if ending == ".svg" else "replica 2 engine-0"
    )
    assert path.read_bytes().startswith(b"<?xml" if ending == ".svg" else b"\x89PNG")


def test_plan_reads_layout_files_and_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rows in (("policy", (2, 4)), ("rollout", (3, 3))):
        (tmp_path / name).write_bytes(encode(whole(f"{name}-0", (6, 3), rows=rows)))
    topology = tmp_path / "two.toml"
    topology.write_text("[[hosts]]\nname='big'\ngpus=4\nnics=[{name='eth',gb_per_s=1}]\n")
    arguments = ["plan", str(tmp_path / "policy"), str(tmp_path / "rollout"), "--topology", str(topology)]
    assert main([*arguments, "--rows", "1"]) == 0
    page = capsys.readouterr().out
    assert "policy-0 (2 ranks) -> rollout-0 (2 ranks)" in page
    assert "moved             72 B" in page
    assert "snapshots         128 B on a rank of the source" in page
    assert "big/cuda:1 host out" in page
    assert "... and 2 pairs more" in page


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fsdp4", "tp2"], "needs the model too: --model NAME"),
        (["fsdp4", "tp2", "--model", "gpt-9"], "'gpt-9' is neither a file nor a known model; known: deepseek-v3"),
        (["fsdp4", "xy2", "--model", "qwen3-0.6b"], "'xy2' in 'xy2' is not a parallelism"),
        (["tp1 x2", "tp2", "--model", "qwen3-0.6b"], "the source 'tp1 x2' is 2 replicas"),
        (
            ["fsdp4", "tp2", "--model", "qwen3-0.6b", "--topology", "{small}"],
            "has 2 GPUs, but 'fsdp4' and 'tp2' need 6",
        ),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--picture", "a.gif"], "end its name in .svg or .png"),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--topology", "nowhere.toml"], "nowhere.toml cannot be read"),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--bucket-mib", "0"], "--bucket-mib 0 is out of range"),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--bucket-mib", "1e-9"], "bucket_bytes is 0"),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--bucket-mib", "nan"], "--bucket-mib nan is out of range"),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--bucket-mib", "1e300"], "--bucket-mib 1e+300 is out of range"),
        (["fsdp4", "tp2", "--model", "qwen3-0.6b", "--rows", "-5"], "--rows -5 is not a number of rows"),
        (["fsdp" + "9" * 200, "tp2", "--model", "qwen3-0.6b"], "has a size of more than 5 digits"),
        (["fsdp0", "tp2", "--model", "qwen3-0.6b"], "has a size of zero"),
    ],
)
def test_plan_errors_are_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.toml"
    small.write_text("[[hosts]]\nname='a'\ngpus=2\n")
    assert main(["plan", *(text.format(small=small) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("starling: ")
    assert sentence in error
