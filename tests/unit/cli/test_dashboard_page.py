"""The dashboard over real HTTP and a real folder: who is answered, and what."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
import zmq
from run_folders import evaluation_line, make_attempt, step_line

from starling.cli.dashboard.access import MAX_BODY_BYTES, Guard, make_token
from starling.cli.dashboard.app import Dashboard, application
from starling.cli.dashboard.control import operator_message
from starling.cli.dashboard.serve import _kept_token
from starling.cli.dashboard.watch import RunWatch
from starling.common.errors import ConfigError
from starling.common.http.server import HttpAddress, HttpServer
from starling.common.net.keyring import make_keys
from starling.common.wire.messages import (
    ChangeSetting,
    DrainReplica,
    OperatorMessage,
    RequestCheckpoint,
    RequestEvaluation,
    RequestStop,
    ScaleReplicas,
)
from starling.common.wire.telemetry import ReplicaView, RunSnapshot

TOKEN = make_token()
DEADLINE_S = 60.0
JSON = {"content-type": "application/json"}
EVALUATION = json.dumps(["evaluation reward"])
EVALUATE = json.dumps({"action": "evaluate"})


class Page:
    """Client of a dashboard."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.bearer = {"authorization": f"Bearer {TOKEN}"}

    def ask(
        self, path: str, *, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """Return the answer to one who has the token."""
        status, _, body = self.ask(f"/api/{path}", **self.bearer)
        assert status == 200, body
        return json.loads(body)

    def post(self, body: str = EVALUATE, **headers: str) -> tuple[int, str]:
        """Send a request to run 0, as the page does. Returns status and body."""
        own = {"origin": f"http://127.0.0.1:{self.port}", **JSON, **self.bearer}
        status, _, text = self.ask("/api/runs/0/control", method="POST", body=body, **{**own, **headers})
        return status, text

    def live(self, num: int) -> list[Any]:
        """Return the first events of the stream of changes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/api/live", headers=self.bearer)
            answer, found = connection.getresponse(), []
            assert answer.getheader("content-type", "").startswith("text/event-stream")
            while len(found) < num:
                line = answer.readline()
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
            return found
        finally:
            connection.close()


@contextmanager
def page_of(*folders: Path, may_control: bool = False) -> Iterator[Page]:
    watches = [RunWatch(number, folder, folder.name) for number, folder in enumerate(folders)]
    closing = threading.Event()
    guard = Guard(application(Dashboard(watches, may_control, None, closing)), TOKEN, ("dash.example",))
    server = HttpServer(guard, HttpAddress("127.0.0.1", 0, "dashboard"), headers_s=10.0, unread_s=30.0)
    try:
        server.start()
        for watch in watches:
            watch.start()
        server.wait_started()
        yield Page(server.port)
    finally:
        closing.set()
        server.close()
        for watch in watches:
            watch.stop()


def wait_for(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)


SAMPLE = {"prompt_id": "p", "prompt": "2+2?", "completion": "<b>4</b>", "reward": 1.0, "score/math": 1.0,
          "num_tokens": 3, "status": "ok", "token_ids": [1, 2, 3], "logprobs": [-0.1, -0.2, -3.0],
          "versions": [[0, 3]]}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dashboard") / "mine"
    joined = {
        "time": 1_700_000_000.0,
        "kind": "joined",
        "replica": "rollout-0",
        "role": "rollout",
        "host": "a",
        "pid": 1,
    }
    lines = [joined, *(step_line(step) for step in range(1, 40)), evaluation_line(39, 0.5)]
    make_attempt(folder, lines, samples={1: [SAMPLE]})
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> Iterator[Page]:
    with page_of(run) as found:
        wait_for(lambda: found.live(1)[0]["newest_step"] == 39, "run")
        wait_for(lambda: found.get("runs/0/series?names=[]")["revision"] == 40, "lines")
        yield found


def test_assets_need_no_token_and_come_with_a_strict_policy(page: Page) -> None:
    for path, kind in (("/", "text/html"), ("/assets/main.js", "text/javascript"), ("/assets/style.css", "text/css")):
        status, headers, body = page.ask(path)
        assert status == 200
        assert headers["content-type"].startswith(kind)
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "http://" not in body.replace("http://www.w3.org/", "")
        assert "https://" not in body
    assert page.ask("/assets/..%2fapp.py")[0] == 404
    assert page.ask("/assets/app.py")[0] == 404


def test_data_needs_the_token_and_an_own_name(page: Page) -> None:
    assert page.ask("/api/runs")[0] == 401
    assert page.ask("/api/runs", authorization="Bearer x")[0] == 401
    assert page.ask(f"/api/runs?token={TOKEN}")[0] == 401
    assert page.ask("/api/nothing", **page.bearer)[0] == 404
    for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", "", "localhost:x"):
        status, _, text = page.ask("/", host=host)
        assert status == 403, host
        assert "--allow-host" in text
    for host in ("localhost", "127.0.0.1:1", "[::1]:80", "DASH.example:80", "192.168.1.4"):
        assert page.ask("/api/runs", host=host, **page.bearer)[0] == 200
    assert page.ask("/api/runs", sec_fetch_site="cross-site", **page.bearer)[0] == 403


def test_requests_of_other_sites_change_nothing(run: Path, page: Page) -> None:
    assert page.post() == (403, "this page only shows; start it with --allow-control")
    with page_of(run, may_control=True) as control:
        wait_for(lambda: control.live(1)[0]["newest_step"] == 39, "run")
        assert control.post(origin="http://evil.example")[0] == 403
        assert control.post(origin="null")[0] == 403
        assert control.post(**{"content-type": "text/plain"})[0] == 415
        assert control.post(authorization="Bearer x")[0] == 401
        assert control.ask("/api/runs/0/control", **control.bearer)[0] == 405
        assert control.post("x")[0] == 400
        assert control.post("[]")[0] == 400
        assert control.post(" " * (MAX_BODY_BYTES + 1))[0] == 413
        for body in ("{}", '{"action":"set","key":1}', '{"action":"set","key":"a","value":"[1]"}',
                     '{"action":"evaluate","num_completions":-1}', '{"action":"scale","role":"rollout","num":"8"}',
                     '{"action":"scale","role":"rollout","num":-1}', '{"action":"scale","role":"","num":1}',
                     '{"action":"drain"}', '{"action":"drain","name":""}', '{"action":["stop"]}'):  # fmt: skip
            status, text = control.post(body)
            assert (status, json.loads(text)["ok"]) == (200, False)
            assert "controller" not in json.loads(text)["text"], "it was not sent"
        status, text = control.post()
        answer = json.loads(text)
        assert (status, answer["ok"]) == (200, False)
        assert "controller" in answer["text"], "the run is over"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"action": "evaluate", "num_completions": 3}, RequestEvaluation(request="", num_completions=3)),
        ({"action": "checkpoint"}, RequestCheckpoint(request="")),
        (
            {"action": "set", "key": " rl.max_staleness ", "value": "2"},
            ChangeSetting(request="", key="rl.max_staleness", value=2),
        ),
        ({"action": "scale", "role": "rollout", "num": 8}, ScaleReplicas(request="", role="rollout", num=8)),
        ({"action": "drain", "name": "rollout-3"}, DrainReplica(request="", name="rollout-3")),
        ({"action": "stop"}, RequestStop(request="", reason="an operator asked for it on the dashboard")),
    ],
    ids=str,
)  # fmt: skip
def test_each_action_is_one_message(asked: dict[str, Any], message: OperatorMessage) -> None:
    found = operator_message(asked)
    assert found.request
    assert msgspec.structs.replace(found, request="") == message


def test_curves_events_completions_and_settings(page: Page) -> None:
    names = quote(json.dumps(["reward", "tokens/s", "none"]))
    series = page.get(f"runs/0/series?columns=4&names={names}")["series"]
    assert set(series) == {"reward", "tokens/s"}
    assert [len(table) for table in series["reward"]] == [4, 4, 4, 4]
    part = page.get(f"runs/0/series?begin=10&end=11&x=seconds&names={names}")["series"]["reward"][0]
    assert part == [9.0, 10.0, 11.0, 12.0]
    assert page.get(f"runs/0/series?of=evaluation&names={quote(EVALUATION)}")["series"]
    assert "loss" in page.get("runs/0/catalog")["step"]
    assert [event["kind"] for event in page.get("runs/0/events")["events"]] == ["joined", "evaluation"]
    assert page.get("runs/0/replicas")[0]["host"] == "a"
    found = page.get("runs/0/completions")
    assert found["num"] == 1
    assert found["completions"][0]["completion"] == "<b>4</b>"
    assert found["completions"][0]["parts"]["score"] == {"math": 1.0}
    tokens = page.get(f"runs/0/tokens?key={found['completions'][0]['key']}")
    assert (tokens["logprobs"], tokens["versions"]) == ([-0.1, -0.2, -3.0], [0, 0, 0])
    assert {"key": "model.path", "value": "models/small", "default": '""'} in page.get("runs/0/settings")["changed"]
    assert page.get("compare")["settings"] == []


def test_bad_questions_get_one_sentence(page: Page) -> None:
    for path in (
        "runs/0/series?columns=x",
        "runs/0/series?names={}",
        "runs/0/series?begin=nan",
        "runs/0/completions?order=x",
    ):
        status, _, text = page.ask(f"/api/{quote(path, safe='/?=&')}", **page.bearer)
        assert (status, len(text.splitlines())) == (400, 1), path
    for path in ("runs/7/series", "runs/0/tokens?key=99", "runs/0/media?key=1"):
        assert page.ask(f"/api/{path}", **page.bearer)[0] == 404, path


def test_stream_tells_of_the_run(page: Page) -> None:
    (state,) = page.live(1)
    assert (state["name"], state["state"], state["newest_step"], state["live"]) == ("mine", "ended", 39, False)
    assert state["figures"]["evaluation"] == 0.5
    answer = page.get("runs/0/why")
    assert not answer["ok"]
    assert "controller" in answer["text"]


def test_run_that_begins_later_appears(tmp_path: Path, run: Path) -> None:
    later = tmp_path / "later"
    with page_of(later, run) as page:
        first = page.live(2)
        assert first[0]["attempt"] == ""
        wait_for(lambda: "there is no run in" in page.live(1)[0]["problem"], "sentence")
        assert page.ask("/api/runs/0/events", **page.bearer)[0] == 404
        wait_for(lambda: page.get("runs/1/catalog")["step"], "catalog")
        make_attempt(later, [step_line(1)])
        wait_for(lambda: page.live(1)[0]["newest_step"] == 1, "step")
        assert page.live(1)[0]["problem"] == ""
        make_attempt(later, [step_line(8)], number=2)
        wait_for(lambda: page.live(1)[0]["attempt"] == "attempt-2", "second attempt")
        wait_for(lambda: page.live(1)[0]["newest_step"] == 8, "its step")


def test_topology_comes_from_the_telemetry_of_a_run_without_curve(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", [step_line(1)], records=())
    (folder / "config.toml").write_text('[run]\nid = "x"\n[network]\ncurve = false\n')
    make_keys(folder / "keys", ["observer-0"])  # every run has keys
    context = zmq.Context()
    with page_of(tmp_path / "run") as page, context.socket(zmq.PUB) as telemetry:
        address = f"tcp://127.0.0.1:{telemetry.bind_to_random_port('tcp://127.0.0.1')}"
        (folder / "controller.json").write_text("{")
        wait_for(lambda: page.live(1)[0]["newest_step"] == 1, "step")
        (folder / "controller.json").write_text('{"telemetry": "nonsense"}')
        wait_for(lambda: "no address of telemetry" in page.live(1)[0]["problem"], "sentence")
        (folder / "controller.json").write_text(json.dumps({"telemetry": address}))
        view = ReplicaView(name="rollout-0", role="rollout", version=1, num_leases=2)
        snapshot = RunSnapshot(
            phase="rl", version=2, last_step=9, num_supervised_steps=0, elapsed_s=1.0, waiting_for="x",
            replicas=(view,), step={"loss": float("nan")},
        )  # fmt: skip

        def told() -> Any:
            telemetry.send(b"garbage")
            telemetry.send(msgspec.msgpack.encode(snapshot))
            return page.live(1)[0]["live"]

        wait_for(told, "snapshot")
        state = page.live(1)[0]
        assert state["state"] == "running"
        assert state["snapshot"]["replicas"][0]["name"] == "rollout-0"
    context.term()


def test_token_file_is_made_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = _kept_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert _kept_token(path) == token
    path.write_text("short")
    with pytest.raises(ConfigError, match="at least 22"):
        _kept_token(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        _kept_token(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="symbolic link"):
        _kept_token(tmp_path / "link")


def test_folder_without_a_run_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "starling.cli.main", "dashboard", str(tmp_path / "typo"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("dashboard: http://127.0.0.1:")
        process.terminate()
        told = process.communicate(timeout=120)[1]
    assert f"starling: there is no run in {tmp_path}/typo yet; the page waits for one" in told
    assert process.returncode == 0
