"""The example of a trainer with FSDP and an engine of vLLM as actors of Ray, which is installed for it alone."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import read_model
from service import make_checkpoints
from vllm_servers import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "vllm_ray.py"
REQUIREMENTS = Path(__file__).parent / "ray-requirements.txt"
DEADLINE_S = 400.0
PROMPT = [5, 17, 3, 20]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def ray_python() -> Path:
    """The Python of Ray's environment, which is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        from environment import environment_python
    return environment_python("ray_weights", REQUIREMENTS)


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for the files of Ray; its sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def greedy(model: Any) -> list[int]:
    """Sample greedily with transformers."""
    sampling = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    found: list[int] = model.generate(torch.tensor([PROMPT]), **sampling)[0, len(PROMPT) :].tolist()
    return found


@pytest.mark.campaign
def test_fsdp_ranks_send_their_shards_to_an_actor_of_ray(ray_python: Path, ray_folder: Path, tmp_path: Path) -> None:
    (folder,) = make_checkpoints(tmp_path, 1)
    model = read_model(folder)
    paths = [str(path) for path in (ROOT / "libs").iterdir()] + [sysconfig.get_paths()["purelib"]]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "HOME": str(ray_folder),  # for the token of Ray's cluster
        "RAY_TMPDIR": str(ray_folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # by default 15, which makes them wait for whatever else runs
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    process = subprocess.Popen(
        [str(ray_python), str(EXAMPLE), str(folder), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT, **own},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=DEADLINE_S)
    finally:
        if process.poll() is None:
            process.terminate()  # then it ends the processes of Ray
            process.wait(DEADLINE_S)
    assert process.returncode == 0, errors[-4000:]
    before = greedy(model)
    model.load_state_dict(torch.load(tmp_path / "trained.pt"))
    assert greedy(model) != before
    lines = [line for line in output.splitlines() if line.startswith(("version", "tokens"))]
    assert [line.split(":")[0] for line in lines[::2]] == ["version 1", "version 2", "version 3"]
    assert lines[-1] == f"tokens: {[greedy(model)]}"
    size = sum(parameter.nbytes for parameter in model.parameters())
    for line in lines[::2]:
        sent, collectives = line.split("collectives:")
        sizes = [int(found) for found in re.findall(r"': (\d+)", sent)]
        assert len(sizes) == 2, "the engine reads from each of two ranks"
        assert sum(sizes) == size
        assert "gather" not in collectives
        assert "scatter" not in collectives
