"""TRL's `AsyncGRPOTrainer` sends its weights to a server of vLLM through Starling, from an environment of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from engines import read_model
from service import make_checkpoints
from test_backend_fsdp import check_logprobs
from vllm_servers import ENVIRONMENT, ask, vllm_server

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def trl_python() -> Path:
    """The Python of TRL's environment, which is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        from environment import environment_python
    return environment_python("trl_weights", HERE / "trl-requirements.txt", torch=True)


@pytest.mark.campaign
def test_trl_trainer_sends_its_weights(trl_python: Path, tmp_path: Path) -> None:
    (folder,) = make_checkpoints(tmp_path, 1)
    model = read_model(folder)
    path = os.pathsep.join(str(ROOT / "libs" / name) for name in ("common", "weightsync"))
    with vllm_server(folder, tmp_path / "server.log") as url:
        run = subprocess.run(
            [str(trl_python), str(HERE / "trl_trainer.py"), str(folder), url, str(tmp_path)],
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "TRL_EXPERIMENTAL_SILENCE": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-4000:]
        model.load_state_dict(torch.load(tmp_path / "trained.pt"))
        check_logprobs(url, model)
        assert ask(f"{url}/weight_info") == {"weight_version": "2"}
