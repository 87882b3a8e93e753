"""Publications of real runs: versions that are not due are never sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from system_runs import Command, attempt, make_workdir, metrics, num_steps, run

pytestmark = pytest.mark.system


def test_versions_that_are_held_back_are_never_sent(tmp_path: Path) -> None:
    """No time between steps is enough, so that only what training would wait for is published: every third version."""
    rl = {"num_steps": 8, "max_staleness": 3, "sync_every_s": 10_000.0}
    folder = make_workdir(
        tmp_path, rl=rl, sft={"num_steps": 0}, rollout={"transport": "tcp"}, policy={"transport": "tcp"}
    )
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    published = [line["version"] for line in metrics(folder, "published")]
    assert published == [0, 3, 6, 8]
    adopted = metrics(folder, "adopted")
    assert {line["version"] for line in adopted} <= set(published)
    assert all(line["attested"] for line in adopted)
    assert num_steps(folder) == 8
    assert max(line["staleness_max"] for line in metrics(folder, "step")) <= 3


def test_versions_are_published_when_staleness_asks_for_them(tmp_path: Path) -> None:
    folder = make_workdir(tmp_path, rl={"num_steps": 6, "max_staleness": 2, "sync_every": 0}, sft={"num_steps": 0})
    with run(folder) as command:
        assert command.wait() == 0, command.transcript()
    published = [line["version"] for line in metrics(folder, "published")]
    assert published[0] == 0
    assert published[-1] == 6
    assert num_steps(folder) == 6
    assert max(line["staleness_max"] for line in metrics(folder, "step")) <= 2
    adopted = metrics(folder, "adopted")
    assert adopted
    for line in adopted:
        [pair] = line["pairs"]
        assert (pair["source_rank"], pair["rank"], pair["link"]) == (0, 0, "device")
        assert pair["transport"] == line["transport"]
        assert 0 < pair["sent_bytes"] == line["sent_bytes"] <= pair["bytes"] == line["size_bytes"]
        assert 0 < pair["expected_s"] <= line["expected_s"]
        assert 0 < pair["read_s"] <= line["split"]["read_s"] + line["split"]["confirm_s"]
    report = Command(tmp_path, "sync-report", str(attempt(folder).parent), name="sync-report")
    assert report.wait() == 0, report.transcript()
    assert "pairs of ranks" in report.output
    assert "expected" in report.output
    assert "policy-0:0" in report.output
    assert "unknown" not in report.output
    (written,) = (attempt(folder) / "weightsync").glob("version-*6.json")
    trace = Command(tmp_path, "sync-report", str(attempt(folder)), "--trace", "6", name="trace")
    assert trace.wait() == 0, trace.transcript()
    assert json.loads(trace.output) == json.loads(written.read_text())
