"""A vLLM engine with one worker: sampling, adoptions, and the loss of its process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from adoptions import NUM_CHECKPOINTS, adopt_under_load, check, largest_difference
from engines import (
    DEADLINE_S,
    EngineDriver,
    PublisherProcess,
    checkpoint,
    engine_driver,
    forward_logprobs,
    publisher_process,
    random_prompt,
    read_model,
    request,
)
from tiny_sizes import CONTEXT, VOCAB

from starling.common.errors import WeightsError
from starling.rollout.engine.base import EngineLostError, GroupFailed, GroupRequest, RequestError
from starling.rollout.engine.vllm.engine import VllmEngine
from starling.rollout.engine.vllm.processes import engine_processes
from starling.rollout.shell.metrics import RolloutMetrics


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    here = tmp_path_factory.mktemp("checkpoints")
    return [checkpoint(here / str(seed), "qwen3", seed) for seed in range(NUM_CHECKPOINTS)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [read_model(folder) for folder in folders]


@pytest.fixture(scope="module")
def publisher(folders: list[Path]) -> Iterator[PublisherProcess]:
    with publisher_process(folders) as made:
        yield made


@pytest.fixture(scope="module")
def engine(folders: list[Path]) -> Iterator[EngineDriver]:
    with engine_driver(folders[0]) as made:
        yield made


@pytest.fixture
def running(engine: EngineDriver, publisher: PublisherProcess) -> EngineDriver:
    """The engine after at least one adoption."""
    if engine.engine.version < 0:
        adopt(engine, publisher)
    return engine


def adopt(engine: EngineDriver, publisher: PublisherProcess, mode: Any = "recompute", **options: Any) -> int:
    """Make the engine adopt the next version; return its number."""
    version = engine.engine.version + 1
    report = publisher.pull(engine.engine, publisher.plan(engine.engine), version, **options)
    assert report.size_bytes > 0
    adopted = engine.engine.adopt(mode)
    assert adopted.proven
    assert adopted.layout_root == publisher.layout_root
    assert adopted.version == engine.engine.version == version
    return version


def until_sampled(engine: EngineDriver, count: int) -> None:
    """Wait until `count` more tokens have been sampled."""
    wanted, end = engine.engine.num_tokens + count, time.monotonic() + DEADLINE_S
    while engine.engine.num_tokens < wanted:
        assert time.monotonic() < end
        engine.step(0.005)


def test_engine_starts_without_a_version(engine: EngineDriver) -> None:
    assert engine.engine.version == -1
    assert engine.engine.max_model_len == CONTEXT
    assert (engine.engine.num_running, engine.engine.num_waiting, engine.engine.ready) == (0, 0, False)
    with pytest.raises(WeightsError, match="no staged version"):
        engine.engine.adopt("keep")


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
        {"temperature": 0.0},
    ],
)
def test_logprobs_equal_a_forward_pass(running: EngineDriver, models: list[Any], sampling: dict[str, Any]) -> None:
    version = running.engine.version
    others = [request(f"other-{t}", [1, 2, 3], 2, temperature=t, top_p=0.8) for t in (0.0, 0.5, 1.0)]
    for other in others:  # rows with other sampling parameters in the same batch
        running.engine.add(other)
    prompt = random_prompt(9, 3)
    result = running.generate(prompt, 3, max_tokens=24, **sampling)
    running.finish(*(other.lease for other in others))
    assert result.prompt_ids.tolist() == prompt
    for completion in result.completions:
        expected = forward_logprobs(
            models[version % NUM_CHECKPOINTS], prompt, completion.token_ids.tolist(), sampling["temperature"]
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
        assert (completion.versions == version).all()
        assert completion.logprobs.dtype == np.float32


def test_top_k_of_one_samples_greedily_with_tempered_logprobs(running: EngineDriver, models: list[Any]) -> None:
    prompt = random_prompt(6, 4)
    greedy = running.generate(prompt, temperature=0.0).completions[0]
    only = running.generate(prompt, temperature=1.5, top_k=1).completions[0]
    assert only.token_ids.tolist() == greedy.token_ids.tolist()
    model = models[running.engine.version % NUM_CHECKPOINTS]
    expected = forward_logprobs(model, prompt, only.token_ids.tolist(), 1.5)
    np.testing.assert_allclose(only.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (request("a", []), "prompt is empty"),
        (request("a", [1] * CONTEXT), "leaves no room in the context of 256"),
        (request("a", [1, VOCAB]), "token id 96 is outside the model's vocabulary of 96"),
        (request("a", [-1, 2]), "token id -1 is outside"),
        (request("a", [1], 17), "num_completions is 17; give 1 to 16"),
        (request("a", [1], temperature=float("nan")), "temperature is nan"),
        (request("a", [1], max_tokens=0), "max_tokens is 0"),
        (request("a", [1], temperature=0.005), "temperature is 0.005; vLLM samples at 0 or at 0.01 and more"),
    ],
)
def test_invalid_request_is_rejected(running: EngineDriver, wrong: GroupRequest, sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        running.engine.add(wrong)
    assert len(running.generate([1, 2]).completions) == 1


def test_groups_beyond_max_rows_wait(running: EngineDriver) -> None:
    leases = [f"g{index}" for index in range(12)]
    for lease in leases:
        running.engine.add(request(lease, [1, 2, 3], 4, max_tokens=30))
    assert running.engine.num_running <= 16
    assert running.engine.num_waiting >= 12 - 5
    assert all(len(result.completions) == 4 for result in running.finish(*leases))
    assert (running.engine.num_running, running.engine.num_waiting) == (0, 0)


def test_scheduler_reports_its_share_of_the_kv_cache(running: EngineDriver) -> None:
    engine = running.engine
    assert isinstance(engine, VllmEngine)
    assert engine.kv_cache_ratio == 0
    metrics = RolloutMetrics(time.monotonic())
    leases = [f"group {number}" for number in range(3)]
    for lease in leases:
        engine.add(request(lease, [1, 2, 3], 16, max_tokens=CONTEXT - 10))
    end = time.monotonic() + DEADLINE_S
    while engine.scheduler_load.num_running < 16:
        assert time.monotonic() < end
        running.step(0.01)
    engine.pause()
    config = engine._llm_thread._llm.vllm_config.cache_config
    # Each of the 16 completions holds one block, or two when it is long; one block of vLLM's is never used.
    num_held = engine.kv_cache_ratio * (config.num_gpu_blocks - 1)
    assert num_held == pytest.approx(round(num_held))
    assert 16 <= round(num_held) <= 16 * -(-CONTEXT // config.block_size)
    samples = metrics.samples(engine, 0)
    assert samples["starling_rollout_kv_cache_ratio", ()] == engine.kv_cache_ratio
    requests = [samples["starling_rollout_scheduled_requests", (("state", state),)] for state in ("running", "waiting")]
    assert requests == [16, 0]
    engine.resume()
    running.finish(leases[0])
    for lease in leases[1:]:  # vLLM reports nothing about requests that are aborted
        engine.cancel(lease)
    assert engine.kv_cache_ratio == 0


def test_tokens_of_the_prefix_cache_are_counted(running: EngineDriver) -> None:
    engine = running.engine
    assert isinstance(engine, VllmEngine)
    # Requests that another test has cancelled are reported with the next outputs.
    running.generate(random_prompt(50, 76))
    prompt, before = random_prompt(200, 77), engine.prefix_cache_tokens
    running.generate(prompt)
    running.generate(prompt)
    queried, hits = (after - was for was, after in zip(before, engine.prefix_cache_tokens, strict=True))
    block_size = engine._llm_thread._llm.vllm_config.cache_config.block_size
    assert (queried, hits) == (400, 200 // block_size * block_size)
    metrics = RolloutMetrics(time.monotonic())
    metrics.note_lost(engine)  # counters of the service go on with the next engine
    samples = metrics.samples(engine, 0)
    assert samples["starling_rollout_prefix_cache_queried_tokens_total", ()] == 2 * engine.prefix_cache_tokens[0]
    assert samples["starling_rollout_prefix_cache_hit_tokens_total", ()] == 2 * engine.prefix_cache_tokens[1]


def test_request_aborted_by_vllm_fails_its_group(running: EngineDriver) -> None:
    engine = running.engine
    assert isinstance(engine, VllmEngine)
    engine.add(request("aborted", [1, 2, 3], 2, max_tokens=200))
    until_sampled(running, 10)
    thread, completion = engine._llm_thread, engine._groups["aborted"].completions[0]
    thread.call(thread._llm.abort(completion.collector.request_id, internal=True))
    end = time.monotonic() + DEADLINE_S / 4
    while "aborted" not in running.results:
        assert time.monotonic() < end, "the group did not fail"
        running.step()
    failed = running.results.pop("aborted")
    assert isinstance(failed, GroupFailed)
    assert failed.reason == "vLLM aborted a completion"
    assert engine.num_running == 0


@pytest.mark.parametrize("num_adoptions", [8, pytest.param(200, marks=pytest.mark.campaign)])
def test_adoptions_under_load(
    running: EngineDriver, publisher: PublisherProcess, models: list[Any], num_adoptions: int
) -> None:
    first = running.engine.version + 1
    outcome = adopt_under_load(running, publisher, num_adoptions, "recompute", first=first)
    check(outcome, first + num_adoptions - 1)
    assert largest_difference(outcome.results, models) < 1e-4
    assert outcome.recomputed_tokens > 0
    versions = np.concatenate([c.versions for result in outcome.results for c in result.completions])
    assert set(range(first, first + num_adoptions)) <= {*versions.tolist()}


def spanning(
    running: EngineDriver, publisher: PublisherProcess, mode: Any, prompt: list[int], lease: str = "old"
) -> Any:
    """Adopt a version while a group runs; return that group and one of the same prompt that started afterwards.

    The version is pulled first, so that the group is still running at the adoption.
    """
    engine = running.engine
    publisher.pull(engine, publisher.plan(engine), engine.version + 1)
    engine.add(request(lease, prompt, 2, max_tokens=90))
    until_sampled(running, 40)
    assert engine.adopt(mode).proven
    engine.add(request("new", prompt, 2, max_tokens=20))
    return running.finish(lease, "new")


def differences(models: list[Any], result: Any, version: int) -> float:
    """Return the largest difference of `version`'s log-probabilities from a forward pass over its weights."""
    found = 0.0
    for completion in result.completions:
        expected = forward_logprobs(
            models[version % NUM_CHECKPOINTS], result.prompt_ids.tolist(), completion.token_ids.tolist()
        )
        here = completion.versions == version
        assert here.any()
        found = max(found, float(np.abs(completion.logprobs - expected)[here].max()))
    return found


@pytest.mark.parametrize(
    ("mode", "old_is_exact", "new_is_exact"),
    [("recompute", True, True), ("salt", False, True), ("keep", False, False)],
)
def test_cache_mode_determines_what_is_exact(
    running: EngineDriver,
    publisher: PublisherProcess,
    models: list[Any],
    mode: str,
    old_is_exact: bool,
    new_is_exact: bool,
) -> None:
    prompt = random_prompt(140, 9)  # longer than a block of the cache, so that the block is shared
    before = running.engine.version
    old, new = spanning(running, publisher, mode, prompt)
    assert differences(models, old, before) < 1e-4
    assert (differences(models, old, before + 1) < 1e-4) == old_is_exact
    assert (differences(models, new, before + 1) < 1e-4) == new_is_exact
    adopt(running, publisher)  # recompute: later tokens share no cache computed by older weights


def test_waiting_groups_share_no_old_cache_under_salt(
    running: EngineDriver, publisher: PublisherProcess, models: list[Any]
) -> None:
    prompt = random_prompt(140, 10)
    for index in range(8):
        running.engine.add(request(f"w{index}", prompt, 4, max_tokens=40))
    until_sampled(running, 20)
    version = adopt(running, publisher, "salt")
    for result in running.finish(*(f"w{index}" for index in range(8))):
        begun = [c for c in result.completions if c.versions[0] == version]
        for completion in begun:
            expected = forward_logprobs(models[version % NUM_CHECKPOINTS], prompt, completion.token_ids.tolist())
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_versions_pulled_in_place_are_exact(
    running: EngineDriver, publisher: PublisherProcess, models: list[Any]
) -> None:
    first = running.engine.version + 1
    outcome = adopt_under_load(running, publisher, 6, "recompute", first=first, in_place=True)
    check(outcome, first + 5)
    assert largest_difference(outcome.results, models) < 1e-4
    adopt(running, publisher)


def test_call_raises_when_vllm_reports_a_dead_engine(folders: list[Path]) -> None:
    """vLLM marks its client as dead when its process has ended, before the reading task ends."""
    with engine_driver(folders[0]) as one:
        engine = one.engine
        assert isinstance(engine, VllmEngine)
        engine._llm_thread._llm.engine_core.resources.engine_dead = True
        with pytest.raises(EngineLostError, match="process ended"):
            engine.pause()
        assert engine.ready


def test_unanswered_call_loses_the_engine_but_no_token(folders: list[Path]) -> None:
    """Tokens that had arrived are returned at once, without waiting for another answer."""
    others = engine_processes()
    with engine_driver(folders[0], load_weights=True) as running:
        ours = engine_processes() - others
        running.engine.add(request("cut", [1, 2, 3], 3, max_tokens=200))
        until_sampled(running, 30)
        for process in ours:
            os.kill(process.pid, signal.SIGSTOP)
        assert isinstance(running.engine, VllmEngine)
        thread = running.engine._llm_thread
        with pytest.raises(EngineLostError, match="vLLM gave no answer for 1 s"):
            thread.call(thread.pause(clear_cache=False), 1.0)
        assert running.engine.ready
        partial = running.engine.interrupt("cut")
        assert partial is not None
        assert sum(len(partial_completion.token_ids) for partial_completion in partial) >= 30


def test_engine_is_lost_when_its_process_hangs(folders: list[Path]) -> None:
    others = engine_processes()
    with engine_driver(folders[0], load_weights=True, engine_silence_s=12.0) as running:
        ours = engine_processes() - others
        running.engine.add(request("cut", [1, 2, 3], 3, max_tokens=200))
        until_sampled(running, 30)
        for process in ours:
            os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineLostError, match=r"sampled no token for rollout.engine_silence_s = 12 s"):
            running.finish("cut")
        partial = running.engine.interrupt("cut")
        assert partial is not None
        assert sum(len(partial_completion.token_ids) for partial_completion in partial) >= 30
    assert not [process for process in ours if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_engine_is_lost_when_its_process_is_killed(running: EngineDriver) -> None:
    """The last test of this file: it kills the shared engine."""
    engine, ours = running.engine, engine_processes()
    assert ours
    running.engine.add(request("cut", [1, 2, 3], 3, max_tokens=200))
    until_sampled(running, 30)
    for process in ours:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineLostError):
        running.finish("cut")
    assert engine.ready
    partial = engine.interrupt("cut")
    assert partial is not None
    assert sum(len(partial_completion.token_ids) for partial_completion in partial) >= 30
    for partial_completion in partial:
        assert partial_completion.status is None
        assert len(partial_completion.token_ids) == len(partial_completion.logprobs)
        assert (partial_completion.versions == engine.version).all()
    with pytest.raises(EngineLostError):
        engine.pause()
    engine.close()
    assert not [process for process in ours if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
