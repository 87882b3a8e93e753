"""`starling plan --gpus`: a table of meshes for training."""

from __future__ import annotations

import json

import pytest

from starling.cli.main import main

MODEL = ("plan", "--model", "qwen3-8b")


def test_flags_of_the_best_mesh_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--gpus", "64", "--rows", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8.19 billion parameters on 64 GPUs of 80 GB, 8 in a host"
    assert lines[1] == "a step: 1,048,576 tokens, in microbatches of 16,384"
    assert [line.split("  ")[0] for line in lines[4:6]] == ["dp_shard 32 x tp 2", "dp_replicate 2 x dp_shard 16 x tp 2"]
    assert lines[-1] == "--policy.parallel.dp-shard 32 --policy.parallel.tp 2 --policy.memory.checkpointing none"


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MODEL, "--gpus", "64", "--json", "--rows", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    (mesh,) = found["meshes"]
    assert found["parameters"] == 8190735360
    assert mesh["mesh"]["dp_shard"] == 32
    assert set(mesh["traffic"]) == {"dp_shard", "tp"}
    assert mesh["tokens_per_s_and_gpu"] == pytest.approx((1 << 20) / (mesh["compute_s"] + mesh["waiting_s"]) / 64)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("plan", "--gpus", "4"), "--gpus proposes meshes for a model: write `starling plan --model NAME --gpus"),
        (MODEL, "give SOURCE and DESTINATION of a weight synchronisation, or --model and --gpus"),
        ((*MODEL, "--gpus", "-3"), "--gpus -3 is not a size; give a number above 0"),
        ((*MODEL, "--gpus", "8", "--gpu-gb", "0"), "--gpu-gb 0 is not a size"),
        ((*MODEL, "--gpus", "8", "--sequence-tokens", "-1"), "--sequence-tokens -1 is not a size"),
        ((*MODEL, "--gpus", "2000000"), "--gpus 2000000 is too many; give at most 1000000"),
        ((*MODEL, "--gpus", "8", "--quantise", "fp8_row"), "--quantise fp8_row describes a weight synchronisation"),
        (
            (*MODEL, "--gpus", "8", "--picture", "x.svg"),
            "--picture x.svg describes a weight synchronisation",
        ),
        ((*MODEL, "--gpus", "8", "--bucket-mib", "4"), "--bucket-mib 4.0 describes a weight synchronisation"),
        (("plan", "fsdp8", "tp4", *MODEL[1:], "--gpu-gb", "40"), "--gpu-gb 40.0 describes a mesh, and SOURCE and"),
        ((*MODEL, "--gpus", "8", "--gpu-gb", "10"), "no mesh of 8 GPUs fits into 90% of 10 GB each"),
    ],
)
def test_what_cannot_be_planned_is_one_sentence(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert sentence in capsys.readouterr().err
