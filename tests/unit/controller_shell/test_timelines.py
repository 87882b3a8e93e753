"""Traces of publications: what the controller keeps of adoptions until the next publication."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from starling.controller.shell.outputs import timelines as module
from starling.controller.shell.outputs.timelines import MAX_TRACES, Timelines


def adopted(replica: str, version: int, pull_s: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    line = {"kind": "adopted", "time": 2.0, "version": version, "replica": replica, "attested": True, "pull_s": pull_s}
    return line | {"pause_s": 0.0, "size_bytes": 1, "transport": "tcp", "lanes": (), "split": {}}


def publish(timelines: Timelines, versions: range) -> None:
    """Publish versions, and write the trace of each."""
    for version in versions:
        timelines.note({"kind": "published", "time": 1.0, "version": version, "publish_s": 0.5})
        timelines.write()


def versions_in(folder: Path) -> list[int]:
    """Return the versions that have a trace, in order."""
    return sorted(int(path.stem.removeprefix("version-")) for path in (folder / "weightsync").iterdir())


def test_last_adoption_of_each_replica_is_kept_however_often_it_adopts(tmp_path: Path) -> None:
    timelines = Timelines(tmp_path)
    timelines.note({"kind": "published", "time": 1.0, "version": 7, "publish_s": 0.5})
    for number in range(1000):
        timelines.note(adopted("rollout-0", 7, number))
        timelines.note(adopted("rollout-1", 6, number))
    timelines.note(adopted("rollout-1", 7, 3.0))
    timelines.note(adopted("rollout-1", 6, 4.0))
    timelines.write()
    events = json.loads((tmp_path / "weightsync" / "version-000007.json").read_text())["traceEvents"]
    read = [event["args"]["seconds"] for event in events if event["name"] == "read"]
    assert read == [999, 3.0], "one for each replica"


def test_trace_that_cannot_be_written_is_reported_once_until_one_can(tmp_path: Path) -> None:
    timelines, folder = Timelines(tmp_path), tmp_path / "weightsync"
    with capture_logs() as logs:
        folder.write_text("in the way of the folder")
        publish(timelines, range(1, 5))
        folder.unlink()
        publish(timelines, range(5, 6))
        (folder / "version-000006.json").mkdir()
        publish(timelines, range(6, 8))
    assert [(line["event"], Path(line["file"]).name) for line in logs] == [
        ("timeline_lost", "version-000001.json"),
        ("timeline_lost", "version-000006.json"),
    ]


def test_only_the_newest_traces_stay_also_after_a_restart(tmp_path: Path) -> None:
    publish(Timelines(tmp_path), range(1, MAX_TRACES + 51))
    assert versions_in(tmp_path) == list(range(51, MAX_TRACES + 51))
    publish(Timelines(tmp_path), range(MAX_TRACES + 51, MAX_TRACES + 61))
    assert versions_in(tmp_path) == list(range(61, MAX_TRACES + 61))


def test_traces_of_a_run_that_resumes_from_an_earlier_state_replace_the_oldest(tmp_path: Path) -> None:
    for number in range(2):
        publish(Timelines(tmp_path), range(1001, MAX_TRACES + 1001))
        publish(Timelines(tmp_path), range(801, 811))
        expected = [*range(801, 811), *range(1011, MAX_TRACES + 1001)]
        assert versions_in(tmp_path) == expected, "the new ones stay although their versions are lower"
        publish(Timelines(tmp_path), range(901, 911))
        assert versions_in(tmp_path) == [*range(801, 811), *range(901, 911), *range(1021, MAX_TRACES + 1001)], number


def test_folder_of_an_older_run_shrinks_with_each_publication_and_other_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TRACES", 3)
    folder = tmp_path / "weightsync"
    folder.mkdir()
    for version in range(1, 121):
        os.utime(_touch(folder / f"version-{version:06d}.json"), (version, version))
    others = {_touch(folder / "mine.json"), _touch(tmp_path / "version-000000.json")}
    (folder / "version-000000.json").symlink_to(tmp_path / "version-000000.json")
    timelines = Timelines(tmp_path)
    publish(timelines, range(121, 122))
    assert {path.name for path in folder.glob("version-*")} == {
        "version-000000.json",
        *(f"version-{version:06d}.json" for version in range(51, 122)),
    }
    publish(timelines, range(122, 125))
    assert all(path.exists() for path in others)
    assert [path.name for path in sorted(folder.iterdir())] == [
        "mine.json",
        *(f"version-{version:06d}.json" for version in (0, 122, 123, 124)),
    ]


def test_trace_that_was_removed_by_hand_is_no_error(tmp_path: Path) -> None:
    timelines = Timelines(tmp_path)
    publish(timelines, range(1, MAX_TRACES + 1))
    (tmp_path / "weightsync" / "version-000001.json").unlink()
    with capture_logs() as logs:
        publish(timelines, range(MAX_TRACES + 1, MAX_TRACES + 3))
    assert logs == []
    assert versions_in(tmp_path) == list(range(3, MAX_TRACES + 3))


def _touch(path: Path) -> Path:
    path.touch()
    return path
