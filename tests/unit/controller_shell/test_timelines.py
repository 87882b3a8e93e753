"""Traces of publications: what the controller keeps of adoptions until the next publication."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from starling.controller.shell.outputs.timelines import Timelines


def adopted(replica: str, version: int, pull_s: float) -> dict[str, Any]:
    """Return a line of metrics.jsonl."""
    line = {"kind": "adopted", "time": 2.0, "version": version, "replica": replica, "attested": True, "pull_s": pull_s}
    return line | {"pause_s": 0.0, "size_bytes": 1, "transport": "tcp", "lanes": (), "split": {}}


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

    def publish(versions: range) -> None:
        for version in versions:
            timelines.note({"kind": "published", "time": 1.0, "version": version, "publish_s": 0.5})
            timelines.write()

    with capture_logs() as logs:
        folder.write_text("in the way of the folder")
        publish(range(1, 5))
        folder.unlink()
        publish(range(5, 6))
        (folder / "version-000006.json").mkdir()
        publish(range(6, 8))
    assert [(line["event"], Path(line["file"]).name) for line in logs] == [
        ("timeline_lost", "version-000001.json"),
        ("timeline_lost", "version-000006.json"),
    ]
