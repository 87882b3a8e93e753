"""Cost of sandboxes: a tool's call, a program of the scorer `code`, and a sandbox's start, at each level offered here.

The levels alternate within each round; the ratio is that of the strongest level to `process`, which has no namespaces.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

import structlog
from figure import machine, print_figure, progress

from starling.common.sandbox.launch import MECHANISMS, Mechanism, choose, problem_of
from starling.common.wire.messages import CompletionText, Status
from starling.reward.core.samples import PromptText, group_task
from starling.reward.score.pool.pool import ScoringPool
from starling.reward.settings import RewardSettings
from starling.rollout.env.sandbox.sandbox import Sandbox

TOOL = "def add(a: int, b: int) -> int:\n    return a + b\n"
LIMIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 rounds of 20 calls instead of 15 of 50")
    rounds, calls = (5, 20) if parser.parse_args().quick else (15, 50)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # figures alone go to stdout
    levels = [level for level in MECHANISMS if problem_of(level) is None]
    progress(f"levels: {', '.join(levels)}")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        file = Path(folder, "tools.py")
        file.write_text(TOOL)
        starts, call_ms = measure_tools(file, levels, rounds, calls)
    program_ms = measure_programs(levels, rounds, calls)
    strongest = choose("auto").mechanism
    for figure, medians in (("tool_call", call_ms), ("program", program_ms), ("start", starts)):
        ratio = medians[strongest] / medians["process"]
        detail = {"median_ms": {level: round(ms, 2) for level, ms in medians.items()}, "strongest": strongest}
        name = f"{figure}_strongest_over_process"
        print_figure("sandbox", name, ratio, unit="ratio", goal=None, better="lower", detail=detail | machine())


def measure_tools(
    file: Path, levels: list[Mechanism], rounds: int, calls: int
) -> tuple[dict[Mechanism, float], dict[Mechanism, float]]:
    """Return the medians of a sandbox's start and of a call of a tool, in milliseconds by level."""
    starts, sandboxes = dict[Mechanism, float](), dict[Mechanism, Sandbox]()
    for level in levels:
        begun = time.perf_counter()
        sandboxes[level] = Sandbox([f"{file}:add"], what="Tool", level=level)
        starts[level] = (time.perf_counter() - begun) * 1e3
    seconds: dict[Mechanism, list[float]] = {level: [] for level in levels}

    async def call(sandbox: Sandbox) -> None:
        async with sandbox.session() as session:
            assert await session.call(0, {"a": 1, "b": 2}, timeout_s=LIMIT_S) == 3

    async def run() -> None:
        for _ in range(rounds):
            for level in levels:
                begun = time.perf_counter()
                for _ in range(calls):
                    await call(sandboxes[level])
                seconds[level].append((time.perf_counter() - begun) / calls)

    try:
        asyncio.run(run())
    finally:
        for sandbox in sandboxes.values():
            sandbox.close()
    return starts, {level: statistics.median(values) * 1e3 for level, values in seconds.items()}


def measure_programs(levels: list[Mechanism], rounds: int, calls: int) -> dict[Mechanism, float]:
    """Return the median of one program of the scorer `code` in a pool of one worker, in milliseconds by level."""
    seconds: dict[Mechanism, list[float]] = {level: [] for level in levels}
    for level in levels:
        settings = RewardSettings.model_validate({"scorers": [{"name": "code"}], "num_workers": 1, "sandbox": level})
        with ScoringPool(settings) as pool:
            for number in range(rounds + 1):
                completion = CompletionText(text="def add(a, b): return a + b", status=Status.OK, num_tokens=1)
                completions = tuple((index, completion) for index in range(calls))
                begun = time.perf_counter()
                prompt = PromptText("", "assert add(1, 2) == 3", {})
                pool.submit(group_task(f"score:{number}", completions, prompt, (0,)))
                left = calls
                while left:
                    left -= len(pool.poll(LIMIT_S))
                if number:  # the first one includes the worker's start
                    seconds[level].append((time.perf_counter() - begun) / calls)
    return {level: statistics.median(values) * 1e3 for level, values in seconds.items()}


if __name__ == "__main__":
    main()
