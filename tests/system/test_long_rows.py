"""Rows of hundreds of tokens in a whole run: recomputed blocks, chunked log-probabilities, shared prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from system_runs import make_workdir, metrics, run

pytestmark = pytest.mark.system


@pytest.mark.campaign
def test_recomputed_long_rows_share_their_prompts(tmp_path: Path) -> None:
    memory = {"checkpointing": "full", "logprob_chunk_tokens": 64}
    make_workdir(
        tmp_path,
        policy={"memory": memory, "tokens_per_microbatch": 700, "algorithm": {"skip_zero_advantage": False}},
        sampling={"max_tokens": 300},
        data={"format": "{question}" + "abcdefghijklmnopqrstuvwxyz" * 4 + ">"},
        rl={"num_steps": 2, "prompts_per_step": 2, "max_staleness": 0},
    )
    with run(tmp_path, "--model.scratch.max-length", "512") as command:
        assert command.wait(180) == 0, command.transcript()
    steps = [line for line in metrics(tmp_path, "step") if line["phase"] == "rl"]
    assert len(steps) == 2
    for step in steps:
        assert step["shared_token_fraction"] > 0.1
        assert step["mismatch_max"] < 1e-4
