"""Asynchronous GRPO on a GPU, apart and colocated, to its reward (`make test-gpu`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from system_runs import Command

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.toml"
REWARD = 0.5
"""Held-out reward that the quickstart exceeds; it begins far below."""

pytestmark = [
    pytest.mark.system,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU: not yet run here"),
]


@pytest.mark.parametrize("colocate", ["false", "true"], ids=["apart", "colocated"])
@pytest.mark.parametrize("policy", ["device", "pinned", "host"])
def test_quickstart_reaches_its_reward(policy: str, colocate: str, tmp_path: Path) -> None:
    flags = ("--model.device", "cuda", "--launch.colocate", colocate, "--policy.snapshots", policy)
    command = Command(tmp_path, "run", str(QUICKSTART), *flags)
    assert command.wait(600) == 0, command.transcript()
    attempt = tmp_path / "runs/quickstart/attempt-1"
    lines = [json.loads(line) for line in (attempt / "metrics.jsonl").read_text().splitlines()]
    before, after = (line["reward_mean"] for line in lines if line["kind"] == "evaluation")
    assert before < REWARD < after
    assert all(line["attested"] for line in lines if line["kind"] == "adopted")
    log = (attempt / "logs" / "policy-0.log").read_text()
    assert re.findall(r" snapshots +place=(\w+)", log) == [policy], log
