"""A run with a vision-language model: images in the folder of the dataset, one of them missing, and a lying rollout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lying_vision_engine
import pytest
from system_runs import Command, attempt, checkpoints, make_workdir, metrics, trained
from tiny_vision import ask, image, make_encoder, make_model, picture, write_folder, write_video

pytestmark = pytest.mark.system


OTHER_FAMILIES = [pytest.param(name, marks=pytest.mark.campaign) for name in ("qwen2_5_vl", "qwen3_vl_moe")]


@pytest.mark.parametrize("family", ["qwen2_vl", *OTHER_FAMILIES])
def test_run_with_images_trains(tmp_path: Path, family: str) -> None:
    # Any reward that differs between completions, so that advantages are not zero.
    (tmp_path / "scorer.py").write_text("def score(completion, *_):\n    return sum(map(ord, completion)) % 97\n")
    folder = make_workdir(
        tmp_path / "work",
        model={},
        data={"format": "", "image_column": "images", "video_column": "video", "held_out": 2, "shuffle": False},
        sft={"num_steps": 0},
        rollout={"engine": "lying_vision_engine.py:lying_engine"},
        reward={"scorers": [{"name": f"{tmp_path}/scorer.py:score"}]},
        rl={"num_steps": 4, "prompts_per_step": 3, "group_size": 3, "max_staleness": 0},
    )
    shutil.copy(str(lying_vision_engine.__file__), folder)
    recipe = folder / "tiny.toml"
    recipe.write_text(recipe.read_text().replace("[model]", '[model]\npath = "model"'))
    write_folder(folder / "model", family)
    write_video(folder / "film", 24, 16, 3)
    rows: list[dict[str, object]] = []
    for number in range(9):
        picture(16 + 4 * number, 24, number).save(folder / f"{number}.png")
        rows.append({"question": "a<image>?" if number % 2 else "which?", "images": f"{number}.png", "video": None})
    rows[2] |= {"question": "ab", "images": None}
    rows[4] |= {"question": "<image><video>", "video": "film"}
    (folder / "7.png").unlink()
    (folder / "prompts.jsonl").write_text("".join(json.dumps({**row, "answer": "ab"}) + "\n" for row in rows))
    command = Command(folder, "run", str(recipe))
    assert command.wait() == 0, command.transcript()
    steps = metrics(folder, "step")
    assert len(steps) == 4
    assert all(step["mismatch_max"] < 1e-5 for step in steps), "the policy saw other images than the rollout"
    reasons = [str(line["reason"]) for line in metrics(folder, "invalid")]
    assert len(reasons) == 3, "each false result was refused, and counted"
    assert "7.png' does not exist on the rollout's host" in (attempt(folder) / "logs/rollout-0.log").read_text()
    assert not any(prompt.endswith("/7") for prompt in trained(folder))
    assert checkpoints(folder) == ["step-4"]
    exported = attempt(folder) / "checkpoints/step-4"
    assert make_encoder(exported, make_model(family)).encode(ask("<image>", image(8, 8)))[1], (
        "the checkpoint lacks the image processor"
    )
