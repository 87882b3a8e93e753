"""Truncated sampling in whole runs: what is said about it, and log-probabilities that rollout and trainer agree on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from system_runs import attempt, make_workdir, metrics, run

from starling.controller.core.records import CompletionsStored
from starling.controller.shell.journal.journal import Journal

pytestmark = pytest.mark.system

HOW: dict[str, Any] = {"max_tokens": 6, "temperature": 1.3, "top_p": 0.8, "min_p": 0.02}
MOST = {"algorithm": {"skip_zero_advantage": False}}
"""Trains every sampled token, so that the mismatch metrics cover all of them."""


def rl_steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder, "step") if line["phase"] == "rl"]


def kept_tensors(folder: Path) -> set[tuple[str, ...]]:
    """Return the names of the named tensors of the trained groups in the journal."""
    journal = Journal(attempt(folder) / "journal.sqlite")
    try:
        records = [record for record in journal.records() if isinstance(record, CompletionsStored)]
        return {tuple(tensor.name for tensor in record.tensors[4:]) for record in records if record.tensors}
    finally:
        journal.close()


def check_run(folder: Path, sampling: dict[str, Any], *, recorded: bool) -> None:
    make_workdir(folder, sampling={**HOW, **sampling}, rl={"max_staleness": 0, "num_steps": 4}, policy=MOST)
    with run(folder) as command:
        assert command.wait(180) == 0, command.transcript()
    steps = rl_steps(folder)
    assert len(steps) == 4
    for step in steps:
        assert step["mismatch_max"] < 1e-4, "both sides compute the same log-probabilities, whichever they are"
        assert step["sampling/truncation_nats"] > 0.05
    said = "truncated_sampling" in (attempt(folder) / "logs" / "controller.log").read_text()
    assert said != recorded
    assert kept_tensors(folder) == ({("kept_counts", "kept_ids")} if recorded else {()})


@pytest.mark.parametrize(
    ("sampling", "recorded"),
    [
        ({"logprobs": "truncated", "top_k": 20}, True),
        pytest.param({}, False, marks=pytest.mark.campaign),
    ],
    ids=["truncated", "full"],
)
def test_truncated_runs_agree_with_their_rollouts(sampling: dict[str, Any], recorded: bool, tmp_path: Path) -> None:
    check_run(tmp_path, sampling, recorded=recorded)
