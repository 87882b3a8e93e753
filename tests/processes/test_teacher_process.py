"""The teacher process: it returns its log-probabilities, rejects invalid tokens, and ends when drained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import numpy as np
import pytest
import torch
from fake_hub import FakeHub
from replica_processes import exit_code, replica
from transformers import AutoConfig, AutoModelForCausalLM

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.wire import messages as wire


@pytest.fixture(scope="module")
def teacher_folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a teacher with weights, and the tokenizer of `model`."""
    folder = tmp_path_factory.mktemp("teachers") / "teacher"
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(folder)
    return folder


@contextmanager
def teacher(hub: FakeHub, folder: Path, model: Path, teacher_folder: Path, *flags: str) -> Iterator[Popen[str]]:
    arguments = [
        "--model.path",
        str(model),
        "--teacher.path",
        str(teacher_folder),
        "--teacher.dtype",
        "float32",
        *flags,
    ]
    with replica(hub, "teacher-0", folder, *arguments) as process:
        yield process


def order(hub: FakeHub, ids: list[int], *lengths: int) -> tuple[wire.ScoreTokens, tuple[bytes, ...]]:
    buffers = tuple(np.array(values, np.int32).tobytes() for values in ([1, 2, 3], ids))
    tensors = tuple(wire.TensorMeta(dtype="int32", shape=(len(b) // 4,), nbytes=len(b)) for b in buffers)
    lease = hub.lease("teach")
    return wire.ScoreTokens(lease=lease, prompt_id="p", lengths=lengths, temperature=0.5, tensors=tensors), buffers


def test_teacher_scores_tokens_and_leaves_when_drained(
    hub: FakeHub, tmp_path: Path, model: Path, teacher_folder: Path
) -> None:
    with teacher(hub, tmp_path, model, teacher_folder, "--teacher.top-k", "2", "--teacher.num-slots", "3") as process:
        hello, _ = hub.hello("teacher-0")
        assert (hello.role, hello.num_slots, hello.has_layout, hello.version) == ("teacher", 3, False, -1)
        message, prompt_buffers = order(hub, [4, 5, 6], 2, 1)
        answer, buffers = hub.ask("teacher-0", message, wire.TokensScored, prompt_buffers)
        assert [tensor.name for tensor in answer.tensors] == [
            "teacher_logprobs",
            "teacher_top_ids",
            "teacher_top_logprobs",
        ]
        assert [tensor.shape for tensor in answer.tensors] == [(3,), (3, 2), (3, 2)]
        plain = AutoModelForCausalLM.from_pretrained(teacher_folder)
        expected, likeliest = [], []
        for ids in ([4, 5], [6]):
            with torch.no_grad():
                logits = plain(input_ids=torch.tensor([[1, 2, 3, *ids]])).logits[0, 2:-1]
            logprobs = torch.log_softmax(logits.float() / 0.5, dim=-1)
            expected += logprobs.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
            likeliest += logprobs.topk(2, dim=-1).indices.tolist()
        np.testing.assert_allclose(np.frombuffer(buffers[0], np.float32), expected, rtol=0, atol=1e-5)
        assert np.frombuffer(buffers[1], np.int32).reshape(3, 2).tolist() == likeliest
        failed, _ = hub.ask("teacher-0", *_with(order(hub, [10_000], 1)))
        assert isinstance(failed, wire.LeaseFailed)
        assert failed.fatal
        assert "prompt p: token 10000 is not in the teacher's vocabulary" in failed.reason
        hub.send("teacher-0", wire.Drain(reason="done"))
        assert hub.next("teacher-0", wire.Leave)[0].reason == "done"
        assert exit_code(process) == 0


def _with(
    ordered: tuple[wire.ScoreTokens, tuple[bytes, ...]],
) -> tuple[wire.ScoreTokens, type[wire.LeaseFailed], tuple[bytes, ...]]:
    return ordered[0], wire.LeaseFailed, ordered[1]


def test_teacher_of_another_vocabulary_does_not_start(
    hub: FakeHub, tmp_path: Path, model: Path, teacher_folder: Path
) -> None:
    settings = ScratchSettings(config={"hidden_size": 16}, alphabet="xyz", max_length=16)
    make_model_folder(settings, tmp_path / "other")
    with teacher(hub, tmp_path, tmp_path / "other", teacher_folder) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "the teacher must read what the model samples; give a teacher of the same vocabulary" in errors


def test_teacher_without_model_does_not_start(hub: FakeHub, tmp_path: Path, model: Path) -> None:
    with teacher(hub, tmp_path, model, tmp_path / "nowhere") as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"the model folder {tmp_path}/nowhere does not exist" in errors
