"""Steps that several replicas make together, while they die, hang and join: losses are those of a single process."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from elastic_replicas import NUM_STEPS, ReplicaProcesses, elastic_settings, make_step, small_model
from small_steps import assert_close, whole
from test_expert_bias import deepseek

from starling.policy.train.learner import Learner

ELASTIC = {"elastic": True, "replica_timeout_s": 30.0}
MESHES = {"one rank": {}, "fsdp": {"dp_shard": 2}, "tp and fsdp": {"tp": 2, "dp_shard": 2}, "pp": {"pp": 2}}


class Fleet:
    """Replicas that make steps together, and a test that decides, as the controller does, who is out."""

    def __init__(self, folder: Path, parallel: dict[str, Any], num: int, **options: Any) -> None:
        self._folder, self._parallel, self._options = folder, {**ELASTIC, **parallel}, options
        self.replicas = [self.start() for _ in range(num)]
        self.group, self.num_redone = 0, 0
        self.redo_s, self.join_s = list[float](), list[float]()
        """From a death to the step that the others have made, and from the request of a state to its end."""

    def start(self, **options: Any) -> ReplicaProcesses:
        return ReplicaProcesses(self._folder, self._parallel, **self._options, **options)

    def step(self, number: int, victim: ReplicaProcesses | None = None, delay_s: float = 0.0) -> tuple[float, ...]:
        """Make a step, during which `victim` dies. Returns what `make_step` does."""
        died = None
        while True:
            for replica in self.replicas:
                replica.step(number, self.replicas, f"group-{self.group}")
            if victim is not None:
                time.sleep(delay_s)
                victim.kill()
                died = time.perf_counter()
                self.replicas.remove(victim)
                self.group += 1
                victim = None
            outcomes = [replica.outcome() for replica in self.replicas]
            made = [replica for replica, (kind, _) in zip(self.replicas, outcomes, strict=True) if kind == "made"]
            results = {result for kind, result in outcomes if kind == "made"}
            if not made:
                self.num_redone += 1
                self.group += 1
                continue
            assert len(results) == 1, "all replicas report the same step"
            if died is not None:
                self.redo_s.append(time.perf_counter() - died)
            for replica, (kind, _) in zip(self.replicas, outcomes, strict=True):
                if kind == "lost":
                    self.copy(made[0], replica, number)
            return results.pop()

    def join(self, version: int) -> None:
        """Let a new replica take the state of one that is there."""
        joined = self.start()
        if version:
            self.copy(self.replicas[-1], joined, version)
        self.replicas.append(joined)
        self.group += 1

    def copy(self, source: ReplicaProcesses, destination: ReplicaProcesses, version: int) -> None:
        group, begun = f"state-{version}-{destination.number}", time.perf_counter()
        peers = [source.address, destination.address]
        source.send("send", peers, group, version)
        destination.send("receive", peers, group)
        assert source.outcome() == ("done", None)
        assert destination.outcome() == ("received", version)
        self.join_s.append(time.perf_counter() - begun)

    def weights(self) -> list[dict[str, Any]]:
        """Return the weights of each replica, those of all its ranks together."""
        found = []
        for replica in self.replicas:
            replica.send("weights")
            found.append({name: one for _, weights in replica.answers() for name, one in weights.items()})
        return found


@contextmanager
def fleet(folder: Path, parallel: dict[str, Any], num: int, **options: Any) -> Iterator[Fleet]:
    found = Fleet(folder, parallel, num, **options)
    try:
        yield found
    finally:
        for replica in found.replicas:
            replica.kill()


def undisturbed(
    num_steps: int, *, load: Callable[[], Any] = small_model, **settings: Any
) -> tuple[list[tuple[float, ...]], dict[str, Any]]:
    """Return what `make_step` does for each step of a single process, and its weights after them."""
    learner = Learner(load, elastic_settings({}, **settings))
    made = [make_step(learner, number) for number in range(1, num_steps + 1)]
    weights = {name: whole(one) for name, one in learner.tensors.items()}
    return made, weights


def check(found: list[tuple[float, ...]], fleet: Fleet, **options: Any) -> None:
    """Compare steps with those of a single process: losses, norms, and the weights of every replica."""
    expected, weights = undisturbed(len(found), **options)
    assert found == [pytest.approx(one, rel=1e-6, abs=1e-6) for one in expected]
    first, *others = fleet.weights()
    assert_close(first, weights, 1e-5)
    for other in others:
        assert all(np.array_equal(other[name], one) for name, one in first.items()), "replicas differ"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=[pytest.mark.campaign] * (name in ("pp", "tp and fsdp"))) for name in MESHES]
)
def test_steps_of_several_replicas_are_those_of_one_process(mesh: str, tmp_path: Path) -> None:
    """Also with fewer microbatches than replicas have ranks."""
    with fleet(tmp_path, MESHES[mesh], 3 if mesh == "one rank" else 2) as replicas:
        check([replicas.step(number) for number in (1, 2, 3)], replicas)


@pytest.mark.parametrize(
    ("mesh", "seed", "num_minibatches"),
    [
        ("one rank", 0, 2),
        pytest.param("fsdp", 1, 1, marks=pytest.mark.campaign),
        pytest.param("fsdp", 2, 2, marks=pytest.mark.campaign),
        pytest.param("one rank", 3, 1, marks=pytest.mark.campaign),
        pytest.param("tp and fsdp", 4, 2, marks=pytest.mark.campaign),
    ],
)
def test_replicas_die_and_join_at_random(mesh: str, seed: int, num_minibatches: int, tmp_path: Path) -> None:
    """At any moment of a step, also between its updates: survivors make it again, or all have made it."""
    rng, made = random.Random(seed), list[tuple[float, ...]]()
    with fleet(tmp_path, MESHES[mesh], 3, num_minibatches=num_minibatches) as replicas:
        num_dead = num_joined = 0
        for number in range(1, NUM_STEPS + 1):
            dies = len(replicas.replicas) > 1 and rng.random() < 0.35
            victim = rng.choice(replicas.replicas) if dies else None
            made.append(replicas.step(number, victim, rng.expovariate(1 / 0.03)))
            num_dead += dies
            if len(replicas.replicas) < 3 and rng.random() < 0.5:
                replicas.join(number)
                num_joined += 1
        check(made, replicas, num_minibatches=num_minibatches)
        assert num_dead >= 5
        assert num_joined >= 4
        assert replicas.num_redone >= 2, "no death has come amid a step"
        print(json.dumps({"redo_s": median(replicas.redo_s), "join_s": median(replicas.join_s)}))


def test_step_that_is_made_again_counts_the_load_of_experts_once(tmp_path: Path) -> None:
    """So biases of routers change by the load of the whole step, which every replica knows before it makes it."""
    options: dict[str, Any] = {"load": deepseek, "router_bias_rate": 0.05, "num_minibatches": 2}
    with fleet(tmp_path, {}, 3, **options) as replicas:
        made = [replicas.step(1)]
        for number in (2, 3):
            made.append(replicas.step(number, replicas.replicas[0]))
        made.append(replicas.step(4))
        assert replicas.num_redone, "no death has come amid a step"
        check(made, replicas, **options)


def test_replica_that_hangs_is_given_up_after_the_time_limit(tmp_path: Path) -> None:
    """Also by the ranks of a replica that wait for the one among them that waits for the other replica."""
    parallel = {"dp_shard": 2, "elastic": True, "replica_timeout_s": 2.0}
    with fleet(tmp_path, parallel, 2) as replicas:
        made = [replicas.step(1)]
        hanging = replicas.replicas[0]
        hanging.signal(signal.SIGSTOP)
        for replica in replicas.replicas[1:]:
            replica.step(2, replicas.replicas, "group-0")
        kind, reason = replicas.replicas[1].answers()[0]
        assert (kind, "lost" in reason) == ("lost", True)
        replicas.replicas.remove(hanging)
        hanging.kill()
        made += [replicas.step(2), replicas.step(3)]
        check(made, replicas)


def test_replicas_with_other_weights_make_no_step_together(tmp_path: Path) -> None:
    with fleet(tmp_path, {}, 1) as replicas:
        replicas.replicas.append(replicas.start(seed=1))
        for replica in replicas.replicas:
            replica.step(1, replicas.replicas, "group-0")
        for replica in replicas.replicas:
            kind, reason = replica.outcome()
            assert kind == "lost"
            assert "the policies hold different bits in weights/model.embed_tokens.weight" in reason


def test_state_does_not_come_from_a_replica_that_dies(tmp_path: Path) -> None:
    with fleet(tmp_path, {}, 2) as replicas:
        source, destination = replicas.replicas
        threading.Timer(0.2, source.kill).start()
        destination.send("receive", [source.address, destination.address], "state")
        replicas.replicas.remove(source)
        answer = destination._pipes[0].recv()
        assert answer[0] == "failed"
        assert "PeersLostError" in answer[1]
        destination.kill()
        replicas.replicas.clear()
