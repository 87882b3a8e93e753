"""Requests that schemathesis makes from the reward service's own description of its API, and worse ones.

Every answer must be one that the description has, and the service must go on: no crash, no leak of memory or files.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from reward_processes import PATIENCE_S, Client, eventually
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from test_reward_http import service

TOKEN: Final = "the right one"
AUTHORIZED: Final = {"Authorization": f"Bearer {TOKEN}"}
LIMITS: Final = f'token = "{TOKEN}"\nmax_body_mb = 16\nmax_memory_mb = 64\nread_timeout_s = 5.0\n'
PIXELS: Final = """
class Bright:
    media = "pixels"

    def score(self, batch):
        return {"score": [float(one.mean()) for one in batch.pixels]}
"""
SCORER: Final = """
[[reward.scorers]]
name = "{folder}/pixels.py:Bright"
label = "bright"
tasks = ["video"]
"""
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
RULES: Final = (
    *("than the first of the group", "cannot be encoded", "is nested more than", "completion is missing"),
    *("media.npy of sample", "it has both media and token_ids", "no attributes of latents"),
    "Max number of fields exceeded",  # a list in a form is as many fields
)
"""Of the API that JSON Schema cannot express: requests that break one of them may be refused though they fit."""
BOTH: Final = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
OPERATIONS: Final = [
    *(("POST", "/v1/rewards", mode) for mode in BOTH),
    *(("GET", "/v1/rewards/{id}", mode) for mode in BOTH),
    *(("DELETE", "/v1/rewards/{id}", mode) for mode in BOTH),
    *(("POST", f"/api/reward/{one}", mode) for one in ("pull", "push", "ping", "latent_attr") for mode in BOTH),
    # Without parameters, no request can be wrong.
    *(("GET", path, GenerationMode.POSITIVE) for path in ("/v1/scorers", "/healthz", "/readyz", "/metrics")),
]


class Running(NamedTuple):
    """A service."""

    process: subprocess.Popen[str]
    port: int
    schema: Any

    @property
    def client(self) -> Client:
        return Client(self.port, TOKEN)

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "pixels.py").write_text(PIXELS)
    with service(folder, LIMITS + SCORER.format(folder=folder)) as (process, port):
        schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json", headers=AUTHORIZED)
        yield Running(process, port, schema)


@pytest.mark.parametrize(("method", "path", "mode"), OPERATIONS)
@pytest.mark.parametrize("num", [40, pytest.param(250, marks=pytest.mark.campaign)])
def test_answers_are_those_of_the_description(
    running: Running, method: str, path: str, mode: GenerationMode, num: int
) -> None:
    cases = running.schema[path][method].as_strategy(generation_mode=mode)

    @seed(num)
    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases)
    def check(case: Any) -> None:
        response = case.call(headers=AUTHORIZED, timeout=PATIENCE_S)
        case.validate_response(response, checks=CHECKS, headers=AUTHORIZED)
        if mode is GenerationMode.POSITIVE and response.status_code == 422:
            assert any(rule in response.text for rule in RULES), response.text

    check()
    assert running.client.score("abc").status == 200


@pytest.mark.parametrize("path", ["/v1/rewards", "/api/reward/enqueue"])
@pytest.mark.parametrize("num", [1500, pytest.param(10_000, marks=pytest.mark.campaign)])
def test_mutated_requests_are_refused_and_leave_nothing(running: Running, path: str, num: int) -> None:
    rng = random.Random(num)
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=PATIENCE_S)
    connection.connect()
    running.client.score("abc")
    num_files, before_mb, statuses = running.num_files(), running.resident_mb(), Counter[int]()
    for _ in range(num):
        body, headers, may_succeed = mutated_enqueue(rng) if path.startswith("/api") else mutated(rng)
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        text = response.read()
        statuses[response.status] += 1
        assert response.status in {200, 202, 401, 413, 422, 429}, (response.status, body)
        assert may_succeed or response.status >= 400, (response.status, headers)
        if response.status >= 400:
            assert json.loads(text)["detail"], text
            assert response.status != 429 or response.headers["retry-after"]
    connection.close()
    assert {202 if path == "/v1/rewards" else 200, 401, 422} <= set(statuses), statuses
    assert running.process.poll() is None
    assert running.client.score("abc").body["rewards"] == [1.5]
    assert eventually(lambda: running.num_files() <= num_files), running.num_files()
    # Results are kept for an hour, within the limit on memory.
    assert running.resident_mb() - before_mb < 64 + 32


def mutated(rng: random.Random) -> tuple[bytes, dict[str, str], bool]:
    """Return the body and headers of a request, and whether it may be a valid one."""
    body = json.dumps(
        {
            "samples": [
                {"completion": "abc", "reference": "abc", "metadata": {"a": [1, 2.5, None], "b": {"c": "\u00e9"}}},
                {"completion": "b" * rng.randrange(100), "num_tokens": 3, "environment_reward": 0.5, "group": "g"},
            ],
            "wait_s": 0,
        }
    ).encode()
    headers = {**AUTHORIZED, "Content-Type": "application/json"}
    kind = rng.randrange(8)
    if kind == 0:
        headers["Authorization"] = rng.choice(["", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN} x", "\xff"])
        return body, headers, False
    if kind == 1:
        return body[: rng.randrange(len(body))], headers, False
    if kind == 2:
        word = rng.choice([b"NaN", b"-Infinity", b"1e999", b"9" * 400, b'"\\ud800"', b"tru", b"\xff", b"{" * 5000])
        return body.replace(b"2.5", word), headers, False
    if kind == 3:
        deep = rng.choice([b"[", b'{"a":'])
        return body.replace(b"2.5", deep * 100 + b"1" + (b"]" if deep == b"[" else b"}") * 100), headers, False
    if kind == 4:
        headers["Content-Type"] = rng.choice(["text/plain", "multipart/form-data", "application/json; charset=utf-7"])
    if kind == 5:
        body = body.replace(b"completion", rng.choice([b"complet", b"", b"metadata"]))
        return body, headers, False
    changed = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(changed))
        changed[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(changed), headers, True


def mutated_enqueue(rng: random.Random) -> tuple[bytes, dict[str, str], bool]:
    """Return the body and headers of a request of Cosmos-RL's clients, and whether it may be a valid one."""
    asked = {
        "prompts": ["a", "b"],
        "reward_fn": {"bright": 1.0},
        "media_type": "video",
        "video_infos": [{"video_fps": 8}] * 2,
    }
    file = io.BytesIO()
    np.save(file, np.random.default_rng(0).integers(0, 256, (2, 3, 2, 4, 4), np.uint8))
    line, npy = json.dumps(asked).encode(), file.getvalue()
    headers = {**AUTHORIZED, "Content-Type": "application/octet-stream"}
    kind = rng.randrange(8)
    if kind == 0:
        headers["Authorization"] = rng.choice(["", "Bearer", f"Token {TOKEN}", f"Bearer {TOKEN}{TOKEN}"])
        return line + b"\n" + npy, headers, False
    if kind == 1:
        whole = line + b"\n" + npy
        return whole[: rng.randrange(len(whole))], headers, False
    if kind == 2:
        return line + b"\n" + npy + rng.randbytes(rng.randrange(1, 5)), headers, False
    if kind == 3:
        old, new = rng.choice(
            [
                (b"(2, 3, 2, 4, 4)", b"(2, 3, 2, 4, 5)"),
                (b"(2, 3, 2, 4, 4)", b"(9**9**9, 3, 2)"),
                (b"(2, 3, 2, 4, 4)", b"(-2, 3, 2, 4, 4"),
                (b"|u1", b"|O8"),
                (b"|u1", b"<f8"),
                (b"|u1", b"<c8"),
                (b"NUMPY", b"PK\x03\x04x"),
                (b"descr", b"desc\xff"),
            ]
        )
        return line + b"\n" + npy.replace(old, new), headers, False
    if kind == 4:
        old, new = rng.choice(
            [
                (b"bright", b"nobody"),
                (b"1.0", b"NaN"),
                (b"8}", b"-1}"),
                (b'["a", "b"]', b'["a"]'),
                (b'["a", "b"]', b"[1, null]"),
                (b'"a"', b'"\\ud800"'),
                (b"{", b"[" * 3000),
            ]
        )
        return line.replace(old, new, 1) + b"\n" + npy, headers, False
    changed = bytearray(line + b"\n" + npy)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(line) + 129)
        changed[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
    return bytes(changed), headers, True
