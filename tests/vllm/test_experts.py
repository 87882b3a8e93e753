"""Recorded experts of vLLM, against those of a plain forward pass of transformers over the same tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    DEADLINE_S,
    EngineDriver,
    checkpoint,
    engine_driver,
    publisher_process,
    random_prompt,
    read_model,
    request,
)
from plain_routing import chosen_experts

from starling.algo.routing import Experts, is_recorded
from starling.rollout.engine.base import EngineLostError, GroupResult, PartialCompletion, RequestError
from starling.rollout.engine.vllm.groups import VllmGroup
from starling.rollout.engine.vllm.processes import engine_processes

ROUTED: dict[str, Any] = {"routing": "replayed"}
SHARED = random_prompt(150, 0)
"""Several blocks of the cache."""


def chosen(model: Any, ids: list[int]) -> list[Any]:
    """Return the experts of each token in each layer, in ascending order, by a plain pass."""
    return chosen_experts(model, ids).sort(dim=-1).values.tolist()  # type: ignore[no-any-return]


def ordered(experts: Experts) -> list[Any]:
    return np.sort(experts, axis=-1).tolist()  # type: ignore[no-any-return]


def check(models: list[Any], result: GroupResult) -> None:
    """Compare recorded experts with those of `models`, by the version that sampled the token after them."""
    prompt = result.prompt_ids.tolist()
    assert result.prompt_routing is not None
    for completion in result.completions:
        ids = [*prompt, *completion.token_ids.tolist()]
        by_version = {version: chosen(models[version], ids) for version in np.unique(completion.versions).tolist()}
        assert completion.routing is not None
        assert is_recorded(completion.routing).tolist() == [True] * (len(completion.token_ids) - 1) + [False]
        expected = [by_version[v][len(prompt) + i] for i, v in enumerate(completion.versions.tolist()[1:])]
        assert ordered(completion.routing[:-1]) == expected
        assert ordered(result.prompt_routing) == by_version[int(completion.versions[0])][: len(prompt)]


def until_sampling(driver: EngineDriver, num_tokens: int) -> None:
    """Step until so many more tokens have been sampled."""
    end = driver.engine.num_tokens + num_tokens
    for _ in range(int(DEADLINE_S / 0.05)):
        if driver.engine.num_tokens >= end:
            return
        driver.step(0.05)
    raise AssertionError("the engine samples nothing")


@pytest.mark.parametrize(
    ("tp", "pp"),
    [(1, 1), pytest.param(2, 1, marks=pytest.mark.campaign), pytest.param(1, 2, marks=pytest.mark.campaign)],
)
def test_recorded_experts_are_those_of_a_plain_pass(tp: int, pp: int, tmp_path: Path) -> None:
    """With prefixes from the cache, a prefill in chunks, preemptions, and requests that record nothing between."""
    folder = checkpoint(tmp_path, "qwen3_moe", 0)
    model = read_model(folder)
    # A cache of 448 tokens for some 700, so that some are preempted.
    args = {"max_num_batched_tokens": 64, "block_size": 32, "num_gpu_blocks_override": 14}
    vllm = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "engine_args": args, "prefix_caching": True}
    with engine_driver(folder, load_weights=True, vllm=vllm) as driver:
        for lease, prompt, count, options in [
            ("first", SHARED[:100], 2, ROUTED),
            ("own", SHARED[:130], 1, {}),
            ("second", SHARED, 3, ROUTED),
            ("short", [7], 2, ROUTED),
        ]:
            driver.engine.add(request(lease, prompt, count, max_tokens=40, **options))
        first, own, second, short = driver.finish("first", "own", "second", "short")
        again = driver.generate(SHARED[:140], 2, "again", **ROUTED)
    for result in (first, second, short, again):
        check([model], result)
    assert own.prompt_routing is None
    assert all(one.routing is None for one in own.completions)


def test_interrupted_group_resumes_with_its_experts(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen3_moe", 0)
    model, asked = read_model(folder), request("a", random_prompt(20, 1), 2, max_tokens=60, **ROUTED)
    with engine_driver(folder, load_weights=True) as driver:
        driver.engine.add(asked)
        until_sampling(driver, 30)
        partials = driver.engine.interrupt("a")
        assert partials is not None
        assert all(one.routing is not None and len(one.routing) == len(one.token_ids) for one in partials)
        driver.engine.add(replace(asked, partial=partials))
        check([model], driver.finish("a")[0])
        # What was recorded stays, whatever this engine's own routers choose.
        recorded = partials[0].routing
        assert recorded is not None
        turned = np.where(is_recorded(recorded)[:, None, None], (recorded + 1) % 4, recorded).astype(recorded.dtype)
        strange = replace(partials[0], routing=turned)
        driver.engine.add(replace(asked, partial=(strange, partials[1])))
        routing = driver.finish("a")[0].completions[0].routing
        assert routing is not None
        known = is_recorded(turned)
        assert routing[: len(turned)][known].tolist() == turned[known].tolist()
        assert is_recorded(routing).tolist() == [True] * (len(routing) - 1) + [False]
        with pytest.raises(RequestError, match="cannot be resumed"):
            driver.engine.add(replace(asked, partial=(replace(partials[0], routing=turned + 9), partials[1])))


def test_tokens_of_a_lost_engine_have_no_recorded_experts(tmp_path: Path) -> None:
    """The next engine computes them again, and records its own; without the array the tokens would be unusable."""
    folder, asked = checkpoint(tmp_path, "qwen3_moe", 0), request("a", [1, 2, 3], 2, max_tokens=200, **ROUTED)
    with engine_driver(folder, load_weights=True) as driver:
        driver.engine.add(asked)
        until_sampling(driver, 30)
        for process in engine_processes():
            process.kill()
        with pytest.raises(EngineLostError):
            driver.finish("a")
        partials = driver.engine.interrupt("a")
    assert partials is not None
    assert sum(len(one.token_ids) for one in partials) >= 30
    for one in partials:
        assert one.routing is not None
        assert is_recorded(one.routing).tolist() == [False] * len(one.token_ids)
    with engine_driver(folder, load_weights=True) as driver:
        driver.engine.add(replace(asked, partial=partials))
        check([read_model(folder)], driver.finish("a")[0])


def test_tokens_keep_their_experts_when_an_update_recomputes_them(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / str(seed), "qwen3_moe", seed) for seed in range(2)]
    models = [read_model(folder) for folder in folders]
    with publisher_process(folders) as publisher, engine_driver(folders[0]) as driver:
        plan = publisher.plan(driver.engine)
        publisher.pull(driver.engine, plan, 0)
        driver.engine.adopt("recompute")
        driver.engine.add(request("a", random_prompt(50, 1), 3, max_tokens=200, **ROUTED))
        until_sampling(driver, 90)
        publisher.pull(driver.engine, plan, 1)
        driver.engine.adopt("recompute")
        result = driver.finish("a")[0]
    assert {0, 1} == {int(v) for one in result.completions for v in one.versions}
    check(models, result)


def test_prompt_of_an_aborted_prefill_is_completed_by_another_request() -> None:
    """A resumed completion may be aborted when only a part of its prompt has been computed."""
    resumed = PartialCompletion(np.array([7], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
    asked = replace(request("a", [1, 2, 3], 2, max_tokens=4, **ROUTED), partial=(resumed, resumed))
    group, experts = VllmGroup(0, asked, 16), np.arange(6, dtype=np.uint8).reshape(3, 1, 2)
    group.add_experts(group.completions[0], experts[:1])
    group.add_experts(group.completions[1], experts)
    assert group.prompt_routing is not None
    assert group.prompt_routing.tolist() == experts.tolist()


def test_replayed_routing_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    with engine_driver(checkpoint(tmp_path, "qwen3", 0), load_weights=True) as driver:
        with pytest.raises(RequestError, match="the model has no experts whose choice is recorded; set sampling"):
            driver.engine.add(request("a", [1, 2], **ROUTED))
        assert len(driver.generate([1, 2]).completions) == 1
