"""The reward service over HTTP, as a process of its own and beside a controller: results, limits, refusals, its end."""

from __future__ import annotations

import base64
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub
from replica_processes import ForkedReplica, exit_code, replica
from reward_processes import PATIENCE_S, Client, Reply, eventually, run_service

from starling.common.wire import messages as wire
from starling.reward.http.npy import npy_header

SCORER = """
import os
import time

def reward(completion, reference, prompt_text, metadata):
    if completion == "hang":
        time.sleep(3600.0)
    if completion == "exit":
        os._exit(3)
    return float(completion == reference)

class Longest:
    scope = "groupwise"

    def score(self, batch):
        longest = max(map(len, batch.completions))
        return {"score": [float(len(one) == longest) for one in batch.completions]}
"""
RECIPE = """
[reward]
num_workers = {num_workers}

[[reward.scorers]]
name = "{folder}/mine.py:reward"
label = "right"
timeout_s = {scorer_s}
retries = 0

[[reward.scorers]]
name = "{folder}/mine.py:Longest"
label = "longest"
weight = 0.5

[reward.http]
enabled = true
port = 0
"""


def recipe(folder: Path, more: str = "", scorer_s: float = 1.0, num_workers: int = 2) -> Path:
    (folder / "mine.py").write_text(SCORER)
    text = RECIPE.format(folder=folder, scorer_s=scorer_s, num_workers=num_workers) + more
    (folder / "rewards.toml").write_text(text)
    return folder / "rewards.toml"


@contextmanager
def service(
    folder: Path, more: str = "", *, scorer_s: float = 1.0, num_workers: int = 2, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a service without a controller; yield its process and its port."""
    text = recipe(folder, more, scorer_s, num_workers).read_text()
    with run_service(folder, text, **variables) as found:
        yield found


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with service(tmp_path_factory.mktemp("service")) as (_, port):
        yield Client(port)


def test_samples_are_scored_by_their_groups(client: Client) -> None:
    samples = [
        {"completion": "abc", "reference": "abc", "group": "one"},
        {"completion": "ab", "reference": "abc", "group": "one"},
        {"completion": "a", "reference": "abc", "group": "two"},
        {"completion": "xyz", "reference": "xyz"},
    ]
    reply = client.send("POST", "/v1/rewards", {"samples": samples, "wait_s": 30})
    assert reply.status == 200, reply
    assert reply.body["rewards"] == [1.5, 0.0, 0.5, 1.5]
    assert reply.body["scores"] == {"right": [1.0, 0.0, 0.0, 1.0], "longest": [1.0, 0.0, 1.0, 1.0]}
    assert reply.body["statuses"] == ["ok"] * 4


EVALUATED = """
[[reward.scorers]]
name = "{folder}/mine.py:reward"
label = "judge"
use = "evaluation"
timeout_s = 1
retries = 0
"""


def test_evaluation_scores_are_apart_from_rewards_and_cost_none(tmp_path: Path) -> None:
    """A completion that hangs both scorers has no reward, one that hangs neither has both."""
    with service(tmp_path, EVALUATED.format(folder=tmp_path)) as (_, port):
        client = Client(port)
        reply = client.score("abc", "hang")
        assert (reply.body["rewards"], reply.body["statuses"]) == ([1.0, None], ["ok", "reward_timeout"])
        assert reply.body["evaluation_scores"] == {"judge": [1.0, None]}
        assert reply.body["scores"].keys() == {"right", "longest"}
        samples = [{"completion": "abc"}]
        without = client.send("POST", "/v1/rewards", {"samples": samples, "wait_s": 30, "evaluate": False})
        assert without.body["evaluation_scores"] == {}
        [*_, judge] = client.send("GET", "/v1/scorers").body
        assert judge == {"label": "judge", "weight": 0.0, "use": "evaluation", "media": "text"}


def test_named_group_is_one_however_its_metadata_are_written(client: Client) -> None:
    both = [{"a": 1, "b": 2.0}, {"b": 2, "a": True}]
    texts = ("abcd", "ab")
    for group, expected in (("one", [1.0, 0.0]), ("", [1.0, 1.0])):
        samples = [{"completion": text, "metadata": one, "group": group} for text, one in zip(texts, both, strict=True)]
        reply = client.send("POST", "/v1/rewards", {"samples": samples, "wait_s": 30})
        assert reply.body["scores"]["longest"] == expected
    orders = [{"a": 1, "b": 2}, {"b": 2, "a": 1}]
    same = [{"completion": text, "metadata": one} for text, one in zip(texts, orders, strict=True)]
    reply = client.send("POST", "/v1/rewards", {"samples": same, "wait_s": 30})
    assert reply.body["scores"]["longest"] == [1.0, 0.0]


def test_result_is_fetched_as_often_as_wanted_until_it_is_removed(client: Client) -> None:
    asked = client.score("abc", wait_s=0.0)
    assert (asked.status, asked.body["status"]) == (202, "pending")
    path = f"/v1/rewards/{asked.body['id']}"
    first = client.send("GET", f"{path}?wait_s=30")
    assert (first.status, first.body["rewards"]) == (200, [1.5])
    assert client.send("GET", path) == first
    assert client.send("DELETE", path).status == 204
    for method in ("GET", "DELETE"):
        gone = client.send(method, path)
        assert (gone.status, gone.body["detail"].partition(",")[0]) == (404, f"there is no request {path[12:]!r}")


def test_sample_that_hangs_or_crashes_its_worker_fails_alone(client: Client) -> None:
    reply = client.score("abc", "hang", "abc", "exit")
    assert reply.body["rewards"] == [1.0, None, 1.0, None]
    assert reply.body["statuses"] == ["ok", "reward_timeout", "ok", "reward_error"]
    assert reply.body["problems"][1] == ["scorer 'right' took longer than 1 s."]
    assert reply.body["problems"][3] == ["scorer 'right' ended its worker process (exit status 3)."]


def test_requests_are_answered_while_another_one_hangs(client: Client) -> None:
    hanging = threading.Thread(target=client.score, args=("hang",))
    hanging.start()
    replies = [client.score("abc") for _ in range(8)]
    assert [reply.body["rewards"] for reply in replies] == [[1.5]] * 8
    hanging.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"samples": []}, "at least 1 item"),
        ({"samples": [{}]}, "completion"),
        ({"samples": [{"completion": 3}]}, "valid string"),
        ({"samples": [{"completion": "a", "color": "red"}]}, "color"),
        ({"samples": [{"completion": "a"}], "wait_s": 61}, "less than or equal to 60"),
        ({"samples": [{"completion": "a"}], "wait_s": -1}, "greater than or equal to 0"),
        ({"samples": [{"completion": "a", "num_tokens": -1}]}, "greater than or equal to 0"),
        ({"samples": [{"completion": "a", "environment_reward": float("nan")}]}, "not JSON"),
        ({"samples": [{"completion": "a", "metadata": {"number": 1 << 70}}]}, "cannot be encoded"),
        ({"samples": [{"completion": "a", "metadata": []}]}, "valid dictionary"),
        (
            {"samples": [{"completion": "a", "metadata": {"deep": json.loads("[" * 64 + "]" * 64)}}]},
            "more than 64 deep",
        ),
        ({"samples": [{"completion": "a"}] * 4097}, "at most 4096 items"),
        (
            {"samples": [{"completion": "a", "group": "g"}, {"completion": "b", "group": "g", "prompt": "p"}]},
            "sample 1 of group 'g' has another prompt",
        ),
        ([], "valid dictionary"),
        ("text", "valid dictionary"),
    ],
)
def test_invalid_body_is_refused_with_the_reason(client: Client, body: Any, reason: str) -> None:
    reply = client.send("POST", "/v1/rewards", body)
    assert reply.status == 422
    assert reason in json.dumps(reply.body), reply


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff", b"[" * 100_000, b'{"samples": [{"completion": "\\ud800"}]}'])
def test_body_that_is_no_json_is_refused(client: Client, raw: bytes) -> None:
    reply = client.send("POST", "/v1/rewards", raw=raw)
    assert reply.status == 422
    assert reply.body["detail"].startswith("the body is"), reply
    assert client.score("abc").status == 200


def test_description_of_the_api_names_every_path(client: Client) -> None:
    described = client.send("GET", "/openapi.json").body
    paths = ("/v1/rewards", "/v1/rewards/{id}", "/v1/scorers", "/healthz", "/readyz", "/metrics")
    cosmos = tuple(f"/api/reward/{name}" for name in ("enqueue", "pull", "push", "ping", "latent_attr"))
    assert tuple(described["paths"]) == paths + cosmos
    refusals = described["paths"]["/v1/rewards"]["post"]["responses"]
    assert {"200", "202", "401", "408", "413", "422", "429"} <= refusals.keys()
    scorers = [
        {"label": "right", "weight": 1.0, "use": "training", "media": "text"},
        {"label": "longest", "weight": 0.5, "use": "training", "media": "text"},
    ]
    assert client.send("GET", "/v1/scorers").body == scorers
    assert client.send("PUT", "/v1/rewards", {}).status == 405
    assert client.send("GET", "/docs").status == 404, "its page loads scripts from elsewhere"


def test_health_and_metrics(client: Client) -> None:
    assert client.score("abc").status == 200
    assert client.send("GET", "/healthz").body == {"status": "ok"}
    # The scoring thread reports ten times a second, so both may be a little older than the answer.
    assert eventually(lambda: client.send("GET", "/readyz").body == {"status": "ok"})
    assert eventually(lambda: 'starling_reward_samples_total{status="ok"}' in client.send("GET", "/metrics").body)
    text = client.send("GET", "/metrics").body
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['starling_reward_samples_total{status="ok"}']) >= 1
    assert float(values["starling_reward_workers"]) >= 1
    assert values["starling_reward_pending_samples"] == "0"


LIMITED = """
token = "secret"
max_body_mb = 1
max_memory_mb = 1
max_samples = 3
result_ttl_s = 1.0
timeout_s = 8.0
"""


def test_limits_of_a_service_with_a_token(tmp_path: Path) -> None:
    with service(tmp_path, LIMITED, scorer_s=600.0) as (_, port):
        client = Client(port, "secret")
        for wrong in ("", "secre", "secret2", "\xe9"):
            refused = Client(port, wrong).score("abc")
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert client.send("GET", "/v1/scorers", authorization="Basic secret").status == 401
        assert Client(port).send("GET", "/metrics").status == 401
        assert Client(port).send("GET", "/healthz").status == 200

        unread = socket.create_connection(("127.0.0.1", port))
        unread.sendall(b"POST /healthz HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n" + b" " * 1_000_000)
        assert client.score("abc").status == 200, "a body that needs no token takes no room"
        unread.close()
        large = client.send("POST", "/v1/rewards", raw=b" " * (8 << 20))
        assert large.status == 413, "the client that has sent it all gets the answer"
        lists = {"samples": [{"completion": "a", "metadata": {"a": [[]] * 20_000}}]}
        assert client.send("POST", "/v1/rewards", lists).status == 413, "it would take more than its bytes"
        assert client.score("a" * 600_000).status == 200
        full = client.score("b" * 600_000, "b" * 400_000)
        assert (full.status, full.headers.get("retry-after")) in ((200, None), (429, "1"))

        late = client.score("abc", "hang", wait_s=0.0)
        assert late.status == 202
        busy = client.score("abc", "abc")
        assert (busy.status, busy.headers["retry-after"]) == (429, "1")
        assert "2 samples are being scored, and reward.http.max_samples is 3" in busy.body["detail"]
        assert client.score("abc").status == 200
        ended = client.send("GET", f"/v1/rewards/{late.body['id']}?wait_s=30")
        assert ended.body["statuses"] == ["ok", "reward_timeout"]
        time.sleep(1.1)
        assert client.send("GET", f"/v1/rewards/{late.body['id']}").status == 404, "it has expired"


@pytest.mark.parametrize(
    ("token", "num_bytes", "status"),
    [("wrong", 4_000_000, 401), ("secret", 4_000_000, 413), ("secret", 900_000, 429)],
)
def test_client_that_sends_for_a_while_gets_the_refusal(
    limited_port: int, token: str, num_bytes: int, status: int
) -> None:
    """A connection that is closed while it sends would be reset, and the answer lost."""
    head = (
        f"POST /v1/rewards HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: {num_bytes}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", limited_port), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode())
        for _ in range(10):
            connection.sendall(b" " * (num_bytes // 10))
            time.sleep(0.1 if status == 401 else 0.3)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == status
        assert response.read()


@pytest.fixture(scope="module")
def limited_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Return the port of a service half of whose memory is in use."""
    limits = LIMITED.replace("timeout_s = 8.0", "timeout_s = 600.0")
    with service(tmp_path_factory.mktemp("limited"), limits, scorer_s=600.0) as (_, port):
        assert Client(port, "secret").score("hang", prompt="a" * 600_000, wait_s=0.0).status == 202
        yield port


def test_request_of_a_client_that_goes_before_it_has_the_id_is_not_scored(tmp_path: Path) -> None:
    data = json.dumps({"samples": [{"completion": "hang"}] * 4, "wait_s": 60}).encode()
    with service(tmp_path, scorer_s=60.0) as (_, port):
        client = Client(port)
        known = client.score("hang", wait_s=0.0).body["id"]
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            connection.sendall(b"POST /v1/rewards HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
            assert eventually(lambda: "pending_samples 5\n" in client.send("GET", "/metrics").body)
        assert eventually(lambda: "pending_samples 1\n" in client.send("GET", "/metrics").body), "nobody can fetch it"
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as connection:
            connection.sendall(b"GET /v1/rewards/%s?wait_s=60 HTTP/1.1\r\nhost: a\r\n\r\n" % known.encode())
            time.sleep(0.2)
        time.sleep(0.2)
        assert client.send("GET", f"/v1/rewards/{known}").status == 202, "who has the id can come back"


def test_bodies_are_not_kept_while_clients_wait(tmp_path: Path) -> None:
    num, size = 6, 40 << 20
    pixels = npy_header("uint8", (1, size // 4 - 64, 1, 3)) + bytes((size // 4 - 64) * 3)
    sample = {"completion": "hang", "media": {"kind": "pixels", "npy": base64.b64encode(pixels).decode()}}
    data = json.dumps({"samples": [sample], "wait_s": 30.0}).encode()
    with service(tmp_path, scorer_s=60.0) as (process, port):
        client = Client(port)
        assert client.score("abc").status == 200

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException):  # the service ends first
                client.send("POST", "/v1/rewards", raw=data)

        before = resident_bytes(process.pid)
        threads = [threading.Thread(target=ask) for _ in range(num)]
        for number, thread in enumerate(threads, 1):  # one after another, which share what the allocator keeps
            thread.start()
            pending = f"starling_reward_pending_samples {number}\n"
            assert eventually(lambda pending=pending: pending in client.send("GET", "/metrics").body)  # type: ignore[misc]
        grown = resident_bytes(process.pid) - before
        process.kill()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert grown < num * size / 2, "their media are in memory of their own, and nothing reads their bodies again"


def resident_bytes(pid: int) -> int:
    return int(re.findall(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) << 10


def test_token_comes_from_the_environment_and_others_need_one(tmp_path: Path) -> None:
    with service(tmp_path, WFM_REWARD_TOKEN="old", REMOTE_REWARD_TOKEN="new") as (_, port):
        assert Client(port, "old").score("abc").status == 401
        assert Client(port, "new").score("abc").status == 200
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(recipe(tmp_path))]
    open_to_all = subprocess.run(
        [*command, "--reward.http.host", "0.0.0.0"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert open_to_all.returncode == 2
    assert "reward.http.host is '0.0.0.0', which others can reach, and there is no token" in open_to_all.stderr
    slow = """--reward.scorers=[{name = "no_such_module:f"}]"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for flags, problem in (
            (("--reward.http.host", "0.0.0.0"), "there is no token"),
            (("--reward.http.port", str(taken.getsockname()[1])), "the server cannot listen on 127.0.0.1:"),
        ):
            early = subprocess.run(
                [*command, slow, *flags], capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
            assert early.returncode == 2
            assert problem in early.stderr, "before any scorer is loaded, which can take minutes"
    without_any = subprocess.run(
        [*command, "--reward.http.enabled", "false"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert without_any.returncode == 2
    assert "--controller is missing; give tcp://host:port, or set reward.http.enabled" in without_any.stderr


def test_service_ends_at_a_signal_while_a_client_waits(tmp_path: Path) -> None:
    with service(tmp_path) as (process, port):
        assert Client(port).score("abc").status == 200
        replies: list[Reply] = []
        waiting = threading.Thread(target=lambda: replies.append(Client(port).score("hang", wait_s=60.0)))
        waiting.start()
        while "starling_reward_pending_samples 1" not in Client(port).send("GET", "/metrics").body:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        waiting.join(PATIENCE_S)
        assert [reply.status for reply in replies] == [503]
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_controller_and_http_clients_share_the_workers(hub: FakeHub, tmp_path: Path) -> None:
    path = recipe(tmp_path)
    with replica(hub, "reward-0", tmp_path, "--config", str(path), "--reward.http.port", "0") as reward:
        hub.hello("reward-0")
        assert isinstance(reward, ForkedReplica)
        output = reward.wait_for_output("scorers_loaded")
        port = int(output.partition("base_url=http://127.0.0.1:")[2].split()[0])
        lease = hub.lease("score")
        completions = tuple(wire.CompletionText(text=one, status=wire.Status.OK, num_tokens=1) for one in ("abc", "b"))
        prompt = wire.Prompt(id="p", text="p", reference="abc")
        hub.send("reward-0", wire.ScoreGroup(lease=lease, prompt=prompt, completions=completions))
        assert Client(port).score("abc", "abcd").body["rewards"] == [1.0, 0.5]
        scored, _ = hub.answer("reward-0", lease, wire.GroupScored)
        assert scored.rewards == (1.5, 0.0)
        reward.terminate()
        assert exit_code(reward) == 0
