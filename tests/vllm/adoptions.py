"""Adoptions under continuous load, for tests and as a program that runs any number of them.

    python tests/vllm/adoptions.py --tp 2 --adoptions 200

It prints one JSON object: the numbers of adoptions and completions, the largest difference between a sampled token's
log-probability and that of a forward pass of transformers over the weights of its version, and the pauses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from engines import (
    DEADLINE_S,
    FAMILIES,
    EngineDriver,
    PublisherProcess,
    adapted_model,
    checkpoint,
    engine_driver,
    forward_logprobs,
    publisher_process,
    random_prompt,
    read_model,
    request,
)
from tiny_sizes import CONTEXT

from starling.common.settings import LoraSettings
from starling.common.wire.messages import Status
from starling.rollout.engine.base import CacheMode, GroupRequest, GroupResult

Ask: TypeAlias = Callable[[str, int], GroupRequest]
"""Returns the request for a lease and a group number."""
NUM_CHECKPOINTS = 3
"""Version v has the weights of checkpoint v modulo this."""
GROUPS_IN_FLIGHT = 6
GROUP_SIZE = 3
MAX_TOKENS = 160
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Layers with adapters, present in every model family."""


def ask_text(lease: str, number: int) -> GroupRequest:
    """Return the request for the group `number` of a load."""
    prompt = random_prompt(4 + number % 13, number)
    return request(lease, prompt, GROUP_SIZE, max_tokens=MAX_TOKENS, seed=number, temperature=1.0)


@dataclass
class Load:
    """Constant load: a new group is added whenever one ends."""

    driver: EngineDriver
    ask: Ask = ask_text
    num_added: int = 0
    version_at_start: dict[str, int] = field(default_factory=dict)
    """Version in use when a group was added, by lease."""
    results: list[GroupResult] = field(default_factory=list)

    def top_up(self) -> None:
        """Add groups until `GROUPS_IN_FLIGHT` are running."""
        while len(self.version_at_start) - len(self.results) < GROUPS_IN_FLIGHT:
            lease = f"load-{self.num_added}"
            self.version_at_start[lease] = self.driver.engine.version
            self.driver.engine.add(self.ask(lease, self.num_added))
            self.num_added += 1

    def step(self, timeout_s: float = 0.0) -> None:
        """Step the driver, and collect finished groups."""
        self.driver.step(timeout_s)
        for lease in [lease for lease in self.driver.results if lease.startswith("load-")]:
            result = self.driver.results.pop(lease)
            assert isinstance(result, GroupResult), result
            self.results.append(result)


@dataclass
class Outcome:
    """Results and timings of a run of adoptions."""

    results: list[GroupResult]
    version_at_start: dict[str, int]
    adopt_s: list[float]
    recomputed_tokens: int


def adopt_under_load(
    driver: EngineDriver,
    source: PublisherProcess,
    num_adoptions: int,
    mode: CacheMode,
    *,
    first: int = 0,
    in_place: bool = False,
    ask: Ask = ask_text,
) -> Outcome:
    """Generate the groups of `ask` continuously, and adopt the versions `first`, `first` + 1, ... one by one."""
    engine = driver.engine
    plan = source.plan(engine)
    load = Load(driver, ask)
    adopt_s: list[float] = []
    recomputed = 0
    for version in range(first, first + num_adoptions):
        if engine.version >= 0:
            load.top_up()
        if in_place:
            engine.pause()
        source.pull(engine, plan, version, in_place=in_place)
        begin = time.perf_counter()
        adopted = engine.adopt(mode)
        adopt_s.append(time.perf_counter() - begin)
        if in_place:
            engine.resume()
        assert adopted.version == engine.version == version
        assert adopted.proven
        assert adopted.layout_root == source.layout_root
        recomputed += adopted.recomputed_tokens
        load.top_up()
        tokens, end = engine.num_tokens, time.monotonic() + DEADLINE_S
        while engine.num_tokens < tokens + 8 * (1 + version % 5):  # a varying number of tokens of each version
            assert time.monotonic() < end, "the engine does not generate"
            load.step(0.005)
            load.top_up()
    end = time.monotonic() + DEADLINE_S
    while len(load.results) < load.num_added:
        assert time.monotonic() < end, "not all groups ended"
        load.step(1.0)
    return Outcome(load.results, load.version_at_start, adopt_s, recomputed)


def check(outcome: Outcome, last: int, max_tokens: int = MAX_TOKENS) -> None:
    """Assert that every completion is complete, with ascending versions."""
    assert {result.lease for result in outcome.results} == set(outcome.version_at_start)
    for result in outcome.results:
        assert len(result.completions) == GROUP_SIZE
        for completion in result.completions:
            assert completion.status is Status.TRUNCATED
            assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == max_tokens
            assert (np.diff(completion.versions) >= 0).all()
            assert outcome.version_at_start[result.lease] <= completion.versions[0]
            assert completion.versions[-1] <= last


def largest_difference(results: list[GroupResult], models: list[Any]) -> float:
    """Return the largest difference of a token's log-probability from a forward pass over its version's weights."""
    worst = 0.0
    for result in results:
        prompt = result.prompt_ids.tolist()
        for completion in result.completions:
            sampled, kinds = completion.token_ids.tolist(), completion.versions % len(models)
            for kind in set(kinds.tolist()):
                expected = forward_logprobs(models[kind], prompt, sampled)
                worst = max(worst, float(np.abs(expected - completion.logprobs)[kinds == kind].max()))
    return worst


def main() -> None:
    """Run the number of adoptions given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="qwen3")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--adoptions", type=int, default=200)
    parser.add_argument("--mode", choices=("keep", "recompute", "salt"), default="recompute")
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--lora", action="store_true", help="adopt adapters instead of whole models")
    options = parser.parse_args()
    vllm = {"tensor_parallel_size": options.tp, "pipeline_parallel_size": options.pp}
    lora = LoraSettings(targets=ATTENTION) if options.lora else None
    with tempfile.TemporaryDirectory() as name:
        seeds = [0 if options.lora else seed for seed in range(NUM_CHECKPOINTS)]
        folders = [checkpoint(Path(name) / str(index), options.family, seed) for index, seed in enumerate(seeds)]
        models = [
            read_model(folder) if lora is None else adapted_model(folder, lora, seed)
            for seed, folder in enumerate(folders)
        ]
        with (
            publisher_process(folders, options.transport, lora) as publisher,
            engine_driver(folders[0], lora=lora, vllm=vllm) as engine,
        ):
            begin = time.perf_counter()
            outcome = adopt_under_load(engine, publisher, options.adoptions, options.mode)
            seconds = time.perf_counter() - begin
    check(outcome, options.adoptions - 1)
    spanning = [len(set(c.versions.tolist())) for result in outcome.results for c in result.completions]
    figures = {
        "adoptions": options.adoptions,
        "completions": len(spanning),
        "context": CONTEXT,
        "versions_per_completion": statistics.mean(spanning),
        "largest_difference": largest_difference(outcome.results, models) if options.mode == "recompute" else None,
        "recomputed_tokens": outcome.recomputed_tokens,
        "adopt_ms_median": 1000 * statistics.median(outcome.adopt_s),
        "adopt_ms_max": 1000 * max(outcome.adopt_s),
        "seconds": seconds,
    }
    print(json.dumps({**vars(options), **figures}))


if __name__ == "__main__":
    main()
