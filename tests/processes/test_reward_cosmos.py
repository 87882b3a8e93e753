"""The routes of Cosmos-RL's reward service over HTTP: its clients, byte for byte, and what they are refused.

`CosmosClient` is written from the documented behaviour of those clients alone.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import re
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from reward_processes import PATIENCE_S, run_service

TOKEN = "secret"
SCORERS = """
import time

class Video:
    keys = ("overall_reward", "vq_reward")
    media = "pixels"
    batch_size = 4

    def score(self, batch):
        if "hang" in batch.prompts:
            time.sleep(3600.0)
        if "slow" in batch.prompts:
            time.sleep(1.0)
        if "raise" in batch.prompts:
            raise RuntimeError("no such video")
        return {"overall_reward": [float(one.mean()) for one in batch.pixels],
                "vq_reward": [len(text) + rate for text, rate in zip(batch.prompts, batch.fps)]}

class Latent:
    keys = ("mean",)
    media = "latents"

    def score(self, batch):
        return {"mean": [float(one.mean()) for one in batch.latents]}

class Words:
    media = "pixels"

    def score(self, batch):
        words = [float(len(text.split())) for text in batch.prompts]
        return {"score": [num + own.get("bonus", 0) for num, own in zip(words, batch.metadata)]}

def length(completion, reference, prompt_text, metadata):
    return float(len(completion))
"""
RECIPE = """
[reward]
num_workers = 2
timeout_s = 2.0

[[reward.scorers]]
name = "{folder}/mine.py:Video"
label = "dance_grpo"
key = "overall_reward"
retries = 0

[[reward.scorers]]
name = "{folder}/mine.py:Latent"
label = "latent_mean"

[[reward.scorers]]
name = "{folder}/mine.py:Words"
label = "ocr"

[reward.http]
enabled = true
port = 0
token = "secret"
pushed_types = ["mine"]
"""
Array = npt.NDArray[Any]


class NotReadyError(Exception):
    """An answer other than 200, or none in time: to be tried again."""


class CosmosClient:
    """Client of either era: full URLs and the token in variables, a retry loop as the only way to wait.

    The variables are `REMOTE_REWARD_*`, before 2026-02 `WFM_REWARD_*`. Clients of that era neither pin replicas nor
    name a type of media. Delays are a hundredth of theirs.
    """

    ATTEMPTS, PER_DELAY, FIRST_S, LONGEST_S = 60, 5, 0.01, 0.6

    def __init__(self, variables: Mapping[str, str], era: str) -> None:
        self.enqueue_url = variables[f"{era}_REWARD_ENQUEUE_URL"]
        self.fetch_url = variables[f"{era}_REWARD_FETCH_URL"]
        self.token = variables[f"{era}_REWARD_TOKEN"]
        self.is_early = era == "WFM"
        self.num_failures = 0

    def enqueue(self, array: Array, meta: dict[str, Any]) -> tuple[str, str | None]:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=False)
        body = json.dumps(meta).encode() + b"\n" + file.getvalue()
        timeout_s = 10.0 if self.is_early else min(max(30 + 3 * len(body) / 1e6, 60), 600)
        answer = self._until_200(self.enqueue_url, body, {"Content-Type": "application/octet-stream"}, timeout_s)
        return answer["uuid"], answer.get("replica_id")

    def fetch(self, id: str, replica: str | None, type: str) -> dict[str, Any]:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        if replica and not self.is_early:
            headers["X-Lepton-Replica-Target"] = replica
        body = urllib.parse.urlencode({"uuid": id, "type": type}).encode()
        return self._until_200(self.fetch_url, body, headers, 5.0 if self.is_early else 10.0)

    def reward(self, id: str, replica: str | None, functions: dict[str, dict[str, Any]]) -> list[float]:
        """Return the sum over functions of their clamped, weighted scores, of each sample."""
        total: list[float] = []
        for name, function in functions.items():
            scores = self.fetch(id, replica, name)["scores"]
            rows = [scores[key] for key in function["score_key"].split("+")]
            low, high = function.get("clip_min", -1e9), function.get("clip_max", 1e9)
            weighted = [min(max(sum(column), low), high) * function["weight"] for column in zip(*rows, strict=True)]
            total = [a + b for a, b in zip(total, weighted, strict=True)] if total else weighted
        return total

    def _until_200(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Any:
        delay_s = self.FIRST_S
        for attempt in range(self.ATTEMPTS):
            try:
                return self._post(url, body, {**headers, "Authorization": f"Bearer {self.token}"}, timeout_s)
            except (NotReadyError, OSError):
                self.num_failures += 1
                if attempt and not attempt % self.PER_DELAY:
                    delay_s = min(2 * delay_s, self.LONGEST_S)
                time.sleep(random.uniform(1, 2) * delay_s)
        raise AssertionError(f"no answer from {url} after {self.ATTEMPTS} attempts")

    def _post(self, url: str, body: bytes, headers: dict[str, str], timeout_s: float) -> Any:
        parts = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            connection.request("POST", parts.path, body, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise NotReadyError(response.status)
        return json.loads(data)


@contextmanager
def service(folder: Path, recipe: str = RECIPE, **variables: str) -> Iterator[int]:
    """Run a service; yield its port."""
    (folder / "mine.py").write_text(SCORERS)
    with run_service(folder, recipe.format(folder=folder), **variables) as (_, port):
        yield port
    assert "Traceback" not in (folder / "log").read_text()


def variables(port: int, era: str) -> dict[str, str]:
    base = f"http://127.0.0.1:{port}/api/reward"
    return {
        f"{era}_REWARD_ENQUEUE_URL": f"{base}/enqueue",
        f"{era}_REWARD_FETCH_URL": f"{base}/pull",
        f"{era}_REWARD_TOKEN": TOKEN,
    }


def client_of(port: int, era: str = "REMOTE") -> CosmosClient:
    return CosmosClient(variables(port, era), era)


class Raw:
    """Requests in bytes, and answers as they are."""

    def __init__(self, port: int, token: str = TOKEN) -> None:
        self.port, self.token = port, token

    def post(self, path: str, body: bytes, content_type: str = "application/octet-stream") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {self.token}"}
        try:
            connection.request("POST", f"/api/reward/{path}", body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def form(self, path: str, **fields: str) -> tuple[int, bytes]:
        return self.post(path, urllib.parse.urlencode(fields).encode(), "application/x-www-form-urlencoded")

    def until_ready(self, **fields: str) -> bytes:
        end = time.monotonic() + PATIENCE_S
        while (answer := self.form("pull", **fields))[0] == 400:
            assert answer[1] == b'{"message":"Not found scores for ' + fields["uuid"].encode() + b'"}'
            assert time.monotonic() < end
            time.sleep(0.02)
        assert answer[0] == 200, answer
        return answer[1]


def npy(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def lines(array: Array, **meta: Any) -> bytes:
    return json.dumps(meta).encode() + b"\n" + npy(array)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with service(tmp_path_factory.mktemp("service"), LEPTON_REPLICA_ID="replica-7") as port:
        yield port


@pytest.mark.parametrize("era", ["REMOTE", "WFM"])
def test_client_gets_the_scores_of_videos(port: int, era: str) -> None:
    client = client_of(port, era)
    videos = np.stack([np.full((3, 5, 8, 8), shade, np.uint8) for shade in (10, 30)])
    meta = {"prompts": ["a", "abc"], "reward_fn": {"dance_grpo": 1.0}, "video_infos": [{"video_fps": 16.0}] * 2}
    id, replica = client.enqueue(videos, meta if client.is_early else {**meta, "media_type": "video"})
    assert replica == "replica-7"
    functions = {"dance_grpo": {"score_key": "overall_reward+vq_reward", "clip_max": 40.0, "weight": 0.5}}
    assert client.reward(id, replica, functions) == [13.5, 20.0]
    assert client.num_failures <= client.ATTEMPTS


def test_client_of_each_era_gets_the_scores_of_latents(port: int) -> None:
    numbers = np.linspace(-1.0, 2.0, 16 * 1 * 2 * 4, dtype=np.float32).reshape(1, 16, 1, 2, 4)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    exact = float((bits.astype(np.uint32) << 16).view(np.float32).mean())
    meta = {"prompts": ["a"], "reward_fn": {"latent_mean": 1.0}, "video_infos": [{"video_fps": 16.0}]}
    cases: list[tuple[str, Array, dict[str, Any], float]] = [
        ("WFM", numbers, {}, float(numbers.mean())),  # of the first clients: float32, and no type
        ("REMOTE", numbers.astype(np.float16), {"media_type": "video"}, float(numbers.astype(np.float16).mean())),
        ("REMOTE", numbers.astype(np.float16), {"media_type": "latent"}, float(numbers.astype(np.float16).mean())),
        ("REMOTE", bits.view(np.uint8), {"media_type": "latent"}, exact),
    ]
    for era, array, more, expected in cases:
        client = client_of(port, era)
        found = client.fetch(*client.enqueue(array, {**meta, **more}), "latent_mean")
        assert found["scores"]["mean"] == pytest.approx([expected], abs=1e-3), more


def test_client_gets_several_types_of_one_request(port: int) -> None:
    client = client_of(port)
    images = np.full((2, 6, 6, 3), 7, np.uint8)
    types = {"dance_grpo": 1.0, "ocr": 0.25, "latent_mean": 0.0}
    meta = {"prompts": ["one two", "three"], "reward_fn": types, "media_type": "image", "bonus": 10}
    id, replica = client.enqueue(images, meta)
    functions = {
        "dance_grpo": {"score_key": "overall_reward", "weight": 1.0},
        "ocr": {"score_key": "ocr", "weight": 2.0},
    }
    assert client.reward(id, replica, functions) == [31.0, 29.0]
    not_asked = client.fetch(id, replica, "latent_mean")
    assert (not_asked["scores"], not_asked["error"]) == (
        None,
        "the request did not ask for 'latent_mean'; it asked for dance_grpo, ocr.",
    )


TRANSCRIPT = (
    b'{"prompts": ["a cat"], "reward_fn": {"latent_mean": 1.0}, "video_infos": [{"video_fps": 16.0}]}\n'
    b"\x93NUMPY\x01\x00v\x00{'descr': '<f2', 'fortran_order': False, 'shape': (1, 16, 1, 1, 2), }"
    + b" " * 48
    + b"\n"
    + b"\x00\x3c\x00\xc0" * 16  # 1 and -2, sixteen times
)
"""What the first clients send, written out."""


def test_request_in_bytes_has_an_answer_in_bytes(port: int) -> None:
    raw = Raw(port)
    status, answer = raw.post("enqueue", TRANSCRIPT)
    assert status == 200, answer
    document = raw.until_ready(uuid=json.loads(answer)["uuid"], type="latent_mean")
    pattern = (
        rb'\{"scores":\{"mean":\[-0\.5\]\},'
        rb'"input_info":\{"shape":\[1,16,1,1,2\],"dtype":"torch\.float16","min":"-2\.000","max":"1\.000",'
        rb'"video_infos":\[\{"video_fps":16\.0\}\]\},'
        rb'"duration":"\d+\.\d\d","decoded_duration":"0\.00","type":"latent_mean"\}'
    )
    assert re.fullmatch(pattern, document), document


def test_answers_byte_for_byte(port: int) -> None:
    raw = Raw(port)
    videos = np.zeros((1, 3, 2, 4, 4), np.uint8)
    status, answer = raw.post("enqueue", lines(videos, prompts=["ab"], reward_fn={"dance_grpo": 1}, media_type="video"))
    assert status == 200
    found = re.fullmatch(rb'\{"uuid":"([0-9a-f-]{36})","replica_id":"replica-7"\}', answer)
    assert found, answer
    id = found[1].decode()
    document = raw.until_ready(uuid=id)
    pattern = (
        rb'\{"scores":\{"overall_reward":\[0\.0\],"vq_reward":\[18\.0\]\},'
        rb'"input_info":\{"shape":\[1,3,2,4,4\],"dtype":"torch\.uint8","min":"0\.000","max":"0\.000"\},'
        rb'"duration":"\d+\.\d\d","decoded_duration":"0\.00","type":"dance_grpo"\}'
    )
    assert re.fullmatch(pattern, document), document
    assert raw.form("pull", uuid=id, type="dance_grpo") == (200, document), "it is pulled as often as wanted"
    unknown = "00000000-0000-4000-8000-000000000000"
    message = b'{"message":"Not found scores for ' + unknown.encode() + b'"}'
    assert raw.form("pull", uuid=unknown, type="ocr") == (400, message)
    assert raw.form("ping", info_data="{}") == (200, b'{"message":"Ping request received"}')
    fields = json.dumps({"chunk_duration": 81, "load_mean_std": False, "fps": 16, "height": 432, "width": 768})
    assert raw.form("latent_attr", fields=fields) == (200, b'{"message":"Latent attributes set successfully"}')


@pytest.mark.parametrize(("prompt", "reason"), [("hang", "took longer than 2 s"), ("raise", "no such video")])
def test_failure_is_a_result_so_that_the_client_does_not_wait(port: int, prompt: str, reason: str) -> None:
    client = client_of(port)
    videos = np.zeros((1, 3, 1, 2, 2), np.uint8)
    where = client.enqueue(videos, {"prompts": [prompt], "reward_fn": {"dance_grpo": 1.0, "ocr": 1.0}})
    found = client.fetch(*where, "dance_grpo")
    assert found["scores"] is None
    assert reason in found["error"]
    assert client.fetch(*where, "ocr")["scores"] == {"ocr": [1.0]}


def test_scorer_whose_media_the_request_lacks_fails_and_the_others_do_not(port: int) -> None:
    client = client_of(port)
    videos = np.zeros((2, 3, 1, 2, 2), np.uint8)
    where = client.enqueue(videos, {"prompts": ["a", "b"], "reward_fn": {"latent_mean": 1.0, "ocr": 1.0}})
    found = client.fetch(*where, "latent_mean")
    assert found["scores"] is None
    assert "reads latents" in found["error"]
    assert client.fetch(*where, "ocr")["scores"] == {"ocr": [1.0, 1.0]}


OF_TEXTS = """
[[reward.scorers]]
name = "{folder}/mine.py:length"
label = "of_texts"
"""


def test_scorer_of_texts_is_refused_or_fails_as_there_is_no_completion(tmp_path: Path) -> None:
    with service(tmp_path, RECIPE + OF_TEXTS) as port:
        raw, statuses = Raw(port), set[int]()
        body = lines(VIDEO, prompts=["a"], reward_fn={"ocr": 1, "of_texts": 1})
        end = time.monotonic() + PATIENCE_S
        while 422 not in statuses:  # what a scorer reads is known when a worker has loaded it
            status, answer = raw.post("enqueue", body)
            statuses.add(status)
            if status == 200:
                document = json.loads(raw.until_ready(uuid=json.loads(answer)["uuid"], type="of_texts"))
                assert document["scores"] is None
                assert "'of_texts' reads the texts of completions" in document["error"]
            assert time.monotonic() < end
        assert statuses <= {200, 422}
        assert b"'of_texts' reads the texts of completions" in answer
        assert client_of(port).fetch(
            *client_of(port).enqueue(VIDEO, {"prompts": ["a"], "reward_fn": {"ocr": 1, "of_texts": 0}}), "ocr"
        )["scores"] == {"ocr": [1.0]}


VIDEO = np.zeros((1, 3, 1, 2, 2), np.uint8)


@pytest.mark.parametrize(
    ("path", "body", "content_type", "reason"),
    [
        ("enqueue", b"garbage", "application/octet-stream", b"no line feed"),
        ("enqueue", lines(VIDEO, prompts=["a"], reward_fn={"hpsv9": 1}), "", b"no scorer 'hpsv9' here"),
        ("enqueue", lines(VIDEO, prompts=["a", "b"], reward_fn={"ocr": 1}), "", b"the 2 prompts"),
        ("enqueue", b'{"prompts": ["a"], "reward_fn": {"ocr": 1}}\n\x80\x02}q\x00.', "", b"no .npy file"),
        ("pull", b'{"uuid": "a"}', "application/json", b"send a form"),
        ("pull", b"type=ocr", "application/x-www-form-urlencoded", b"Field required"),
        ("push", b"uuid=a&scores=1", "application/x-www-form-urlencoded", b"Field required"),
        ("latent_attr", b"fields=7", "application/x-www-form-urlencoded", b"no attributes of latents"),
        ("ping", b"", "application/x-www-form-urlencoded", b"Field required"),
    ],
)
def test_what_is_not_valid_is_refused_with_the_reason(
    port: int, path: str, body: bytes, content_type: str, reason: bytes
) -> None:
    status, answer = Raw(port).post(path, body, content_type)
    assert status == 422
    assert reason in answer


def test_every_route_needs_the_token(port: int) -> None:
    for name in ("enqueue", "pull", "push", "ping", "latent_attr"):
        assert Raw(port, "wrong").form(name, uuid="a", scores="{}", type="mine", info_data="", fields="{}")[0] == 401
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/api/reward/pull", headers={"Authorization": f"Bearer {TOKEN}"})
    assert connection.getresponse().status == 405
    connection.close()


def test_reward_worker_pushes_the_scores_that_a_request_waits_for(port: int) -> None:
    raw, client = Raw(port), client_of(port)
    types = {"mine": 1.0, "ocr": 1.0}
    id, replica = client.enqueue(VIDEO, {"prompts": ["a b"], "reward_fn": types, "media_type": "video"})
    assert client.fetch(id, replica, "ocr")["scores"] == {"ocr": [2.0]}
    assert raw.form("pull", uuid=id, type="mine")[0] == 400
    scores = json.dumps({"scores": {"prediction": ["Good"], "no_score": [0.5]}, "duration": "0.10"})
    for refused, status in (
        ({"uuid": "unknown"}, 404),
        ({"type": "ocr"}, 404),
        ({"scores": '{"scores": {"a": []}}'}, 422),
    ):
        assert raw.form("push", **{"uuid": id, "type": "mine", "scores": scores, **refused})[0] == status
    stored = (200, b'{"message":"Scores received and stored successfully"}')
    assert raw.form("push", uuid=id, type="mine", scores=scores) == stored
    found = client.fetch(id, replica, "mine")
    assert (found["scores"], found["type"]) == ({"prediction": ["Good"], "no_score": [0.5]}, "mine")
    assert raw.form("push", uuid=id, type="mine", scores='{"scores": {"no_score": [9]}}') == stored
    assert client.fetch(id, replica, "mine") == found, "the first push counts"


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return a body with some bytes changed, doubled, removed, or put elsewhere; mostly at its beginning."""
    found = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = min(int(rng.expovariate(1 / 120)), len(found) - 1)
        match rng.randrange(4):
            case 0:
                found[at] = rng.randrange(256)
            case 1:
                del found[at : at + rng.randrange(1, 40)]
            case 2:
                found[at:at] = found[rng.randrange(len(found)) :][: rng.randrange(1, 40)]
            case 3:
                found = found[: rng.randrange(1, len(found))] or bytearray(b"x")
        if not found:
            return b""
    return bytes(found)


def test_mutated_bodies_are_refused_or_scored_and_leave_nothing(tmp_path: Path) -> None:
    rng = random.Random(0)
    latents = np.ones((1, 16, 1, 2, 2), np.float16)
    with service(tmp_path) as port:
        raw, statuses, ids = Raw(port), set[int](), []
        valid = [
            lines(VIDEO, prompts=["a"], reward_fn={"ocr": 1}, media_type="video", video_infos=[{"video_fps": 16.0}]),
            lines(latents, prompts=["a"], reward_fn={"latent_mean": 1.0, "ocr": 0.5}),
        ]
        for number in range(400):
            status, answer = raw.post("enqueue", mutated(rng, valid[number % 2]))
            statuses.add(status)
            assert status in (200, 422), answer
            if status == 200:
                ids.append(json.loads(answer)["uuid"])
            else:
                assert json.loads(answer)["detail"]
        assert statuses == {200, 422}
        for id in ids:  # also those of the types of numbers that mutations made
            raw.until_ready(uuid=id, type="ocr")
        assert client_of(port).fetch(
            *client_of(port).enqueue(VIDEO, {"prompts": ["a"], "reward_fn": {"ocr": 1}}), "ocr"
        )


LIMITS = """
max_memory_mb = 2
max_media_mb = 1
max_body_mb = 1
max_samples = 2
"""


def test_limits(tmp_path: Path) -> None:
    with service(tmp_path, RECIPE.replace('pushed_types = ["mine"]', LIMITS)) as port:
        raw = Raw(port)
        large = np.zeros((1, 3, 1, 1024, 512), np.uint8)
        status, answer = raw.post("enqueue", lines(large, prompts=["a"], reward_fn={"ocr": 1}))
        assert (status, b"more than 1 MiB" in answer) == (413, True)
        assert raw.form("ping", info_data="x" * (65 << 10))[0] == 413
        for _ in range(4):  # what is refused takes no memory
            assert raw.post("enqueue", lines(large[..., :-4], prompts=["a", "b"], reward_fn={"ocr": 1}))[0] == 413
            assert raw.post("enqueue", lines(large[:, :, :, :300], prompts=["a", "b"], reward_fn={"ocr": 1}))[0] == 422
        for _ in range(4):  # nor what was scored
            id = json.loads(raw.post("enqueue", lines(large[:, :, :, :300], prompts=["a"], reward_fn={"ocr": 1}))[1])
            raw.until_ready(uuid=id["uuid"], type="ocr")
        hanging = lines(VIDEO.repeat(2, 0), prompts=["hang", "a"], reward_fn={"dance_grpo": 1})
        assert raw.post("enqueue", hanging)[0] == 200
        status, answer = raw.post("enqueue", lines(VIDEO, prompts=["a"], reward_fn={"ocr": 1}))
        assert (status, b"reward.http.max_samples is 2" in answer) == (429, True)
        pushed = lines(VIDEO, prompts=["a"], reward_fn={"mine": 1})
        assert raw.post("enqueue", pushed)[0] == 422, "nothing is pushed here"
    logged = [line for line in (tmp_path / "log").read_text().splitlines() if "enqueue_refused" in line]
    assert "status=413" in logged[0]
    assert "the body has more than 1 MiB" in logged[0]
    assert len(logged) < 8, "not one for each"


NARROW = """
max_memory_mb = 4
max_media_mb = 2
max_body_mb = 1
max_samples = 4
"""


def test_clients_beyond_the_limits_try_again_and_all_get_their_scores(tmp_path: Path) -> None:
    with service(tmp_path, RECIPE.replace('pushed_types = ["mine"]', NARROW)) as port:
        clients = [client_of(port, ("REMOTE", "WFM")[number % 2]) for number in range(12)]
        found: dict[int, list[float]] = {}

        def work(number: int) -> None:
            videos = np.full((2, 3, 1, 256, 512), number, np.uint8)
            meta = {"prompts": [str(number)] * 2, "reward_fn": {"dance_grpo": 1.0}, "media_type": "video"}
            where = clients[number].enqueue(videos, meta)
            found[number] = clients[number].fetch(*where, "dance_grpo")["scores"]["overall_reward"]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(clients))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert found == {number: [float(number)] * 2 for number in range(len(clients))}
        assert sum(client.num_failures for client in clients) > len(clients), "some were refused, or not ready"


def test_requests_and_results_outlive_the_process_in_a_store(tmp_path: Path) -> None:
    stored = RECIPE + 'store = "sqlite"\n'
    videos = np.stack([np.full((3, 1, 2, 2), shade, np.uint8) for shade in (10, 30)])
    meta = {"reward_fn": {"dance_grpo": 1.0}, "media_type": "video", "video_infos": [{"video_fps": 8}, {}]}
    with service(tmp_path, stored) as port:
        client = client_of(port)
        done, _ = client.enqueue(videos, {"prompts": ["a", "b"], **meta})
        before = client.fetch(done, None, "dance_grpo")
        begun, _ = client.enqueue(videos, {"prompts": ["slow", "b"], **meta})
        assert Raw(port).form("pull", uuid=begun)[0] == 400
    with service(tmp_path, stored) as port:
        client = client_of(port)
        assert client.fetch(done, None, "dance_grpo") == before
        after = client.fetch(begun, None, "dance_grpo")
    assert after["scores"] == {"overall_reward": [10.0, 30.0], "vq_reward": [12.0, 17.0]}
    assert after["input_info"] == before["input_info"]


def test_replica_without_a_name_does_not_give_one(tmp_path: Path) -> None:
    environment = {name: "" for name in ("LEPTON_REPLICA_ID",) if name in os.environ}
    with service(tmp_path, **environment) as port:
        client = client_of(port)
        id, replica = client.enqueue(VIDEO, {"prompts": ["a b c"], "reward_fn": {"ocr": 1}})
        assert replica is None
        assert client.fetch(id, "replica-of-others", "ocr")["scores"] == {"ocr": [3.0]}
        described = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        described.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
        paths = json.loads(described.getresponse().read())["paths"]
        described.close()
        assert {"/api/reward/enqueue", "/api/reward/pull", "/api/reward/push"} <= paths.keys()
