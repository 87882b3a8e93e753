"""HTTP servers of vLLM, as its users start them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE_S = 240.0
SHARED_MEMORY = Path("/dev/shm")
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


@contextmanager
def vllm_server(
    model: Path, log: Path, *, tp: int = 1, backend: str = "starling", arguments: tuple[str, ...] = ()
) -> Iterator[str]:
    """Start a server with the model's name ``m``, and stop it afterwards; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "512", "--enforce-eager", "--kv-cache-memory-bytes", str(16 << 20)]
    command += ["--tensor-parallel-size", str(tp), "--weight-transfer-config", json.dumps({"backend": backend})]
    before = {*SHARED_MEMORY.glob("vllm_*")}
    environment = {**os.environ, **ENVIRONMENT}
    if tp == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        for left in {*SHARED_MEMORY.glob("vllm_*")} - before:  # vLLM does not remove them
            left.unlink(missing_ok=True)


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).read()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"the server is not ready after {DEADLINE_S:g} s: {log.read_text()[-4000:]}")


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the answer of a route: of POST if there is a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode()[:2000]}") from error


def complete(url: str, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Sample tokens; return them and their log-probabilities."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "seed": 1,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    (choice,) = ask(f"{url}/v1/completions", body)["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]
