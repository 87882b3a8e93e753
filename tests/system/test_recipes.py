"""The shipped recipes and `starling smoke`, run as documented (the quickstart with fewer steps)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from run_folders import check_page
from safetensors.torch import load_file
from system_runs import Command
from transformers import AutoModelForCausalLM, AutoTokenizer

from starling.cli.recipe.schema import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
FRESH = ("--rl.max-staleness", "0")
"""Only of tokens of the newest version is there a mismatch, and a busy policy may train none of them."""
RUN_S = 600.0
"""Deadline of a run whose policy emulates FP8, on a busy machine."""
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.system


def metrics(attempt: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_every_recipe_resolves(tmp_path: Path) -> None:
    pretrained = tmp_path / "pretrained"  # stands for the checkpoint of another recipe
    pretrained.mkdir()
    (pretrained / "config.json").write_text("{}")
    (pretrained / "model.safetensors").touch()
    recipes = sorted(RECIPES.glob("*.toml"))
    assert recipes
    for path in recipes:
        flags = ["--model.path", str(pretrained)] if path.stem in ("lora", "dpo", "distill", "evaluate") else []
        flags += ["--teacher.path", str(pretrained)] if path.stem == "distill" else []
        assert load_recipe([path], flags).run.name == path.stem


def test_every_recipe_of_a_diffusion_model_resolves(tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    for part in ("transformer", "vae"):
        (pipeline / part).mkdir(parents=True)
        (pipeline / part / "config.json").write_text("{}")
    (pipeline / "transformer" / "diffusion_pytorch_model.safetensors").touch()
    (pipeline / "model_index.json").write_text("{}")
    recipes = sorted(path for path in (RECIPES / "world").glob("*.toml") if path.stem != "rewards")
    assert recipes
    for path in recipes:
        flags = [] if path.stem.startswith("tiny-") else ["--model.path", str(pipeline), "--data.source", "a.jsonl"]
        assert load_recipe([path], flags).run.name == path.stem


@pytest.mark.campaign
def test_quickstart_writes_its_results(tmp_path: Path) -> None:
    command = Command(tmp_path, "run", str(RECIPES / "quickstart.toml"), "--rl.num-steps", "60")
    assert command.wait(170) == 0, command.transcript()
    attempt = tmp_path / "runs/quickstart/attempt-1"
    before, after = metrics(attempt, "evaluation")
    assert (before["version"], after["version"]) == (220, 280)
    assert before["num_failed"] == after["num_failed"] == 0
    assert 0.0 < before["reward_mean"] <= 1.0
    assert max(line["staleness_max"] for line in metrics(attempt, "step") if "staleness_max" in line) <= 1
    assert all(line["attested"] and line["transport"] == "ucx" for line in metrics(attempt, "adopted"))
    assert (attempt / "reward.png").read_bytes().startswith(PNG)
    assert "held-out reward" in command.output
    for name in ("controller", "policy-0", "rollout-0", "rollout-1", "reward-0"):
        assert (attempt / f"logs/{name}.log").exists()
    report = Command(tmp_path, "sync-report", str(attempt.parent), name="sync-report")
    assert report.wait() == 0, report.transcript()
    assert "bottleneck: " in report.output
    page = Command(tmp_path, "report", str(attempt.parent), "-o", str(tmp_path / "report.html"), name="report")
    assert page.wait() == 0, page.transcript()
    text = check_page(tmp_path / "report.html")
    assert all(words in text for words in ("the run is complete", "policy-0", "rollout-1", "exact_match"))
    timelines = [json.loads(path.read_text()) for path in sorted((attempt / "weightsync").glob("version-*.json"))]
    assert len(timelines) == len({line["version"] for line in metrics(attempt, "published")})
    assert any(event["name"] == "read" and event["args"]["lanes"] for t in timelines for event in t["traceEvents"])
    checkpoint = attempt / "checkpoints/step-280"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("cat>", add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        text = tokenizer.decode(model.generate(ids, max_new_tokens=8, do_sample=False)[0], skip_special_tokens=True)
    assert text.startswith("cat>")
    assert len(text) > len("cat>")


@pytest.mark.campaign
def test_fp8_recipe_trains_in_fp8(tmp_path: Path) -> None:
    """The loss falls, the rollouts attest float32 weights, and they disagree with the trainer by little."""
    command = Command(
        tmp_path, "run", str(RECIPES / "fp8.toml"), "--sft.num-steps", "80", "--rl.num-steps", "20", *FRESH
    )
    assert command.wait(RUN_S) == 0, command.transcript()
    attempt = tmp_path / "runs/fp8/attempt-1"
    (line,) = re.findall(r"low_precision .*", (attempt / "logs/policy-0.log").read_text())
    assert {"kind=fp8_rowwise", "num_layers=14", "num_linear=15"} <= set(line.split())
    losses = [step["loss"] for step in metrics(attempt, "step")][:80]
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert all(one["attested"] for one in metrics(attempt, "adopted"))
    mismatch = [step["mismatch_kl"] for step in metrics(attempt, "step") if "mismatch_kl" in step]
    assert mismatch
    assert all(1e-8 < one < 0.02 for one in mismatch), "the bound of the alarm"
    saved = load_file(attempt / "checkpoints/step-100/model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


@pytest.mark.campaign
def test_supervised_recipes_run_stop_and_resume(tmp_path: Path) -> None:
    command = Command(tmp_path, "run", str(RECIPES / "sft.toml"), "--sft.num-steps", "80")
    assert command.wait() == 0, command.transcript()
    attempt = tmp_path / "runs/sft/attempt-1"
    losses = [line["loss"] for line in metrics(attempt, "step")]
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert (attempt / "checkpoints/step-80/model.safetensors").exists()
    assert {line["role"] for line in metrics(attempt, "joined")} == {"policy"}
    pretrained = attempt / "checkpoints/step-80"
    check_lora(pretrained, tmp_path)
    check_dpo(pretrained, tmp_path)
    check_distillation(pretrained, tmp_path)


def check_dpo(pretrained: Path, folder: Path) -> None:
    source = f"{RECIPES / 'spelling_pairs.py'}:pairs"
    flags = ("--model.path", str(pretrained), "--data.source", source, "--preference.num-steps", "60")
    command = Command(folder, "run", str(RECIPES / "dpo.toml"), *flags, name="dpo")
    assert command.wait() == 0, command.transcript()
    steps = metrics(folder / "runs/dpo/attempt-1", "step")
    assert len(steps) == 60
    assert steps[0]["loss"] == pytest.approx(0.6931, abs=1e-4)  # the model is its own reference
    accuracy = [step["accuracy"] for step in steps]
    assert sum(accuracy[-10:]) / 10 > 0.75  # pairs are scored before they are trained on
    assert (folder / "runs/dpo/attempt-1/checkpoints/step-60/model.safetensors").exists()


def check_distillation(pretrained: Path, folder: Path) -> None:
    """The teacher prefers correct spellings: it is the checkpoint of the preference recipe."""
    teacher = folder / "runs/dpo/attempt-1/checkpoints/step-60"
    fewer_steps = ("--rl.num-steps", "40", "--evaluation.at-start", "false", "--evaluation.at-end", "false")
    command = Command(
        folder,
        "run",
        str(RECIPES / "distill.toml"),
        "--model.path",
        str(pretrained),
        "--teacher.path",
        str(teacher),
        *fewer_steps,
        name="distill",
    )
    assert command.wait() == 0, command.transcript()
    steps = metrics(folder / "runs/distill/attempt-1", "step")
    assert len(steps) == 40
    divergence = [step["jsd"] for step in steps]
    assert sum(divergence[-8:]) < 0.7 * sum(divergence[:8])
    assert {line["role"] for line in metrics(folder / "runs/distill/attempt-1", "joined")} == {
        "policy",
        "rollout",
        "reward",
        "teacher",
    }


def check_lora(pretrained: Path, folder: Path) -> None:
    flags = (
        "--model.path",
        str(pretrained),
        "--sft.num-steps",
        "4",
        "--rl.num-steps",
        "8",
        "--evaluation.at-start",
        "false",
    )
    command = Command(folder, "run", str(RECIPES / "lora.toml"), *flags, name="lora")
    assert command.wait() == 0, command.transcript()
    attempt = folder / "runs/lora/attempt-1"
    assert len(metrics(attempt, "step")) == 12
    adopted = metrics(attempt, "adopted")
    assert adopted
    saved = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(pretrained), attempt / "checkpoints/step-12", is_trainable=True
    )
    num_trained, num_all = saved.get_nb_trainable_parameters()
    assert num_trained < num_all / 3
    assert all(line["attested"] and line["size_bytes"] == 4 * num_trained for line in adopted)
    assert not (attempt / "checkpoints/step-12/model.safetensors").exists()


@pytest.mark.campaign
def test_smoke_passes(tmp_path: Path) -> None:
    command = Command(tmp_path, "smoke", fresh=True)
    assert command.wait() == 0, command.transcript()
    assert command.output.count("ok: ") == 5
    assert "was killed during the run" in command.output
