"""The engine of `bench/async.py`, which simulates time and otherwise behaves like any engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from asynchronous_device import Profile
from sleepy_engine import PROFILE, SleepyEngine

from starling.cli.model.scratch import ScratchSettings, make_model_folder
from starling.common.errors import ConfigError
from starling.common.settings import ModelSettings, WeightsSettings
from starling.common.wire.messages import Sampling
from starling.rollout.engine.base import EngineSpec, GroupRequest, GroupResult
from starling.rollout.settings import RolloutSettings
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher

DEADLINE_S = 60.0
DEVICE = Profile(step_s=0.0002, fixed_share=0.5, max_rows=8, median_length=30.0, sigma=0.7)
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sleepy") / "model"
    make_model_folder(ScratchSettings(config=SMALL, alphabet="abc>", max_length=256), path)
    (path / PROFILE).write_text(json.dumps(asdict(DEVICE)))
    return path


def spec_of(folder: Path, woken: threading.Event) -> EngineSpec:
    return EngineSpec(
        path=folder,
        model=ModelSettings(path=str(folder)),
        rollout=RolloutSettings(),
        weights=WeightsSettings(),
        name="rollout-0",
        eos_token_ids=(1,),
        max_model_len=None,
        wake=woken.set,
    )


@contextmanager
def engine_of(folder: Path) -> Iterator[tuple[SleepyEngine, threading.Event]]:
    woken = threading.Event()
    engine = SleepyEngine(spec_of(folder, woken))
    try:
        yield engine, woken
    finally:
        engine.close()


def request(lease: str, seed: int, **changes: object) -> GroupRequest:
    asked = GroupRequest(lease, [3, 4], 4, Sampling(max_tokens=100, seed=seed))
    return replace(asked, **changes)  # type: ignore[arg-type]


def results(engine: SleepyEngine, woken: threading.Event, num: int) -> dict[str, GroupResult]:
    """Return `num` results; steps the engine as the shell does, when woken and while it is ready."""
    found: dict[str, GroupResult] = {}
    while len(found) < num:
        assert engine.ready or woken.wait(DEADLINE_S)
        woken.clear()
        for result in engine.step():
            assert isinstance(result, GroupResult)
            found[result.lease] = result
    return found


def test_groups_have_the_lengths_of_their_seeds(folder: Path) -> None:
    with engine_of(folder) as (engine, woken):
        for number in range(5):
            engine.add(request(f"g{number}", seed=number))
        found = results(engine, woken, 5)
        for number in range(5):
            lengths = [len(one.token_ids) for one in found[f"g{number}"].completions]
            assert lengths == [DEVICE.length(number, index, 100) for index in range(4)]
            for one in found[f"g{number}"].completions:
                assert (one.token_ids[-1] == 1) == (one.status == "ok")
                assert len(one.token_ids) == len(one.logprobs) == len(one.versions)
        assert engine.num_tokens == sum(len(c.token_ids) for r in found.values() for c in r.completions)
        assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_adopted_version_is_attested_and_stamped_on_tokens(folder: Path) -> None:
    with engine_of(folder) as (engine, woken):
        source = {name: torch.randn_like(tensor) for name, tensor in engine.tensors().items()}
        publisher = Publisher(engine.layout(), transport="local")
        try:
            plan = make_plan(publisher.layout, engine.layout())
            engine.add(request("old", seed=1))
            old = results(engine, woken, 1)["old"]
            offer = publisher.publish(7, source)
            engine.pull(offer, plan, deadline_s=DEADLINE_S, cancelled=lambda: False, progress=lambda _: None)
            adopted = engine.adopt("keep")
        finally:
            publisher.close()
        assert (adopted.version, adopted.proven, engine.version) == (7, True, 7)
        assert all(torch.equal(tensor, source[name]) for name, tensor in engine.tensors().items())
        engine.add(request("new", seed=1))
        new = results(engine, woken, 1)["new"]
        for before, after in zip(old.completions, new.completions, strict=True):
            assert np.array_equal(before.token_ids, after.token_ids)
            assert set(after.versions) == {7}


def test_interrupted_group_resumes_from_its_tokens(folder: Path) -> None:
    with engine_of(folder) as (engine, woken):
        engine.add(request("whole", seed=3))
        whole = results(engine, woken, 1)["whole"]
        engine.add(request("cut", seed=3))
        assert woken.wait(DEADLINE_S), "one row has ended"
        engine.pause()
        partial = engine.interrupt("cut")
        assert partial is not None
        assert any(part.status is not None for part in partial), "the ended row is unchanged"
        engine.add(request("cut", seed=3, partial=partial))
        engine.resume()
        again = results(engine, woken, 1)["cut"]
        for one, other in zip(whole.completions, again.completions, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert one.status == other.status


def test_paused_engine_samples_nothing(folder: Path) -> None:
    with engine_of(folder) as (engine, woken):
        engine.add(request("g", seed=1))
        engine.pause()
        num_tokens = engine.num_tokens
        begin = time.monotonic()
        while time.monotonic() - begin < 100 * DEVICE.step_s:  # long enough to sample more without the pause
            assert not engine.ready
            assert engine.step() == []
        engine.add(request("h", seed=2))
        assert engine.num_tokens == num_tokens
        engine.resume()
        assert len(results(engine, woken, 2)) == 2


def test_folder_without_a_profile_is_rejected(folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model"
    make_model_folder(ScratchSettings(config=SMALL, alphabet="abc>", max_length=256), bare)
    with pytest.raises(ConfigError, match=r"sleepy\.json is no profile"):
        SleepyEngine(spec_of(bare, threading.Event()))
