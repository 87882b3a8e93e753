"""Engines of several workers and model families: adoptions under load, and the loss of a worker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
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

from starling.rollout.engine.base import Engine, EngineLostError
from starling.rollout.engine.vllm.processes import engine_processes, shared_memory
from starling.weightsync.offers.offer import Offer, layout_root
from starling.weightsync.plan.layout import Layout
from starling.weightsync.puller.puller import Puller


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("family", "tp", "pp", "num_adoptions"),
    [
        ("qwen3", 2, 1, 40),
        ("llama", 1, 2, 40),
        ("qwen2", 1, 1, 8),
        ("qwen3_moe", 1, 1, 8),
        ("qwen3_moe", 2, 1, 8),
    ],
)
def test_adoptions_under_load(family: str, tp: int, pp: int, num_adoptions: int, tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / str(seed), family, seed) for seed in range(NUM_CHECKPOINTS)]
    models = [read_model(folder) for folder in folders]
    vllm = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    with publisher_process(folders) as publisher, engine_driver(folders[0], vllm=vllm) as engine:
        assert len(engine.engine.layout().ranks) == tp * pp
        files = shared_memory(engine_processes())
        assert bool(files) == (tp * pp > 1)
        outcome = adopt_under_load(engine, publisher, num_adoptions, "recompute")
        check_scores(engine, models[engine.engine.version % NUM_CHECKPOINTS])
        check_relay(engine.engine, publisher, num_adoptions)
        check_same_version(engine.engine, folders, num_adoptions)
        if tp == 2 and family == "qwen3":
            kill_one_worker(engine)
    assert not [file for file in files if file.exists()]
    check(outcome, num_adoptions - 1)
    assert largest_difference(outcome.results, models) < 1e-4


def check_scores(engine: EngineDriver, model: Any) -> None:
    """Compare the log-probabilities of a prompt with a forward pass."""
    prompt = random_prompt(90, 4)
    scores = engine.generate(prompt, 2, score_prompt=True, max_tokens=2).prompt_logprobs
    assert scores is not None
    assert scores.version == engine.engine.version
    np.testing.assert_allclose(scores.logprobs, forward_logprobs(model, prompt[:1], prompt[1:]), atol=1e-4)
    assert (scores.top_logprobs >= scores.logprobs).all()


def check_relay(engine: Engine, publisher: PublisherProcess, version: int) -> None:
    """Have the engine pull a version, and read it from the engine's workers into a second replica of this layout."""
    plan, relays, layout = publisher.plan(engine), list[Offer](), engine.layout()
    offer = publisher.publish(version, plan)
    engine.pull(
        offer,
        plan,
        deadline_s=DEADLINE_S,
        cancelled=lambda: False,
        progress=lambda _: None,
        announce=relays.append,
    )
    adopted = engine.adopt("keep")
    assert adopted.layout_root == publisher.layout_root
    [relay] = relays
    assert [rank.rank for rank in relay.ranks] == list(range(len(layout.ranks)))
    roots = []
    for rank in range(len(layout.ranks)):
        puller = Puller(layout, rank=rank)
        live = storages_of(layout, rank)
        try:
            report = puller.pull(offer, plan, deadline_s=DEADLINE_S, relays=relays, relays_first=True)
            assert list(report.bytes_by_source) == [relay.ranks[rank].address]
            puller.switch(live)
            roots.append(puller.attest_roots(live, offer).rank_root)
        finally:
            puller.close()
    assert layout_root(roots) == publisher.layout_root


def check_same_version(engine: Engine, folders: list[Path], version: int) -> None:
    """Have the engine pull the version that it holds from a source with other bits, as after a relay that lied."""
    with publisher_process([*folders[1:], folders[0]]) as other:
        plan = other.plan(engine)
        other.pull(engine, plan, version)
        adopted = engine.adopt("keep")
        assert adopted.version == version
        assert adopted.layout_root == other.layout_root


def storages_of(layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """Return memory for the shards of a rank, by storage."""
    sizes: dict[str, int] = {}
    for shard in layout.ranks[rank].shards:
        spec = layout.tensors[shard.tensor]
        last = sum((size - 1) * stride for size, stride in zip(shard.box.size, shard.strides, strict=True))
        end = shard.offset_bytes + (last + 1) * getattr(torch, spec.dtype).itemsize
        sizes[shard.storage] = max(sizes.get(shard.storage, 0), end)
    dtype = getattr(torch, layout.tensors[0].dtype)
    return {name: torch.zeros(size // dtype.itemsize, dtype=dtype) for name, size in sizes.items()}


def kill_one_worker(engine: EngineDriver) -> None:
    """Kill one of two workers during a group; assert that nothing hangs and no sampled token is lost."""
    ours = engine_processes()
    worker = max(ours, key=lambda process: process.create_time())
    streamed: dict[int, list[int]] = {}
    engine.engine.add(
        request("cut", [1, 2, 3], 3, max_tokens=240, listener=lambda i, ids, _: streamed.setdefault(i, []).extend(ids))
    )
    end = time.monotonic() + DEADLINE_S
    while sum(map(len, streamed.values())) < 20:
        assert time.monotonic() < end, streamed
        engine.step(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineLostError):
        engine.finish("cut")
    partial = engine.engine.interrupt("cut")
    assert partial is not None
    assert [partial_completion.token_ids.tolist() for partial_completion in partial] == [
        streamed.get(index, []) for index in range(3)
    ]
    assert all((partial_completion.versions == engine.engine.version).all() for partial_completion in partial)
    engine.engine.close()
    assert not [process for process in ours if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
