"""The reward service over HTTP: rewards per second, latency, and whether every request is answered.

    python bench/reward.py [--quick]

`starling reward` scores with `exact_match` and `prefix_match` in two workers. 200 clients, each over a connection of
its own, send samples in batches of 64, wait for the answer, and compare the rewards with what they must be. The clients
are one process beside the service, whose processor time is reported apart. Then the same with requests and results in
SQLite, on the disk of temporary files, and in a Redis on this machine, which syncs its file once a second.

At last videos of 13 frames of 64 x 64 pixels, five to a request, over the wire of Cosmos-RL: 200 clients enqueue, and
pull until the scores of `brightness` and `motion` are there.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import psutil
from figure import machine, print_figure, progress, quantile, rounded, versions
from reward_service import START_S, service

CLIENTS: Final = 200
BATCH: Final = 64
ANSWER_S: Final = 120.0
RECIPE = """
[reward]
num_workers = 2

[[reward.scorers]]
name = "exact_match"

[[reward.scorers]]
name = "prefix_match"
weight = 0.5

[reward.http]
enabled = true
port = 0
{store}
"""
VIDEO_RECIPE: Final = """
[reward]
num_workers = 2

[[reward.scorers]]
name = "brightness"

[[reward.scorers]]
name = "motion"

[reward.http]
enabled = true
port = 0
"""
VIDEO_SHAPE: Final = (3, 13, 64, 64)
VIDEOS: Final = 5
"""Of a request."""
LUMA: Final = (0.299, 0.587, 0.114)
"""Share of red, green and blue in the brightness (ITU-R BT.601)."""
PULL_S: Final = 0.05
"""Between two pulls, at first; then half as long again each time."""
SAMPLES: Final = (("answer", 1.5), ("ans", 0.25), ("none", 0.0))
"""Completions, and their rewards where `answer` is right."""


@dataclass
class Results:
    """What the clients have seen."""

    seconds: list[float] = field(default_factory=list)
    """Of each request."""
    num_wrong: int = 0
    """Samples whose rewards are not what they must be."""
    num_refused: int = 0
    """Answers with 429, after which the client tries again."""


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis server; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--appendonly", "yes"]
    process = subprocess.Popen([*command, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(START_S)


async def client(port: int, num_requests: int, results: Results) -> None:
    """Send requests over one connection, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    chosen = [SAMPLES[number % len(SAMPLES)] for number in range(BATCH)]
    samples = [{"completion": text, "reference": "answer", "group": str(k)} for k, (text, _) in enumerate(chosen)]
    body = json.dumps({"samples": samples, "wait_s": 60}).encode()
    head = f"POST /v1/rewards HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    expected = [reward for _, reward in chosen]
    for _ in range(num_requests):
        begun = time.perf_counter()
        while True:
            writer.write(head + body)
            status, answer = await asyncio.wait_for(_answer(reader), ANSWER_S)
            if status != 429:
                break
            results.num_refused += 1
            await asyncio.sleep(1.0)
        results.seconds.append(time.perf_counter() - begun)
        rewards = json.loads(answer)["rewards"] if status == 200 else [None] * BATCH
        results.num_wrong += sum(one != right for one, right in zip(rewards, expected, strict=True))
    writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None, head
    return int(head.split()[1]), await reader.readexactly(int(length[1]))


async def load(port: int, num_clients: int, num_requests: int) -> tuple[Results, float]:
    """Run the clients; return what they have seen, and the seconds of all together."""
    results = Results()
    begun = time.perf_counter()
    await asyncio.gather(*(client(port, num_requests, results) for _ in range(num_clients)))
    return results, time.perf_counter() - begun


async def video_client(port: int, num_requests: int, results: Results, seed: int) -> None:
    """Enqueue videos and pull their scores, request by request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def ask(path: str, body: bytes, kind: str) -> tuple[int, bytes]:
        lines = (
            f"POST /api/reward/{path} HTTP/1.1",
            "host: x",
            f"content-type: {kind}",
            f"content-length: {len(body)}",
        )
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        return await asyncio.wait_for(_answer(reader), ANSWER_S)

    async def pull(id: str, scorer: str) -> list[float]:
        pause_s, end = PULL_S, time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            form = f"uuid={id}&type={scorer}".encode()
            status, answer = await ask("pull", form, "application/x-www-form-urlencoded")
            if status != 400:
                return list(json.loads(answer)["scores"][scorer]) if status == 200 else []
            await asyncio.sleep(pause_s)
            pause_s *= 1.5
        return []

    rng = np.random.default_rng(seed)
    for _ in range(num_requests):
        pixels = rng.integers(0, 256, (VIDEOS, *VIDEO_SHAPE), np.uint8)
        file = io.BytesIO()
        np.save(file, pixels)
        asked = {
            "prompts": ["a video"] * VIDEOS,
            "reward_fn": {"brightness": 1.0, "motion": 1.0},
            "media_type": "video",
        }
        body = json.dumps(asked).encode() + b"\n" + file.getvalue()
        begun = time.perf_counter()
        while (accepted := await ask("enqueue", body, "application/octet-stream"))[0] == 429:
            results.num_refused += 1
            await asyncio.sleep(1.0)
        scores = {one: await pull(json.loads(accepted[1])["uuid"], one) for one in ("brightness", "motion")}
        results.seconds.append(time.perf_counter() - begun)
        right = {
            "brightness": pixels.mean((2, 3, 4)) @ LUMA / 255,
            "motion": np.abs(np.diff(pixels.astype(np.float64), axis=2)).mean((1, 2, 3, 4)) / 255,
        }
        for one, expected in right.items():
            found = scores[one] or [math.nan] * VIDEOS
            results.num_wrong += sum(
                not math.isclose(*pair, rel_tol=1e-3) for pair in zip(found, expected, strict=True)
            )
    writer.close()


def measure_videos(per_client: int) -> None:
    """Measure rewards of videos, with all clients at a time."""
    with (
        tempfile.TemporaryDirectory(prefix="starling-reward-") as temporary,
        service(Path(temporary), VIDEO_RECIPE) as (process, port),
    ):
        asyncio.run(video_client(port, 2, Results(), seed=CLIENTS))  # warms up
        before, results = processor_s(process), Results()

        async def run() -> None:
            await asyncio.gather(*(video_client(port, per_client, results, seed) for seed in range(CLIENTS)))

        begun = time.perf_counter()
        asyncio.run(run())
        seconds, used_s = time.perf_counter() - begun, processor_s(process) - before
    num = CLIENTS * per_client * VIDEOS
    progress(f"{num} videos in {seconds:.1f} s, {results.num_wrong} scores lost or wrong")
    detail = {
        "videos": num,
        "seconds": rounded(seconds),
        "service_processor_s": rounded(used_s),
        "refused_with_429": results.num_refused,
        "see": "above",
    }
    print_figure("reward", "videos_per_s", num / seconds, unit="videos/s", goal=None, better="higher", detail=detail)
    lost = {"see": "above"}
    print_figure(
        "reward", "videos_lost_or_wrong", results.num_wrong, unit="scores", goal=0, better="lower", detail=lost
    )
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        value = quantile(results.seconds, share)
        print_figure("reward", f"video_request_{name}_s", value, unit="s", goal=None, better="lower", detail=lost)


def processor_s(process: psutil.Process) -> float:
    """Return the processor time of the service and its workers."""
    everyone = [process, *process.children(recursive=True)]
    return sum(one.cpu_times().user + one.cpu_times().system for one in everyone)


def measure_stored(store: str, per_client: int) -> None:
    """Measure and report rewards per second with a store that survives restarts."""
    figure = f"rewards_per_s_{store}"
    if store == "redis" and shutil.which("redis-server") is None:
        reason = {"reason": "redis-server is not installed"}
        print_figure("reward", figure, None, unit="rewards/s", goal=3000, better="higher", detail=reason)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="starling-reward-")))
        url = f'\nredis_url = "{stack.enter_context(redis_server(folder))}"' if store == "redis" else ""
        process, port = stack.enter_context(service(folder, RECIPE.format(store=f'store = "{store}"{url}')))
        asyncio.run(load(port, 4, 4))  # warms up
        before = processor_s(process)
        results, seconds = asyncio.run(load(port, CLIENTS, per_client))
        used_s = processor_s(process) - before
    num = CLIENTS * per_client * BATCH
    progress(f"{num} rewards in {seconds:.1f} s with {store}, {results.num_wrong} lost")
    detail = {
        "rewards": num,
        "lost_or_wrong": results.num_wrong,
        "seconds": rounded(seconds),
        "service_processor_s": rounded(used_s),
        "request_p50_s": rounded(quantile(results.seconds, 0.5)),
        "request_p99_s": rounded(quantile(results.seconds, 0.99)),
        "see": "above",
    }
    print_figure("reward", figure, num / seconds, unit="rewards/s", goal=3000, better="higher", detail=detail)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one request for each client instead of eight")
    per_client = 1 if parser.parse_args().quick else 8
    with (
        tempfile.TemporaryDirectory(prefix="starling-reward-") as temporary,
        service(Path(temporary), RECIPE.format(store='store = "memory"')) as (process, port),
    ):
        asyncio.run(load(port, 4, 4))  # warms up
        before = processor_s(process)
        results, seconds = asyncio.run(load(port, CLIENTS, per_client))
        used_s = processor_s(process) - before
        alone, alone_s = asyncio.run(load(port, 1, 50 * per_client))
    num = CLIENTS * per_client * BATCH
    progress(f"{num} rewards in {seconds:.1f} s, one client {50 * per_client * BATCH / alone_s:.0f} rewards/s")
    detail = {
        "clients": CLIENTS,
        "samples_of_a_request": BATCH,
        "rewards": num,
        "seconds": rounded(seconds),
        "service_processor_s": rounded(used_s),
        "refused_with_429": results.num_refused,
        "one_client_p50_s": rounded(quantile(alone.seconds, 0.5)),
        **machine(),
        "versions": versions("fastapi", "uvicorn"),
    }
    see = {"see": "above"}
    per_s = num / seconds
    print_figure("reward", "rewards_per_s", per_s, unit="rewards/s", goal=3000, better="higher", detail=detail)
    lost = results.num_wrong + alone.num_wrong
    print_figure("reward", "rewards_lost_or_wrong", lost, unit="rewards", goal=0, better="lower", detail=see)
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        value = quantile(results.seconds, share)
        print_figure("reward", f"request_{name}_s", value, unit="s", goal=None, better="lower", detail=see)
    for store in ("sqlite", "redis"):
        measure_stored(store, per_client)
    measure_videos(max(1, per_client // 4))


if __name__ == "__main__":
    main()
