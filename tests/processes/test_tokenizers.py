"""A tokenizer that does not fit its model is refused when a process starts, in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import replica

CPU = ("--model.device", "cpu")
POLICY = (*CPU, "--policy.init", "random")
SFT = (*POLICY, "--run.kind", "sft")


def edit(folder: Path, name: str, **fields: Any) -> None:
    """Change fields of a JSON file."""
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def lose_all(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def break_off(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:100])


def without_end(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink(missing_ok=True)


def shrink_embedding(folder: Path) -> None:
    edit(folder, "config.json", vocab_size=8)


@pytest.mark.parametrize(
    ("role", "flags", "change", "expected"),
    [
        ("rollout", CPU, break_off, "has no tokenizer that can be read: "),
        ("policy", POLICY, shrink_embedding, " the id 8, and the model has embeddings for 8 tokens"),
        *(
            pytest.param(*case, marks=pytest.mark.campaign)
            for case in (
                ("rollout", CPU, lose_all, "has no tokenizer; add its tokenizer.json"),
                ("rollout", CPU, without_end, "no end-of-sequence token, so every completion would go on to its token"),
                ("rollout", CPU, shrink_embedding, " the id 8, and the model has embeddings for 8 tokens"),
                ("policy", SFT, without_end, "no end-of-sequence token, so the model could not learn when to stop"),
            )
        ),
    ],
)
def test_unusable_tokenizer_is_refused_before_the_process_joins(
    hub: FakeHub, model: Path, tmp_path: Path, role: str, flags: tuple[str, ...], change: Any, expected: str
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(model, folder)
    change(folder)
    with replica(hub, f"{role}-0", tmp_path, "--model.path", str(folder), *flags) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    sentence = errors.splitlines()[-1]
    assert sentence.startswith(f"starling {role}-0: ")
    assert expected in sentence
    assert "Traceback" not in errors
    assert process.returncode == 2
    assert not hub.has_unread()
