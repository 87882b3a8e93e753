"""Latents of a client of Cosmos-RL that a service decodes once for two scorers of pixels."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from test_reward_cosmos import TOKEN, client_of, service
from tiny_vae import decode, save_wan

PATIENCE_S = 240.0
RECIPE = """
[reward]
num_workers = 1
timeout_s = 60.0

[[reward.scorers]]
name = "{folder}/digests.py:Digest"
label = "dance_grpo"
key = "digest"

[[reward.scorers]]
name = "{folder}/digests.py:Digest"
label = "cosmos_reason1"
key = "mean"

[reward.decoder]
folders = ["{folder}/vae"]
batch_size = 2

[reward.http]
enabled = true
port = 0
token = "secret"
"""
DIGESTS = """
import zlib

class Digest:
    keys = ("digest", "mean")
    media = "pixels"

    def score(self, batch):
        return {"digest": [float(zlib.crc32(one)) for one in batch.pixels],
                "mean": [float(one.mean()) for one in batch.pixels]}
"""


def asked(port: int, path: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60.0) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def await_ready(port: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while asked(port, "/readyz")[0] != 200:
        assert time.monotonic() < until
        time.sleep(0.2)


def await_metric(port: int, line: str) -> None:
    """Wait for a line of the metrics, which the scoring thread reports some times a second."""
    until = time.monotonic() + PATIENCE_S
    while line not in (metrics := asked(port, "/metrics")[1]):
        assert time.monotonic() < until, metrics
        time.sleep(0.1)


def test_client_gets_scores_of_pixels_that_were_decoded_once(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "digests.py").write_text(DIGESTS)
    vae = save_wan(tmp_path / "vae")
    latents = np.random.default_rng(0).standard_normal((2, 16, 2, 4, 4)).astype(np.float32)
    pixels = decode(vae, latents)
    types = ("dance_grpo", "cosmos_reason1")
    header = {"prompts": ["a", "b"], "reward_fn": dict.fromkeys(types, 1.0), "video_infos": [{"video_fps": 16.0}] * 2}
    with service(tmp_path, RECIPE) as port:
        await_ready(port)
        client = client_of(port)
        id, replica = client.enqueue(latents, header)
        found = {type: client.fetch(id, replica, type) for type in types}
        await_metric(port, "starling_reward_decoded_samples_total 2.0\n")
        sample = {"media": {"kind": "latents", "npy": npy(np.zeros((4, 1, 2, 2), np.float32))}}
        status, problem = asked(port, "/v1/rewards", {"samples": [sample]})
    assert found["dance_grpo"]["scores"]["digest"] == [float(zlib.crc32(one)) for one in pixels]
    assert found["cosmos_reason1"]["scores"]["mean"] == [float(one.mean()) for one in pixels]
    assert float(found["dance_grpo"]["decoded_duration"]) > 0.0
    assert status == 422
    assert "latents of 4 channels are not decoded here: add the folder of their VAE" in problem


def npy(array: np.ndarray) -> str:
    import base64
    import io

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
