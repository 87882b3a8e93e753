"""The example of a trainer with FSDP on two ranks, and vLLM as a server with two tensor-parallel workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import forward_logprobs, read_model
from service import make_checkpoints
from vllm_servers import ENVIRONMENT, ask, complete, vllm_server

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "vllm_fsdp.py"
DEADLINE_S = 240.0
PROMPT = [5, 17, 3, 20]


def check_logprobs(url: str, model: Any) -> None:
    """Compare what the server samples with a model's log-probabilities."""
    sampled, found = complete(url, PROMPT, 12)
    expected = torch.from_numpy(forward_logprobs(model, PROMPT, sampled))
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0.0, atol=1e-4)


@pytest.mark.campaign
def test_fsdp_ranks_send_their_shards_to_tensor_parallel_workers_and_gather_nothing(tmp_path: Path) -> None:
    (folder,) = make_checkpoints(tmp_path, 1)
    model = read_model(folder)
    with vllm_server(folder, tmp_path / "server.log", tp=2) as url:
        check_logprobs(url, model)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
        run = subprocess.run(
            [*command, str(EXAMPLE), str(folder), url, str(tmp_path)],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        model.load_state_dict(torch.load(tmp_path / "trained.pt"))
        check_logprobs(url, model)
        assert ask(f"{url}/weight_info") == {"weight_version": "3"}
        with pytest.raises(AssertionError, match="500"):
            ask(f"{url}/init_weight_transfer_engine", {"init_info": {"master_port": 1}})
        check_logprobs(url, model)  # an error of both workers has left no answer behind
    size = sum(parameter.nbytes for parameter in model.parameters())
    lines = run.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    for line in lines:
        sent, collectives = line.split("collectives:")
        sizes = [int(found) for found in re.findall(r"': (\d+)", sent)]
        assert len(sizes) == 4, "each of two workers reads from each of two ranks"
        assert size <= sum(sizes) < 1.5 * size, "what both workers hold is sent twice, everything else once"
        assert "gather" not in collectives
        assert "scatter" not in collectives
