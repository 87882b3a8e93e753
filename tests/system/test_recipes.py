"""The shipped recipes and `starling smoke`, run as a newcomer runs them (the quickstart with fewer steps)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from system_runs import Command
from transformers import AutoModelForCausalLM, AutoTokenizer

from starling.cli.recipe import load_recipe

RECIPES = Path(__file__).parents[2] / "recipes"
PNG = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.system


def metrics(attempt: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_every_recipe_resolves() -> None:
    recipes = sorted(RECIPES.glob("*.toml"))
    assert recipes
    for path in recipes:
        assert load_recipe([path], []).run.name == path.stem


def test_the_quickstart_leaves_what_it_promises(tmp_path: Path) -> None:
    command = Command(tmp_path, "run", str(RECIPES / "quickstart.toml"), "--rl.num-steps", "60")
    assert command.wait(170) == 0, command.story()
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
    assert report.wait() == 0, report.story()
    assert "bottleneck: " in report.output
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


def test_supervised_fine_tuning_is_a_run_like_any_other(tmp_path: Path) -> None:
    command = Command(tmp_path, "run", str(RECIPES / "sft.toml"), "--sft.num-steps", "80")
    assert command.wait() == 0, command.story()
    attempt = tmp_path / "runs/sft/attempt-1"
    losses = [line["loss"] for line in metrics(attempt, "step")]
    assert len(losses) == 80
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    assert (attempt / "checkpoints/step-80/model.safetensors").exists()
    assert {line["role"] for line in metrics(attempt, "joined")} == {"policy"}


def test_smoke_keeps_its_promises(tmp_path: Path) -> None:
    command = Command(tmp_path, "smoke")
    assert command.wait() == 0, command.story()
    assert command.output.count("ok: ") == 5
    assert "was killed in mid-run" in command.output
