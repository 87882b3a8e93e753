"""Reward services with a store, and concurrent clients that know what was accepted."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from redis_servers import RedisServer
from reward_processes import PATIENCE_S, Client, port_of, start

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
timeout_s = {timeout_s}

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
        recipe.write_text(RECIPE.format(folder=folder, name=name, timeout_s=PATIENCE_S, more=more))
        recipe.chmod(0o600)
        self.log = folder / f"{name}.log"
        self.process = start(recipe, folder, self.log)

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
            except HTTPException:  # likewise, in the middle of its answer
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


def of_redis(server: RedisServer) -> str:
    return f'store = "redis"\nredis_url = "{server.url}"\nredis_lease_s = {LEASE_S}'
