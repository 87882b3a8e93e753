"""Saved states: a resumed learner is bitwise equal to one that never stopped; damaged states are not used."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from covering import covering
from forks import forked
from state_writers import write_endlessly, write_to_full_disk
from states_on_disk import resume, save
from structlog.testing import capture_logs
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.settings.optimizer import OptimizerSettings
from starling.policy.settings.policy import PolicySettings
from starling.policy.settings.supervised import SftStepSettings
from starling.policy.train.checkpoint.dcp import SavedTensors
from starling.policy.train.checkpoint.header import StateHeader, VerifiedState, encode_header, find_state
from starling.policy.train.checkpoint.state import SavedState
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.data.examples import SftExample
from starling.policy.train.data.groups import ScoredGroup
from starling.policy.train.learner import Learner
from starling.weightsync.offers.offer import digest_of

torch.set_num_threads(1)

NUM_SFT, NUM_GRPO = 3, 4
SHAPES = [(6, [4, 9, 1, 3]), (3, [2, 2, 7, 5])]
Make = Callable[..., Any]


def settings(kl: float) -> PolicySettings:
    """Schedules and clipping, so that counters and moments matter."""
    optimizer = OptimizerSettings(learning_rate=3e-3, warmup_steps=2, schedule="cosine", max_grad_norm=0.5)
    return PolicySettings(
        optimizer=optimizer,
        sft=SftStepSettings(optimizer=optimizer),
        algorithm=AlgorithmSettings(kl_coefficient=kl),
        tokens_per_microbatch=40,
    )


class TrainingCourse:
    """Deterministic steps of a run: supervised ones, then reinforcement."""

    def __init__(self, tiny: Make, make_groups: Make, kl: float, num_sft: int = NUM_SFT) -> None:
        self._tiny, self._make_groups, self._kl, self._num_sft = tiny, make_groups, kl, num_sft

    def learner(self) -> Learner:
        return Learner(lambda: self._tiny(), settings(self._kl))

    def take(self, learner: Learner, first: int, last: int) -> list[dict[str, float]]:
        return [self.step(learner, step) for step in range(first, last + 1)]

    def step(self, learner: Learner, step: int, **changes: float) -> dict[str, float]:
        settings_changes = {key.replace("__", "."): value for key, value in changes.items()}
        if step <= self._num_sft:
            groups: list[ScoredGroup] = self._make_groups(SHAPES, seed=step)
            examples = [SftExample(group.prompt_ids, group.completion_ids) for group in groups]
            return learner.supervise(examples, num_steps=self._num_sft, changes=settings_changes)
        groups = self._make_groups(SHAPES, seed=step, version=step - 1)
        return learner.reinforce(groups, step=step, num_steps=NUM_GRPO, temperature=0.9, changes=settings_changes)


def found_in(folder: Path) -> VerifiedState:
    return find_state(str(folder))


def held(learner: Learner) -> dict[str, Tensor]:
    """Return copies of all tensors that a step changes, and of the counters."""
    found = {name: tensor.clone() for name, tensor in learner.tensors.items()}
    if learner.trainer is not None:
        optimizer = learner.trainer.optimizer
        found["num_steps"] = torch.tensor(optimizer.num_steps)
        found |= {name: value.clone() for name, value in optimizer.state_tensors().items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kl", "saved_at"), covering([0.0, 0.05], [0, 1, NUM_SFT, NUM_SFT + 1, NUM_SFT + 3]))
def test_resumed_learner_is_bitwise_equal(
    tiny: Make, make_groups: Make, tmp_path: Path, kl: float, saved_at: int
) -> None:
    course, last = TrainingCourse(tiny, make_groups, kl), NUM_SFT + NUM_GRPO
    whole = course.learner()
    course.take(whole, 1, saved_at)
    save(whole, tmp_path, saved_at)
    metrics = course.take(whole, saved_at + 1, last)
    again = course.learner()
    assert resume(again, tmp_path) == saved_at
    assert course.take(again, saved_at + 1, last) == metrics
    assert same(held(again), held(whole))


def test_replayed_steps_are_bitwise_equal(tiny: Make, make_groups: Make) -> None:
    course, learners = TrainingCourse(tiny, make_groups, 0.05), []
    for _ in range(2):
        learner = course.learner()
        course.take(learner, 1, NUM_SFT + NUM_GRPO)
        learners.append(held(learner))
    assert same(*learners)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kl", [0.0, 0.05])
def test_resume_twice_equals_resume_once(tiny: Make, make_groups: Make, tmp_path: Path, kl: float) -> None:
    """A new learner resumes for every step."""
    course = TrainingCourse(tiny, make_groups, kl)
    for step in range(1, NUM_SFT + NUM_GRPO + 1):
        learner = course.learner()
        assert resume(learner, tmp_path / "parts") == step - 1
        course.step(learner, step)
        save(learner, tmp_path / "parts", step)
    whole = course.learner()
    course.take(whole, 1, NUM_SFT + NUM_GRPO)
    assert same(held(learner), held(whole))


def test_resume_reloads_initial_reference(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    course = TrainingCourse(tiny, make_groups, 0.05, num_sft=0)
    whole = course.learner()
    course.take(whole, 1, 2)
    path = save(whole, tmp_path, 2)
    assert not SavedState.of(found_in(path)).has("reference/"), "the reference is the initial model"
    again = course.learner()
    resume(again, tmp_path)
    assert course.take(whole, 3, 4) == course.take(again, 3, 4)
    assert same(held(again), held(whole))


def test_resume_continues_random_numbers(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    learner = TrainingCourse(tiny, make_groups, 0.0).learner()
    np.random.standard_normal()
    save(learner, tmp_path, 0)

    def drawn() -> tuple[float, float, float, float]:
        return random.gauss(), float(np.random.standard_normal()), float(np.random.random()), float(torch.rand(()))

    expected = drawn()
    resume(learner, tmp_path)
    assert drawn() == expected


def test_state_store_keeps_newest_two(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    course = TrainingCourse(tiny, make_groups, 0.0)
    learner = course.learner()
    (tmp_path / ".version-1.saving-abc").mkdir()
    for version in (2, 4, 9, 10):
        save(learner, tmp_path, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-10", "version-9"]
    save(learner, tmp_path, 10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-10", "version-9"]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("damage", "name"),
    covering([flip, cut, empty, Path.unlink], ["state.json", "parts/.metadata", "parts/__0_0.distcp"]),
)
def test_newest_state_skips_damaged(
    tiny: Make, make_groups: Make, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    course = TrainingCourse(tiny, make_groups, 0.05, num_sft=1)
    learner = course.learner()
    for step in (1, 2, 3):
        course.step(learner, step)
        path = save(learner, tmp_path, step)
    damage(path / name)
    again = course.learner()
    with capture_logs() as lines:
        assert resume(again, tmp_path) == 2
    assert [line["state"] for line in lines] == [str(path)]
    course.step(again, 3)
    assert same(held(again), held(learner))


def test_newest_state_skips_misnamed(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    learner = TrainingCourse(tiny, make_groups, 0.0).learner()
    path = save(learner, tmp_path, 3)
    shutil.copytree(path, tmp_path / "version-7")
    assert found_in(tmp_path).state.version == 3


def test_newest_state_of_empty_storage_is_none(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    course = TrainingCourse(tiny, make_groups, 0.0)
    learner = course.learner()
    before = held(learner)
    assert resume(learner, tmp_path / "nowhere") == 0
    (tmp_path / "version-3").mkdir()
    (tmp_path / "version-x").mkdir()
    assert resume(learner, tmp_path) == 0
    assert same(held(learner), before)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"hidden_size": 16}, "lm_head.weight is float32 \\[31, 32\\], and this model's is float32 \\[31, 16\\]"),
        ({"num_hidden_layers": 1}, "it has model.layers.1.input_layernorm.weight, which this model does not have"),
        ({"num_hidden_layers": 3}, "it has no model.layers.2.input_layernorm.weight, which this model has"),
        ({"tied": True}, "it has lm_head.weight, which this model does not have"),
    ],
)
def test_resume_state_of_other_model_is_refused(
    tiny: Make, make_groups: Make, tmp_path: Path, other: dict[str, Any], difference: str
) -> None:
    path = save(Learner(lambda: tiny(tied=False), settings(0.0)), tmp_path, 5)
    learner = Learner(lambda: tiny(**({"tied": False} | other)), settings(0.0))
    with pytest.raises(ConfigError, match=f"{path} is of another model: .*{difference}; give the model of that run"):
        resume(learner, tmp_path)


def test_state_header_content(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    course = TrainingCourse(tiny, make_groups, 0.05)
    learner = course.learner()
    course.take(learner, 1, NUM_SFT + 1)
    learner.next_prompt = 17
    path = save(learner, tmp_path, NUM_SFT + 1)
    reported = json.loads((path / "state.json").read_text())["state"]
    assert reported["trainer"] == {"kind": "rl", "num_steps": 1, "total_steps": NUM_GRPO, "begun_at": NUM_SFT}
    assert reported["next_prompt"] == 17
    assert reported["metrics"]["loss"] == learner.metrics["loss"]
    assert set(reported["digests"]) == {file.name for file in (path / "parts").iterdir()}
    tensors = SavedTensors(Storage(str(path)).fs, f"{path}/parts", reported["digests"])
    sections = {name.partition("/")[0] for name in tensors.shapes()}
    assert sections == {"weights", "trainer", "reference", "random"}


def test_equal_states_write_equal_files(tiny: Make, make_groups: Make, tmp_path: Path) -> None:
    digests = []
    for name in ("one", "other"):
        course = TrainingCourse(tiny, make_groups, 0.0, num_sft=0)
        learner = course.learner()
        course.take(learner, 1, 2)
        torch.manual_seed(0)
        digests.append(json.loads((save(learner, tmp_path / name, 2) / "state.json").read_text())["state"]["digests"])
    assert digests[0] == digests[1]


class Harmful:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._file,))


def test_dcp_index_cannot_execute_code(tiny: Make, tmp_path: Path) -> None:
    learner = Learner(lambda: tiny(), settings(0.0))
    path = save(learner, tmp_path / "states", 1)
    index = path / "parts" / ".metadata"
    index.write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    header = json.loads((path / "state.json").read_text())["state"]
    header["digests"][".metadata"] = digest_of(index.read_bytes())
    (path / "state.json").write_bytes(encode_header(msgspec.convert(header, StateHeader)))
    with pytest.raises(ConfigError, match=r"cannot be read \(it names pathlib\.Path\.touch, which no index contains"):
        resume(learner, tmp_path / "states")
    assert not (tmp_path / "harm").exists()


@pytest.mark.sample(1)
@pytest.mark.parametrize("num", [1, 2, 7])
def test_killed_writer_leaves_intact_state(tmp_path: Path, num: int) -> None:
    with forked(write_endlessly, str(tmp_path), {}, 500_000) as writer:
        for line in writer.received():
            if line == f"wrote {num}":
                writer.process.kill()
            if line.startswith("wrote "):
                last = int(line.removeprefix("wrote "))
    with capture_logs() as lines:
        found = found_in(tmp_path)
    assert found.state.version in (last, last + 1), "the next state may have been renamed before it was reported"
    assert lines == [], "all renamed states must be intact"
    weights = {"w": torch.zeros(500_000)}
    SavedState.of(found).restore("weights/", weights)
    assert torch.equal(weights["w"], torch.full((500_000,), float(found.state.version)))


def test_full_disk_is_reported_and_keeps_previous_state(tmp_path: Path) -> None:
    with forked(write_to_full_disk, tmp_path) as writer:
        (error,) = writer.received()
        assert writer.exit_code() == 0
    assert f"{tmp_path / 'version-2'} cannot be written (File too large)" in error
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]
    assert found_in(tmp_path).state.version == 1


@pytest.mark.parametrize("lie", [{"parts": "../parts"}, {"parts": ".."}, {"digests": {"../../other": "0" * 32}}])
def test_state_that_names_files_elsewhere_is_refused(
    tiny: Make, make_groups: Make, tmp_path: Path, lie: dict[str, Any]
) -> None:
    course = TrainingCourse(tiny, make_groups, 0.0)
    folder = save(course.learner(), tmp_path, 1)
    state = msgspec.structs.replace(found_in(folder).state, **lie)
    (folder / "state.json").write_bytes(encode_header(state))
    with pytest.raises(ConfigError, match="which is no file of this state"):
        find_state(str(folder))


@pytest.mark.parametrize("name", ["state.json", "parts/.metadata"])
def test_fifo_in_a_state_is_not_opened(tiny: Make, make_groups: Make, tmp_path: Path, name: str) -> None:
    course = TrainingCourse(tiny, make_groups, 0.0)
    folder = save(course.learner(), tmp_path, 1)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="it is no regular file"):
        find_state(str(folder))
