"""Reward services as processes of their own, without a controller, and a client of `/v1/rewards`."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

PATIENCE_S = 240.0


class Reply(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


class Client:
    """Requests to a service."""

    def __init__(self, port: int, token: str = "") -> None:
        self.port, self.token = port, token

    def send(self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = raw if raw is not None or body is None else json.dumps(body).encode()
        authorization = {"authorization": f"Bearer {self.token}"} if self.token else {}
        try:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it answers before it has read a body that is too large
                connection.request(method, path, data, {"content-type": "application/json", **authorization, **headers})
            response = connection.getresponse()
            text = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
            is_json = found.get("content-type") == "application/json"
            return Reply(response.status, json.loads(text) if is_json else text.decode(), found)
        finally:
            connection.close()

    def score(self, *completions: str, wait_s: float = 30.0, **fields: Any) -> Reply:
        samples = [{"completion": one, "reference": "abc", **fields} for one in completions]
        return self.send("POST", "/v1/rewards", {"samples": samples, "wait_s": wait_s})


@contextmanager
def run_service(folder: Path, recipe: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a service with a recipe, and kill it in the end; yield its process and its port.

    Args:
        folder: the service's; its messages are in the file `log`.
        recipe: the text of the file with its settings.
        variables: environment variables.
    """
    (folder / "rewards.toml").write_text(recipe)
    with start(folder / "rewards.toml", folder, folder / "log", **variables) as process:
        try:
            yield process, port_of(folder / "log", process)
        finally:
            process.kill()


def start(config: Path, folder: Path, log: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a service with a file of settings."""
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(config), "--dir", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with log.open("w") as file:
        return subprocess.Popen(command, stderr=file, env=environment, text=True)


def port_of(log: Path, process: subprocess.Popen[str]) -> int:
    end = time.monotonic() + PATIENCE_S
    while not (found := re.search(r"base_url=http://[^ ]*:(\d+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return int(found[1])


def eventually(is_true: Callable[[], bool]) -> bool:
    """Wait until a condition holds; return False when it does not in time."""
    end = time.monotonic() + PATIENCE_S
    while not (found := is_true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found
