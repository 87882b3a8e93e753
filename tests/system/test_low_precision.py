"""Runs with quantised rollout weights of 8 and 4 bits, of which only codes and scales are transferred, and runs whose
policy computes in FP8, which transfers what it would without."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from system_runs import attempt, make_workdir, metrics, run, run_concurrently, starling_command

from starling.weightsync.plan.layout import item_bytes
from starling.weightsync.quantise.layouts import received_layout
from starling.weightsync.quantise.recipe import linear_weights
from starling.weightsync.tensors.modules import layout_of

CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
RUN_S = 300.0
"""Deadline of a run, on a busy machine with fewer processors than the policy has ranks."""


MODEL = {"scratch": {"alphabet": "abcdefghijklmnopqrstuvwxyz>", "max_length": 24, "config": CONFIG}}


def quantised(folder: Path, form: str, least: float, most: float) -> None:
    make_workdir(folder, model=MODEL, weights={"quantise": form})
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    checkpoint = load_file(attempt(folder) / "checkpoints/step-9/model.safetensors")
    whole = sum(tensor.nbytes for tensor in checkpoint.values())
    expected = received_layout(layout_of(checkpoint, "rollout-0"), linear_weights(form))
    size = sum(item_bytes(tensor) * math.prod(tensor.shape) for tensor in expected.tensors)
    adopted = metrics(folder, "adopted")
    assert len(adopted) > 1, "versions after the first"
    assert all(line["attested"] and line["sent_bytes"] == line["size_bytes"] == size for line in adopted)
    assert least < size / whole < most
    steps = [line for line in metrics(folder, "step") if line["phase"] == "rl"]
    assert len(steps) == 6
    # The rollout samples from quantised weights, and the metrics report the mismatch.
    assert all(1e-7 < line["mismatch_kl"] < 1.0 for line in steps if "mismatch_kl" in line)
    assert any("mismatch_kl" in line for line in steps)


@pytest.mark.system
@pytest.mark.parametrize(
    ("form", "least", "most"),
    [("mxfp4", 0.13, 0.2), pytest.param("fp8_row", 0.25, 0.32, marks=pytest.mark.campaign)],
)
def test_quantised_run_transfers_only_codes_and_scales(form: str, least: float, most: float, tmp_path: Path) -> None:
    quantised(tmp_path, form, least, most)


def computed(folder: Path, precision: dict[str, Any], **parallel: int) -> None:
    make_workdir(folder, model=MODEL, policy={"precision": precision, "parallel": parallel})
    with run(folder) as command:
        assert command.wait(RUN_S) == 0, command.transcript()
    (line,) = re.findall(r"low_precision .*", (attempt(folder) / "logs" / "policy-0.log").read_text())
    assert {f"kind={precision['kind']}", "num_layers=14", "num_linear=15"} <= set(line.split())
    checkpoint = load_file(attempt(folder) / "checkpoints/step-9/model.safetensors")
    adopted = metrics(folder, "adopted")
    assert len(adopted) > 1, "versions after the first"
    assert all(one["attested"] for one in adopted)
    assert {one["size_bytes"] for one in adopted} == {sum(tensor.nbytes for tensor in checkpoint.values())}
    steps = [one for one in metrics(folder, "step") if one["phase"] == "rl"]
    assert len(steps) == 6
    # The rollout computes in float32, and the metrics report the mismatch.
    mismatch = [one["mismatch_kl"] for one in steps if "mismatch_kl" in one]
    assert mismatch
    assert all(1e-8 < one < 0.02 for one in mismatch), "the bound of the alarm"


@pytest.mark.campaign
@pytest.mark.system
def test_dry_run_finds_torchao(tmp_path: Path) -> None:
    """Which it otherwise hides from transformers. Nothing is said of kernels for GPUs that a CPU cannot load."""
    make_workdir(tmp_path, model=MODEL)
    flags = ("--policy.precision.kind", "fp8_rowwise", "--policy.optimizer.kind", "adamw_8bit")
    with starling_command(tmp_path, "run", "tiny.toml", "--dry-run", "--model.device=cpu", *flags) as command:
        assert command.wait() == 0, command.transcript()
        assert "precision: fp8_rowwise in 14 of 15 linear layers, emulated on cpu" in command.output
        assert torch.cuda.is_available() or "torchao" not in command.errors


@pytest.mark.system
@pytest.mark.campaign
def test_rollouts_attest_the_weights_of_policies_that_compute_in_fp8(tmp_path: Path) -> None:
    codes = {"kind": "fp8_tensorwise", "fsdp_all_gather": True}
    run_concurrently(
        partial(computed, tmp_path / "alone", {"kind": "fp8_rowwise"}),
        partial(computed, tmp_path / "ranks", codes, dp_shard=2),
        max_workers=2,
    )
