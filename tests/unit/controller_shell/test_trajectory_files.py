"""Trajectory files: complete, written once and in order, and readable as the groups of a replay."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from property_tests import examples

from starling.common.errors import ConfigError
from starling.common.service import ServiceArguments
from starling.common.wire.messages import Prompt, Status, TensorMeta, TrajectoryMeta
from starling.controller.core.events import Fetch, Fetched
from starling.controller.core.records import CompletionsStored, RewardsStored, StoredGroup
from starling.controller.data.load import load_data
from starling.controller.data.trajectories import (
    FOLDER,
    INDEX,
    Trajectories,
    encode_line,
    num_usable,
    read_file,
    read_index,
)
from starling.controller.settings import ControllerProcess
from starling.controller.shell.main import Shell
from starling.controller.shell.outputs.trajectory_writer import TrajectoryFiles, TrajectoryFilesError, TrajectoryWriter

PAGE = Path(__file__).parents[3] / "docs/how-to/replay.md"


def group(ordinal: int, *, usable: bool = True) -> StoredGroup:
    prompt = Prompt(id=f"train/0/{ordinal}", text=f"p{ordinal}", metadata={"deep": [1, None]})
    if not usable:
        return StoredGroup(ordinal=ordinal, prompt=prompt, problem="odd")
    one = TrajectoryMeta(status=Status.OK, num_tokens=1, text=f"c{ordinal}", oldest_version=0, newest_version=0)
    buffers = (*(np.full(2, ordinal, np.int32).tobytes(),) * 2, np.full(2, -1.0, np.float32).tobytes(), bytes(8))
    forms = (("int32", (2,)), ("int32", (2,)), ("float32", (2,)), ("int32", (2,)))
    tensors = tuple(TensorMeta(dtype=dtype, shape=shape, nbytes=8) for dtype, shape in forms)
    return StoredGroup(
        ordinal=ordinal,
        prompt=prompt,
        trajectories=(one, one),
        rewards=(1.0, 0.0),
        components={"s": (1.0, None)},
        evaluation_scores={"e": (0.5, None)},
        tensors=tensors,
        buffers=buffers,
    )


@pytest.fixture
def files(tmp_path: Path) -> TrajectoryFiles:
    return TrajectoryFiles(tmp_path, "run/1")


def stored(folder: Path) -> list[list[StoredGroup]]:
    return [list(read_file(folder / FOLDER, line)) for line in read_index(folder / FOLDER)]


def test_trajectory_writer_writes_in_order_in_its_thread(files: TrajectoryFiles, tmp_path: Path) -> None:
    woken = threading.Semaphore(0)
    writing = TrajectoryWriter(files, woken.release)
    for step in (1, 2):
        writing.begin(step, [group(step)])
    found: list[int] = []
    while len(found) < 2:
        assert woken.acquire(timeout=60.0)
        found += writing.written()
    assert found == [1, 2]
    assert stored(tmp_path) == [[group(1)], [group(2)]]
    writing.close()


def test_trajectory_writer_raises_errors_in_written(files: TrajectoryFiles, tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder is to be")
    woken = threading.Semaphore(0)
    writing = TrajectoryWriter(files, woken.release)
    writing.begin(1, [group(1)])
    assert woken.acquire(timeout=60.0)
    with pytest.raises(TrajectoryFilesError, match="the trajectories of step 1 cannot be written"):
        writing.written()
    writing.close()


class Announced(list[StoredGroup]):
    """Groups whose iteration signals the start of the write."""

    def __init__(self, groups: Iterable[StoredGroup]) -> None:
        super().__init__(groups)
        self.are_read = threading.Event()

    def __iter__(self) -> Iterator[StoredGroup]:
        self.are_read.set()
        return super().__iter__()


def test_trajectory_writer_close_waits_for_the_current_file(files: TrajectoryFiles, tmp_path: Path) -> None:
    """A resumed run would otherwise truncate a line that is being written."""
    groups = Announced(map(group, range(100)))
    writing = TrajectoryWriter(files, lambda: None)
    writing.begin(1, groups)
    assert groups.are_read.wait(60.0)
    writing.close()
    assert [line.step for line in read_index(tmp_path / FOLDER)] == [1]


def test_trajectory_files_are_read_by_msgpack_too(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0), group(1, usable=False)])
    files.write(2, [group(2)])
    assert stored(tmp_path) == [[group(0), group(1, usable=False)], [group(2)]]
    assert num_usable(tmp_path / FOLDER) == 2
    plain = msgpack.unpackb((tmp_path / FOLDER / "step-000001.msgpack").read_bytes())
    assert (plain["format"], plain["run"], plain["step"]) == ("starling-trajectories", "run/1", 1)
    assert plain["groups"][0]["buffers"] == list(group(0).buffers)
    assert plain["groups"][1]["problem"] == "odd"


def test_replay_page_example_reads_trajectory_files(
    files: TrajectoryFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    four = tuple(TensorMeta(dtype="int32", shape=(2,), nbytes=8, name=name) for name in "abcd")
    buffers = tuple(np.full(2, n, np.int32).tobytes() for n in range(4))
    files.write(1, [structs.replace(group(0), tensors=four, buffers=buffers)])
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(example, found)
    assert [found[name].tolist() for name in ("prompt", "tokens", "logprobs", "versions")] == [[n, n] for n in range(4)]
    assert found["others"] == []


def test_trajectory_files_write_a_step_once(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0)])
    before = (tmp_path / FOLDER / "step-000001.msgpack").stat()
    TrajectoryFiles(tmp_path, "run/1").write(1, [group(0)])
    after = (tmp_path / FOLDER / "step-000001.msgpack").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert len(read_index(tmp_path / FOLDER)) == 1


@examples(25)  # each example waits for the disk
@given(cut=st.integers(1, 200), has_file=st.booleans())
def test_trajectory_files_survive_a_crash_while_writing(
    tmp_path_factory: pytest.TempPathFactory, cut: int, has_file: bool
) -> None:
    """The index line of the second file is truncated or missing; the file may exist or not."""
    place = tmp_path_factory.mktemp("death")
    files = TrajectoryFiles(place, "run/1")
    files.write(1, [group(0)])
    index = place / FOLDER / INDEX
    whole = index.stat().st_size
    files.write(2, [group(1)])
    with index.open("r+b") as file:
        file.truncate(whole + cut % (index.stat().st_size - whole))
    if not has_file:
        (place / FOLDER / "step-000002.msgpack").unlink()
    assert stored(place) == [[group(0)]], "concurrent readers must see complete files only"
    again = TrajectoryFiles(place, "run/1")
    again.write(2, [group(1)])
    again.write(3, [group(2)])
    assert stored(place) == [[group(0)], [group(1)], [group(2)]]


def test_trajectory_files_report_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    with pytest.raises(
        TrajectoryFilesError, match=r"the trajectories of step 1 cannot be written to .*: File exists; free some space"
    ):
        TrajectoryFiles(tmp_path, "run/1").write(1, [group(0)])


def test_trajectory_files_detect_damage(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0)])
    folder = tmp_path / FOLDER
    [line] = read_index(folder)
    path = folder / line.file
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(ConfigError, match=r"step-000001.msgpack does not match its checksum"):
        read_file(folder, line)
    path.unlink()
    with pytest.raises(ConfigError, match="which is in the index: No such file or directory; restore the file"):
        read_file(folder, line)
    (folder / INDEX).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"line 1 of .*index.jsonl cannot be decoded"):
        read_index(folder)
    with pytest.raises(ConfigError, match="so it has no trajectories; give the folder trajectories of a run"):
        read_index(tmp_path)


# --- replay --------------------------------------------------------------------------------------------------------


def test_trajectories_steps_take_groups_in_order_across_files(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0), group(1, usable=False), group(2)])
    files.write(2, [group(3, usable=False)])
    files.write(3, [group(4), group(5), group(6)])
    found = Trajectories(tmp_path / FOLDER, prompts_per_step=2, first_step=3)
    assert found.num_groups == 5
    assert [found.prompt(position).id for position in range(5)] == [f"train/0/{n}" for n in (0, 2, 4, 5, 6)]
    first, scored, second, _ = found.entries(4)
    assert isinstance(first.record, CompletionsStored)
    assert isinstance(scored.record, RewardsStored)
    assert (first.record.key, scored.record.key) == ("t2", "t2")
    assert (first.payload, second.payload) == (group(4).buffers, group(5).buffers)
    assert (scored.record.rewards, scored.record.components) == ((1.0, 0.0), {"s": (1.0, None)})
    assert scored.record.evaluation_scores == {"e": (0.5, None)}
    assert len(found.entries(5)) == 2, "an incomplete step"


def settings(folder: Path, **sections: Any) -> ControllerProcess:
    tree = {
        "run": {"kind": "replay"},
        "data": {"source": f"trajectories:{folder}"},
        "rl": {"num_steps": 2, "prompts_per_step": 2},
    }
    return ControllerProcess.model_validate({**tree, **sections})


def test_load_data_replay_begins_at_the_prompt_of_its_state(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(n) for n in range(5)])
    loaded = load_data(settings(tmp_path / FOLDER))
    assert loaded.trajectories is not None
    assert loaded.prompts.prompt(3).id == "train/0/3"
    plan, kind = loaded.plan, loaded.plan.kind
    assert (kind.reads_trajectories, kind.needs_rollouts(plan), kind.publishes(plan)) == (True, False, False)
    begun = load_data(settings(tmp_path / FOLDER, controller={"begin_version": 1, "begin_prompt": 3}))
    assert begun.trajectories is not None
    assert [kept.record.key for kept in begun.trajectories.entries(2)[::2]] == ["t3", "t4"]  # type: ignore[union-attr]


def test_load_data_rejects_too_few_groups_for_the_steps(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(n) for n in range(3)])
    with pytest.raises(
        ConfigError,
        match=r"has 3 groups, and rl.num_steps = 2 .* needs 4; set rl.num_steps = 1",
    ):
        load_data(settings(tmp_path / FOLDER))


def test_load_data_rejects_fewer_groups_than_one_step(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0)])
    with pytest.raises(ConfigError, match=r"has 1 group, and a step takes 2; set rl.prompts_per_step = 1 or less"):
        load_data(settings(tmp_path / FOLDER))


def test_load_data_rejects_trajectories_without_tokens(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [structs.replace(group(n), tensors=(), buffers=()) for n in range(4)])
    with pytest.raises(ConfigError, match=r"has texts without tokens, .* trained; give those of a run with"):
        load_data(settings(tmp_path / FOLDER))


# --- files of others -------------------------------------------------------------------------------------------------


def write_index(folder: Path, **changes: Any) -> None:
    """Write an index of one line: that of an honest file, with `changes`."""
    [line] = read_index(folder)
    (folder / INDEX).write_bytes(encode_line(structs.replace(line, **changes)))


@pytest.mark.parametrize(
    "file",
    [
        "/dev/zero",
        "../../fifo",
        "fifo",
        "step-000001.msgpack/../../fifo",
        "step-1.msgpack",
        "step-000001.msgpack\n",
        "",
    ],
)
def test_index_that_names_other_files_is_refused(files: TrajectoryFiles, tmp_path: Path, file: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    files.write(1, [group(0)])
    write_index(tmp_path / FOLDER, file=file)
    with pytest.raises(ConfigError, match=r"line 1 of .*index.jsonl is of the file .*, which no run has written"):
        load_data(settings(tmp_path / FOLDER))


@pytest.mark.parametrize("nums", [(-1, -1), (1, 2), (1 << 40, 1 << 40)])
def test_index_with_impossible_numbers_is_refused(
    files: TrajectoryFiles, tmp_path: Path, nums: tuple[int, int]
) -> None:
    files.write(1, [group(0)])
    write_index(tmp_path / FOLDER, num_groups=nums[0], num_usable=nums[1])
    with pytest.raises(ConfigError, match="which no run has written"):
        load_data(settings(tmp_path / FOLDER))


def test_files_larger_than_the_memory_are_refused(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0)])
    os.truncate(tmp_path / FOLDER / "step-000001.msgpack", 1 << 42)
    write_index(tmp_path / FOLDER, size_bytes=1 << 42)
    with pytest.raises(ConfigError, match=r"step-000001.msgpack has \d+ bytes in index.jsonl, and this machine \d+"):
        load_data(settings(tmp_path / FOLDER))
    os.truncate(tmp_path / FOLDER / INDEX, 1 << 42)
    with pytest.raises(ConfigError, match=r"index.jsonl has more than \d+ bytes, which no run has written"):
        load_data(settings(tmp_path / FOLDER))


def test_index_that_tells_more_groups_than_its_file_has_is_refused(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(0), group(1)])
    write_index(tmp_path / FOLDER, num_groups=5, num_usable=5)
    with pytest.raises(ConfigError, match=r"step-000001.msgpack has other groups than index.jsonl says"):
        load_data(settings(tmp_path / FOLDER))


def test_file_of_another_size_or_kind_is_refused_before_it_is_read(files: TrajectoryFiles, tmp_path: Path) -> None:
    files.write(1, [group(n) for n in range(4)])
    path = tmp_path / FOLDER / "step-000001.msgpack"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is no regular file"):
        load_data(settings(tmp_path / FOLDER))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="it is no regular file"):
        load_data(settings(tmp_path / FOLDER))
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 40)  # more than any memory
    with pytest.raises(ConfigError, match=r"step-000001.msgpack has 1099511627776 bytes, and \d+ in index.jsonl"):
        load_data(settings(tmp_path / FOLDER))


def replaced(**changes: Any) -> StoredGroup:
    return structs.replace(group(1), **changes)


def with_buffer(index: int, values: Any) -> StoredGroup:
    buffers = list(group(1).buffers)
    buffers[index] = values.tobytes()
    return replaced(buffers=tuple(buffers))


ODD = TrajectoryMeta(status=Status.OK, num_tokens=-1, text="", oldest_version=0, newest_version=0)
BAD_GROUPS = {
    "no rewards": replaced(rewards=(None, None)),
    "a reward less": replaced(rewards=(1.0,)),
    "a reward of NaN": replaced(rewards=(float("nan"), 0.0)),
    "a tensor of another form": replaced(
        tensors=(TensorMeta(dtype="int32", shape=(9,), nbytes=36), *group(1).tensors[1:])
    ),
    "a buffer less": replaced(buffers=group(1).buffers[:3]),
    "no tensors": replaced(tensors=(), buffers=()),
    "a log-probability of NaN": with_buffer(2, np.full(2, np.nan, np.float32)),
    "a negative token": with_buffer(1, np.full(2, -1, np.int32)),
    "other versions": with_buffer(3, np.full(2, 5, np.int32)),
    "a negative number of tokens": replaced(trajectories=(ODD, structs.replace(ODD, num_tokens=3))),
    "an infinite metric": replaced(
        trajectories=(structs.replace(group(1).trajectories[0], metrics={"m": float("inf")}), group(1).trajectories[1])
    ),
    "a temperature of NaN": replaced(temperature=float("nan")),
    "a negative temperature": replaced(temperature=-1.0),
}


@pytest.mark.parametrize("bad", BAD_GROUPS)
def test_group_that_no_policy_can_train_fails_its_step(files: TrajectoryFiles, tmp_path: Path, bad: str) -> None:
    files.write(1, [group(0), group(2)])
    files.write(2, [group(3), BAD_GROUPS[bad]])
    replay = settings(tmp_path / FOLDER, run={"kind": "replay", "id": "r"}, network={"curve": False})
    folder = tmp_path / "run"
    folder.mkdir()
    arguments = ServiceArguments(name="controller", configs=(), folder=folder, controller="", key=None, flags=())
    shell = Shell(replay, arguments)
    try:
        shell._data = load_data(replay)
        for step in (1, 2):
            shell._execute(Fetch(step), "")
    finally:
        shell.hub.close()
    intact, refused = shell._later_events
    assert isinstance(intact, Fetched)
    assert (len(intact.records), intact.problem) == (4, "")
    assert isinstance(refused, Fetched)
    where = rf"the group of prompt 'train/0/1' in {re.escape(str(tmp_path / FOLDER))}/step-000002.msgpack"
    assert re.match(f"{where} cannot be trained: .*; give the trajectories of another run", refused.problem)
    assert refused.records == ()
