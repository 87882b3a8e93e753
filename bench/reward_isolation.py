"""Honest requests to a reward service while hostile scorers are attacked through it: latency, and lost rewards.

    python bench/reward_isolation.py [--quick]

One service has an honest scorer with workers of its own, and nine hostile ones: an endless loop, a fork bomb, 10 GiB of
memory, memory of many processes, a segmentation fault, an exit, output without end, a file and a connection that the
sandbox does not give. Clients send requests to the honest scorer at a fixed rate, in turns alone and beside one client
for each hostile scorer, which sends the next request as soon as it has the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import hostile_scorers
from figure import machine, print_figure, progress, quantile, rounded, versions
from reward_service import service

CLIENTS: Final = 4
EVERY_S: Final = 0.05
"""Pause between the requests of one client, from begin to begin."""
BATCH: Final = 16
ANSWER_S: Final = 120.0
SETTLE_S: Final = 1.0
HOSTILE: Final = tuple(attack.__name__ for attack in hostile_scorers.ATTACKS)
COMPLETIONS: Final = {"writes": "/etc/passwd", "connects": "1"}
"""Of attacks that need one."""
HEAD: Final = Path(__file__).with_name("honest_scorer.toml").read_text()
SCORER: Final = """
[[reward.scorers]]
name = "{folder}/hostile.py:{name}"
label = "{name}"
tasks = ["{name}"]
timeout_s = 0.5
retries = 0
memory_mb = 512
needs = {{ max_tasks = 64 }}
"""


@dataclass
class Results:
    """What the clients have seen."""

    seconds: list[float] = field(default_factory=list)
    """Of each honest request."""
    num_wrong: int = 0
    """Honest samples whose rewards are not what they must be."""
    failures: Counter[str] = field(default_factory=Counter)
    """Answers to hostile requests, by scorer."""
    num_scored: int = 0
    """Hostile samples that have a reward."""


@contextmanager
def hostile_service(folder: Path) -> Iterator[int]:
    """Run a reward service with the honest and the hostile scorers; yield its port."""
    shutil.copyfile(hostile_scorers.__file__, folder / "hostile.py")
    folder.chmod(0o755)  # the workers' user is another one
    scorers = "".join(SCORER.format(folder=folder, name=name) for name in HOSTILE)
    with service(folder, HEAD + scorers) as (_, port):
        yield port


async def ask(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], task: str, num: int) -> dict[str, object]:
    """Send one request and return the answer."""
    reader, writer = connection
    completion = COMPLETIONS.get(task, "answer")
    samples = [{"completion": completion, "reference": "answer", "metadata": {"task": task}}] * num
    body = json.dumps({"samples": samples, "wait_s": 60}).encode()
    writer.write(f"POST /v1/rewards HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(ANSWER_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        answer: dict[str, object] = json.loads(await reader.readexactly(int(length[1])))
        return answer


async def honest(port: int, until: float, number: int, results: Results) -> None:
    """Send honest requests at a fixed rate until a time."""
    connection = await asyncio.open_connection("127.0.0.1", port)
    due = time.perf_counter() + EVERY_S * number / CLIENTS
    while due < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        begun = time.perf_counter()
        rewards = (await ask(connection, "honest", BATCH)).get("rewards")
        results.seconds.append(time.perf_counter() - begun)
        results.num_wrong += 0 if rewards == [1.0] * BATCH else BATCH
        due = max(due + EVERY_S, time.perf_counter())
    connection[1].close()


async def hostile(port: int, until: float, task: str, results: Results) -> None:
    """Send hostile requests, one after the other, until a time."""
    connection = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < until:
        answer = await ask(connection, task, 1)
        results.failures[task] += 1
        results.num_scored += answer.get("rewards") != [None]
    connection[1].close()


async def load(port: int, seconds: float, *, attacked: bool) -> Results:
    """Run the clients for some seconds; return what they have seen."""
    results, until = Results(), time.perf_counter() + seconds
    attacks = [hostile(port, until, task, results) for task in HOSTILE] if attacked else []
    await asyncio.gather(*(honest(port, until, number, results) for number in range(CLIENTS)), *attacks)
    await asyncio.sleep(SETTLE_S)
    return results


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="five rounds of 3 s instead of nine of 10 s")
    rounds, seconds = (5, 3.0) if parser.parse_args().quick else (9, 10.0)
    ratios, quiet_p99, attacked_p99, wrong = list[float](), list[float](), list[float](), 0
    failures, num_scored, num_honest = Counter[str](), 0, 0
    with tempfile.TemporaryDirectory(prefix="starling-reward-") as temporary, hostile_service(Path(temporary)) as port:
        for attacked in (False, True):  # warms up
            asyncio.run(load(port, 3.0, attacked=attacked))
        for number in range(rounds):
            quiet = asyncio.run(load(port, seconds, attacked=False))
            attacked = asyncio.run(load(port, seconds, attacked=True))
            quiet_p99.append(quantile(quiet.seconds, 0.99))
            attacked_p99.append(quantile(attacked.seconds, 0.99))
            ratios.append(attacked_p99[-1] / quiet_p99[-1])
            wrong += quiet.num_wrong + attacked.num_wrong
            failures += attacked.failures
            num_scored += attacked.num_scored
            num_honest += len(quiet.seconds) + len(attacked.seconds)
            p50s = f"p50 {quantile(quiet.seconds, 0.5):.4f} and {quantile(attacked.seconds, 0.5):.4f} s"
            progress(f"round {number}: p99 {quiet_p99[-1]:.4f} s, attacked {attacked_p99[-1]:.4f} s, {p50s}")
    progress(f"failures: {dict(failures)}")
    detail = {
        "rounds": rounds,
        "seconds_of_a_round": seconds,
        "honest_requests": num_honest,
        "samples_of_a_request": BATCH,
        "quiet_p99_s": rounded(statistics.median(quiet_p99)),
        "attacked_p99_s": rounded(statistics.median(attacked_p99)),
        "hostile_failures": dict(failures),
        **machine(),
        "versions": versions("fastapi", "uvicorn"),
    }
    see, ratio = {"see": "above"}, statistics.median(ratios)
    name = "honest_p99_attacked_over_quiet"
    print_figure("reward_isolation", name, ratio, unit="ratio", goal=2.0, better="lower", detail=detail)
    name = "honest_rewards_lost_or_wrong"
    print_figure("reward_isolation", name, wrong, unit="rewards", goal=0, better="lower", detail=see)
    without = num_scored + sum(not failures[task] for task in HOSTILE)
    name = "attacks_without_a_failure"
    print_figure("reward_isolation", name, without, unit="attacks", goal=0, better="lower", detail=see)


if __name__ == "__main__":
    main()
