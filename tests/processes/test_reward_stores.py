"""Accepted means answered: services killed under load, with requests in SQLite or Redis, alone and together."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import test_reward_cosmos as cosmos
from redis_servers import PASSWORD, QUOTED, RedisServer, needs_redis, redis_server
from test_reward_http import PATIENCE_S, Client, eventually, port_of

LEASE_S: Final = 5.0
NUM_CLIENTS: Final = 4
SCORER: Final = """
import time

def reward(completion, reference, prompt_text, metadata, service):
    with open(metadata["scored"], "a") as file:
        file.write(f"{completion} {service}\\n")
    time.sleep(0.002)
    return float(len(completion))
"""
RECIPE: Final = """
[reward]
num_workers = 2
sandbox = "process"

[[reward.scorers]]
name = "{folder}/mine.py:reward"
label = "length"
options = {{ service = "{name}" }}

[reward.http]
enabled = true
port = 0
{more}
"""


class Service:
    """One start of a service."""

    def __init__(self, folder: Path, name: str, more: str) -> None:
        (folder / "mine.py").write_text(SCORER)
        recipe = folder / f"{name}.toml"
        recipe.write_text(RECIPE.format(folder=folder, name=name, more=more))
        recipe.chmod(0o600)
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(recipe), "--dir", str(folder)]
        with self.log.open("w") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, stderr=log, env=environment, text=True)

    def client(self) -> Client:
        """Return a client, once requests are accepted."""
        return Client(port_of(self.log, self.process))

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end."""
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)


@contextmanager
def services() -> Iterator[list[Service]]:
    """End all services of a list in the end."""
    started: list[Service] = []
    try:
        yield started
    finally:
        for one in started:
            one.process.kill()
            one.process.wait(PATIENCE_S)


class Load:
    """Concurrent clients, each of which knows what was accepted."""

    def __init__(self, clients: list[Client], scored: Path, name: str = "") -> None:
        self.accepted: dict[str, list[str]] = {}
        """Completions by id."""
        self.refused: list[int] = []
        self._clients, self._scored, self._name = clients, scored, name
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        choice = random.Random(number)
        count = 0
        while not self._stop.is_set():
            count += 1
            texts = [f"{self._name}{number}-{count}-{index}" for index in range(choice.randint(1, 8))]
            samples = [{"completion": text, "metadata": {"scored": str(self._scored)}} for text in texts]
            client = choice.choice(self._clients)
            try:
                reply = client.send("POST", "/v1/rewards", {"samples": samples})
            except OSError:  # it was killed: nothing was accepted, as far as this client knows
                time.sleep(0.02)
                continue
            except Exception as error:
                if type(error).__module__ != "http.client":
                    raise
                continue
            if reply.status in (200, 202):
                self.accepted[reply.body["id"]] = texts
            else:
                self.refused.append(reply.status)
                time.sleep(0.02)

    def stop(self) -> None:
        """End all clients."""
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def check(self, client: Client) -> None:
        """Assert that each accepted request has its rewards."""
        lost = {}
        for id, texts in self.accepted.items():
            found = self._resolved(client, id)
            if found.get("rewards") != [float(len(text)) for text in texts]:
                lost[id] = found
        assert lost == {}, f"{len(lost)} of {len(self.accepted)} requests"

    def _resolved(self, client: Client, id: str) -> Any:
        end = time.monotonic() + 2 * PATIENCE_S
        while (reply := client.send("GET", f"/v1/rewards/{id}?wait_s=20")).status in (202, 503):
            assert time.monotonic() < end, reply
        return reply.body

    def scored_by(self) -> dict[str, list[str]]:
        """Return of each completion the names of the services that have scored it."""
        found: dict[str, list[str]] = {}
        for line in self._scored.read_text().splitlines():
            completion, _, service = line.partition(" ")
            found.setdefault(completion, []).append(service)
        return found


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=needs_redis)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return the settings of a store."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield 'store = "sqlite"'
        else:
            yield of_redis(stack.enter_context(redis_server(tmp_path / "redis")))


def of_redis(server: RedisServer) -> str:
    return f'store = "redis"\nredis_url = "{server.url}"\nredis_lease_s = {LEASE_S}'


def test_every_accepted_request_is_answered_though_the_service_is_killed_under_load(store: str, tmp_path: Path) -> None:
    with services() as started:
        load: Load | None = None
        loads = []
        for number in range(3):
            started.append(Service(tmp_path, f"start-{number}", store))
            load = Load([started[-1].client()], tmp_path / "scored", f"{number}-")
            loads.append(load)
            num = 40 * (number + 1)
            assert eventually(lambda load=load, num=num: len(load.accepted) >= num), started[-1].log.read_text()
            started[-1].end()
            load.stop()
        started.append(Service(tmp_path, "last", store))
        client = started[-1].client()
        for load in loads:
            load.check(client)
        for completion, scored_by in load.scored_by().items():
            assert len(scored_by) == len(set(scored_by)), f"{completion} was scored twice by one process"
        assert eventually(lambda: "starling_reward_pending_samples 0" in client.send("GET", "/metrics").body)
        assert started[-1].process.poll() is None
        for one in started:
            assert "Traceback" not in one.log.read_text(), one.log.read_text()
            assert QUOTED not in one.log.read_text()
            assert PASSWORD not in one.log.read_text()


def test_results_and_requests_survive_a_stop_and_results_are_never_another(store: str, tmp_path: Path) -> None:
    with services() as started:
        started.append(Service(tmp_path, "first", store))
        load = Load([started[0].client()], tmp_path / "scored")
        assert eventually(lambda: len(load.accepted) >= 40)
        done = {}
        client = started[0].client()
        for id in list(load.accepted)[:10]:
            done[id] = client.send("GET", f"/v1/rewards/{id}?wait_s=30")
            assert done[id].status == 200
        removed = next(reversed(done))
        assert client.send("DELETE", f"/v1/rewards/{removed}").status == 204
        started[0].end(signal.SIGTERM)
        assert started[0].process.returncode == 0, started[0].log.read_text()
        load.stop()
        started.append(Service(tmp_path, "second", store))
        client = started[1].client()
        del done[removed], load.accepted[removed]
        assert client.send("GET", f"/v1/rewards/{removed}").status == 404
        for id, reply in done.items():
            assert client.send("GET", f"/v1/rewards/{id}").body == reply.body
        load.check(client)
        twice = {text: by for text, by in load.scored_by().items() if len(by) > 1}
        # Those that were being scored at the stop; all others were scored once.
        assert all(len(by) == 2 and by[0] != by[1] for by in twice.values()), twice


@needs_redis
def test_instances_behind_a_load_balancer_take_over_from_one_that_is_killed(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, services() as started:
        started += [Service(tmp_path, name, of_redis(server)) for name in ("one", "two", "three")]
        clients = [one.client() for one in started]
        load = Load(clients, tmp_path / "scored")
        assert eventually(lambda: len(load.accepted) >= 60)
        # A client may pull anywhere.
        for id in list(load.accepted)[:20]:
            replies = [client.send("GET", f"/v1/rewards/{id}?wait_s=30") for client in clients]
            assert replies[0].status == 200, replies
            assert replies[0].body == replies[1].body == replies[2].body
        started[0].end()
        num = len(load.accepted)
        assert eventually(lambda: len(load.accepted) >= num + 30)
        load.stop()
        load.check(clients[1])
        load.check(clients[2])
        for completion, scored_by in load.scored_by().items():
            living = [name for name in scored_by if name != "one"]
            assert len(living) <= 1, f"{completion} was scored twice by instances that live"
            assert len(scored_by) <= 2


@needs_redis
def test_client_of_cosmos_rl_pulls_at_another_instance_than_the_dead_one_that_accepted(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, ExitStack() as stack:
        recipe = f"{cosmos.RECIPE}{of_redis(server)}\n"
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        pulled_at = stack.enter_context(cosmos.service(tmp_path / "two", recipe))
        shades = (10, 30, 50)
        videos = [np.full((1, 3, 5, 8, 8), shade, np.uint8) for shade in shades]
        with cosmos.service(tmp_path / "one", recipe) as accepted_at:
            variables = {**cosmos.variables(pulled_at, "REMOTE")}
            variables["REMOTE_REWARD_ENQUEUE_URL"] = variables["REMOTE_REWARD_ENQUEUE_URL"].replace(
                str(pulled_at), str(accepted_at)
            )
            client = cosmos.CosmosClient(variables, "REMOTE")
            meta = {"reward_fn": {"dance_grpo": 1.0}, "media_type": "video", "video_infos": [{"video_fps": 16.0}]}
            prompts = ("quick", "slow", "slow")
            ids = [
                client.enqueue(one, {**meta, "prompts": [text]})[0] for one, text in zip(videos, prompts, strict=True)
            ]
            assert client.fetch(ids[0], None, "dance_grpo")["scores"]["overall_reward"] == [10.0]
        for id, shade in zip(ids, shades, strict=True):
            assert client.fetch(id, None, "dance_grpo")["scores"]["overall_reward"] == [float(shade)]


@needs_redis
def test_instances_continue_when_redis_was_gone_for_a_while(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server, services() as started:
        started += [Service(tmp_path, name, of_redis(server)) for name in ("one", "two")]
        clients = [one.client() for one in started]
        load = Load(clients, tmp_path / "scored")
        assert eventually(lambda: len(load.accepted) >= 40)
        server.stop()
        assert eventually(lambda: 503 in load.refused)
        refused = clients[0].send("POST", "/v1/rewards", {"samples": [{"completion": "a"}]})
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert eventually(lambda: clients[0].send("GET", "/readyz").status == 503)
        assert "starling_reward_store_available 0" in clients[0].send("GET", "/metrics").body
        time.sleep(1.5 * LEASE_S)
        server.start()
        num = len(load.accepted)
        assert eventually(lambda: len(load.accepted) >= num + 20)
        load.stop()
        load.check(clients[0])
        load.check(clients[1])
        for completion, scored_by in load.scored_by().items():
            assert len(scored_by) == 1, f"{completion} was scored twice, and nobody has died: {scored_by}"
        assert eventually(lambda: clients[0].send("GET", "/readyz").status == 200)
        for one in started:
            log = one.log.read_text()
            assert log.count("store_unavailable") == log.count("store_available") >= 1
            assert PASSWORD not in log
            assert QUOTED not in log
            assert "Traceback" not in log


def test_store_that_cannot_be_used_is_one_sentence_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "requests-reward-0.sqlite").write_text("text" * 1000)
    service = Service(tmp_path, "one", 'store = "sqlite"')
    assert service.process.wait(PATIENCE_S) == 2
    assert "requests-reward-0.sqlite cannot be used: file is not a database" in service.log.read_text()
    service = Service(tmp_path, "two", 'store = "redis"')
    assert service.process.wait(PATIENCE_S) == 2
    assert 'reward.http.store is "redis": set reward.http.redis_url' in service.log.read_text()
    service = Service(tmp_path, "typo", f'store = "redis"\nredis_ulr = "redis://:{QUOTED}@127.0.0.1:1/0"')
    assert service.process.wait(PATIENCE_S) == 2
    log = service.log.read_text()
    assert "unknown setting reward.http.redis_ulr = 'redis://...@127.0.0.1:1/0'; did you mean" in log
    service = Service(tmp_path, "three", f'store = "redis"\nredis_url = "redis://:{QUOTED}@127.0.0.1:1/0"')
    assert service.process.wait(PATIENCE_S) == 2
    log = service.log.read_text()
    assert "the Redis of reward.http.redis_url cannot be used: Error" in log
    assert QUOTED not in log
    assert PASSWORD not in log
    assert "Traceback" not in log
