"""Retention of states, the background writer, crash-safe folders, and resharding of tensors."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import forked
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from state_writers import write_or_read_shards
from structlog.testing import capture_logs

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.dcp import SavedTensors, write_tensors
from starling.policy.train.checkpoint.header import find_state, newest_state, state_versions
from starling.policy.train.checkpoint.huggingface import newest_checkpoint
from starling.policy.train.checkpoint.state import (
    HostBuffers,
    SavedState,
    StateMetadata,
    StateStore,
    in_section,
    take_state,
)
from starling.policy.train.checkpoint.storage import Storage, whole_folder
from starling.policy.train.checkpoint.writer import BackgroundWriter, WriteOutcome

CPU = torch.device("cpu")


def write(states: StateStore, version: int, value: float = 0.0, **metrics: float) -> str:
    """Write a state of one small tensor."""
    tensors = in_section("weights/", {"w": torch.full((3,), value)})
    return states.write(
        take_state(StateMetadata(run="r", version=version, metrics=metrics), tensors, CPU, HostBuffers())
    )


def kept(states: StateStore) -> list[str]:
    return [name for name in states.storage.names() if not name.startswith(".")]


@pytest.mark.parametrize(
    ("best", "stay"), [("loss", [1, 4, 5]), ("+loss", [1, 4, 5]), ("-loss", [2, 4, 5]), ("", [4, 5])]
)
def test_state_store_keeps_best_and_newest(tmp_path: Path, best: str, stay: list[int]) -> None:
    states = StateStore(Storage(str(tmp_path)), best=best)
    for version, loss in ((1, 0.9), (2, 0.1), (3, float("nan")), (4, 0.5), (5, 0.5)):
        write(states, version, loss=loss)
    assert kept(states) == [f"version-{version}" for version in stay]


def test_state_store_best_of_equal_states_is_newest(tmp_path: Path) -> None:
    states = StateStore(Storage(str(tmp_path)), best="reward")
    for version in range(1, 7):
        write(states, version, reward=float(version in (2, 3)))
    assert kept(states) == ["version-3", "version-5", "version-6"]


def test_state_store_missing_metric_is_logged(tmp_path: Path) -> None:
    with capture_logs() as lines:
        write(StateStore(Storage(str(tmp_path)), best="-loss"), 1, reward_mean=1.0)
    assert [(line["metric"], line["available"]) for line in lines] == [("loss", ["reward_mean"])]


@examples(10)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(2, 4))
def test_state_store_keeps_newest_written_states(tmp_path_factory: Any, versions: list[int], max_keep: int) -> None:
    states = StateStore(Storage(str(tmp_path_factory.mktemp("states"))), max_keep=max_keep)
    for value, version in enumerate(versions):
        write(states, version, float(value))
        # Later states were found damaged when the policy started; otherwise it would have resumed from them.
        assert f"version-{version}" in kept(states)
        assert sum(int(name[8:]) <= version for name in kept(states)) <= max_keep
    found = newest_state(states.storage)
    assert found is not None
    assert found.state.version == max(versions)
    last = max(index for index, version in enumerate(versions) if version == max(versions))
    assert SavedState.of(found).read("weights/")["w"].tolist() == [float(last)] * 3


def test_names_of_an_object_store_that_are_no_versions_are_left_alone() -> None:
    storage = Storage("memory://names-without-versions")
    for name in ("version-" + "9" * 5_000, "step-" + "9" * 5_000):
        storage.fs.pipe_file(storage.path(name, "state.json"), b"{}")
    states = StateStore(storage, max_keep=1)
    for version in (1, 2):
        write(states, version)
    found = newest_state(storage)
    assert found is not None
    assert found.state.version == 2
    assert [name for _, name in state_versions(storage)] == ["version-2"]
    assert newest_checkpoint(storage) == -1


def test_host_buffers_copy_is_independent() -> None:
    room, tensor = HostBuffers(), torch.zeros(4)
    first = room.take({"w": tensor})["w"]
    tensor += 1
    assert first.tolist() == [0.0] * 4
    assert room.take({"w": tensor})["w"].data_ptr() == first.data_ptr(), "the buffer is reused"
    assert room.take({"w": torch.zeros(5)})["w"].shape == (5,)


def test_find_state_by_its_folder_or_run_folder(tmp_path: Path) -> None:
    path = write(StateStore(Storage(str(tmp_path / "states"))), 3)
    for place in (path, str(tmp_path / "states"), str(tmp_path)):
        assert find_state(place).state.version == 3
        assert find_state(f"file://{place}").url == path
    for place in ("nowhere", "states/version-3/parts"):
        expected = f"there is no intact state in {tmp_path / place}; give the folder of one"
        with pytest.raises(ConfigError, match=expected):
            find_state(str(tmp_path / place))
    (Path(path) / "parts" / "__0_0.distcp").unlink()
    with pytest.raises(ConfigError, match=f"the state {path} is damaged: __0_0.distcp is missing; give an older one"):
        find_state(path)


@pytest.mark.parametrize(
    ("url", "words"),
    [("nosuch://bucket", "nosuch://bucket cannot be used"), ("memory://a", "")],
)
def test_storage_unknown_url_is_refused(url: str, words: str) -> None:
    if not words:
        Storage(url)
        return
    with pytest.raises(ConfigError, match=words):
        Storage(url)


def test_storage_check_unwritable_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=rf"the folder of states and checkpoints {tmp_path}/file/states cannot be written \(Not a dir"
    ):
        Storage(str(tmp_path / "file" / "states")).check()


def crash_while_replacing(folder: Path) -> None:
    """Leave `folder` as after a crash between two renames, where the file system cannot exchange names."""
    folder.with_name(f".{folder.name}.saving-abc").mkdir()
    folder.rename(folder.with_name(f".{folder.name}.saving-abc.old"))


def test_whole_folder_crash_during_replace_keeps_state(tmp_path: Path) -> None:
    states = StateStore(Storage(str(tmp_path)))
    for version in (2, 3):
        write(states, version, 0.5)
    crash_while_replacing(tmp_path / "version-3")
    shutil.copytree(tmp_path / "version-2", tmp_path / ".version-2.saving-abc.old")  # a crash a moment later
    write(states, 4)
    assert states.storage.names() == ["version-3", "version-4"]
    assert SavedState.of(find_state(str(tmp_path / "version-3"))).read("weights/")["w"].tolist() == [0.5] * 3


def test_whole_folder_crash_or_failure_keeps_previous(tmp_path: Path) -> None:
    folder = tmp_path / "step[1]"
    with whole_folder(folder) as temporary:
        (temporary / "file").write_text("before")
    crash_while_replacing(folder)
    with pytest.raises(ZeroDivisionError), whole_folder(folder) as temporary:
        (temporary / "file").write_text(str(1 // 0))
    assert [path.name for path in tmp_path.iterdir()] == ["step[1]"]
    assert (folder / "file").read_text() == "before"


# --- the saver ---------------------------------------------------------------------------------------------------


class Gate:
    """A write that blocks until it is released."""

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()

    def write(self) -> str:
        self.begun.set()
        assert self.open.wait(30.0)
        return "there"


def no_failure(future: Future[None]) -> None:
    raise AssertionError(future)


def test_writer_next_save_waits() -> None:
    reported: list[str] = []
    gate, outcomes = Gate(), list[WriteOutcome]()
    saver = BackgroundWriter(30.0, no_failure, lambda: reported.extend(wait.what for wait in saver.waits(0.0)))
    saver.begin("the state of version 3", lambda: gate.write, outcomes.append)
    assert gate.begun.wait(30.0)
    assert saver.waits(0.0) == (), "the writer reports no wait"
    with pytest.raises(ConfigError, match="the state of version 3 is not written after 0 s: check the storage"):
        saver.wait(0.001)
    assert reported == ["the state of version 3 to be written"]
    assert outcomes == []
    gate.open.set()
    saver.wait()
    assert outcomes == ["there"]
    assert saver.waits(0.0) == ()


def test_writer_failure_is_reported_and_next_save_runs() -> None:
    saver, outcomes = BackgroundWriter(30.0, no_failure), list[WriteOutcome]()

    def fail() -> str:
        raise ConfigError("the disk is full")

    saver.begin("one", lambda: fail, outcomes.append)
    saver.wait()
    saver.begin("another", lambda: lambda: "there", outcomes.append)
    saver.wait()
    assert [str(outcome) for outcome in outcomes] == ["the disk is full", "there"]


def test_writer_unexpected_exception_is_not_swallowed() -> None:
    broken: list[Future[None]] = []
    saver = BackgroundWriter(30.0, broken.append)
    saver.begin("one", lambda: lambda: str(1 // 0), lambda outcome: None)
    saver.wait()
    assert isinstance(broken[0].exception(), ZeroDivisionError)


# --- cut, and cut otherwise --------------------------------------------------------------------------------------


def ranks(folder: Path, action: str, size: int) -> None:
    """Run `size` processes that write or read one sharded tensor."""
    with ExitStack() as stack:
        children = [
            stack.enter_context(forked(write_or_read_shards, action, folder, rank, size)) for rank in range(size)
        ]
        assert [list(child.received()) for child in children] == [["done"]] * size
        assert [child.exit_code() for child in children] == [0] * size


@pytest.mark.campaign
def test_dcp_tensors_of_two_ranks_are_readable_by_any_number(tmp_path: Path) -> None:
    ranks(tmp_path, "write", 2)
    for size in (1, 3):
        ranks(tmp_path, "read", size)
    names = [file.name for file in (tmp_path / "parts").iterdir()]
    read = SavedTensors(Storage(str(tmp_path)).fs, f"{tmp_path}/parts", names).read("weights/")
    assert torch.equal(read["a"], torch.arange(35.0).reshape(7, 5)), "reading needs no process group"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_dcp_round_trip_of_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "a/x": torch.arange(6).to(dtype).reshape(2, 3),
        "a/empty": torch.zeros(0, dtype=dtype),
        "b/x": torch.ones(1),
    }
    digests = write_tensors(Storage(str(tmp_path)).fs, str(tmp_path), tensors)
    read = SavedTensors(Storage(str(tmp_path)).fs, str(tmp_path), digests).read("a/")
    assert {name: tensor.tolist() for name, tensor in read.items()} == {"x": tensors["a/x"].tolist(), "empty": []}
    assert read["x"].dtype == dtype
    assert digests == {file.name: Storage(str(tmp_path)).digest(file.name) for file in tmp_path.iterdir()}
