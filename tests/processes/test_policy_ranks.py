"""A policy of several ranks: the same steps as one process, and the end of all when one ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica
from test_policy_process import FLAGS, LAST, publish, save, step_of, train

from starling.common.observe.process import EXIT_RESTART, EXIT_USAGE
from starling.common.wire import messages as wire
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import decode_layout

MESH = ("--policy.parallel.tp", "2", "--policy.parallel.dp-shard", "2")
RANKS = [1, 2, 3]
FAILS_ON_ONE_RANK = """
import torch
from starling.algo.algorithm import Algorithm
from starling.algo.loss.terms import LossTerms

def loss(tokens):
    if len(tokens.logprobs) > 2 and torch.distributed.get_rank() == 1:
        raise ValueError("a wrong value on one rank")
    return LossTerms(-tokens.advantages * tokens.logprobs, {})

algorithm = Algorithm(loss=loss)
"""


@pytest.fixture
def whole_model(model: Path) -> tuple[str, ...]:
    """Return the flags of a policy."""
    return ("--model.path", str(model), *FLAGS)


def children_of(pid: int) -> dict[int, psutil.Process]:
    """Return the other ranks of the policy whose process is `pid`."""
    found = {}
    for child in psutil.Process(pid).children():
        title = "".join(child.cmdline()[:1])
        if ".rank-" in title:
            found[int(title.rpartition("-")[2])] = child
    return found


def policy_pid(hub: FakeHub) -> int:
    """Return the process of the policy that says hello, and its layout."""
    hello, _ = hub.hello("policy-0")
    return hello.pid


@pytest.mark.parametrize(
    ("mesh", "most"),
    [
        (MESH, 0.4),
        pytest.param(("--policy.parallel.pp", "2", "--policy.parallel.dp-shard", "2"), 0.5, marks=pytest.mark.campaign),
    ],
)
def test_policy_of_four_ranks_makes_the_steps_of_one_process(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path, mesh: tuple[str, ...], most: float
) -> None:
    """A rank holds at most a share `most` of the model."""
    with replica(hub, "policy-0", tmp_path / "alone", *whole_model) as policy:
        hub.hello("policy-0")
        expected = [train(hub, step) for step in range(1, LAST + 1)]
        policy.terminate()
        assert exit_code(policy) == 0
    with replica(hub, "policy-0", tmp_path / "mesh", *whole_model, *mesh) as policy:
        hello, (encoded,) = hub.hello("policy-0")
        layout = decode_layout(encoded)
        assert len(layout.ranks) == 4
        held = [sum(int(np.prod(shard.box.size)) for shard in rank.shards) for rank in layout.ranks]
        total = sum(int(np.prod(spec.shape)) for spec in layout.tensors)
        assert max(held) < most * total, "each rank offers its shards"
        ranks = children_of(hello.pid)
        assert sorted(ranks) == RANKS
        found = []
        for step in range(1, LAST + 1):
            offer = decode_offer(publish(hub, step - 1))
            assert [one.rank for one in offer.ranks] == [0, *RANKS]
            found.append(train(hub, step))
        hub.send("policy-0", wire.Drain(reason="the run is over"))
        assert exit_code(policy) == 0
    for metrics, alone in zip(found, expected, strict=True):
        assert metrics.keys() == alone.keys()
        assert metrics == pytest.approx(alone, rel=2e-3, abs=1e-4)
    assert not any(rank.is_running() for rank in ranks.values())
    logs = sorted(path.name for path in (tmp_path / "mesh" / "logs").iterdir())
    assert logs == [f"policy-0.rank-{rank}.log" for rank in RANKS]
    assert "role=policy-0.rank-1" in (tmp_path / "mesh/logs/policy-0.rank-1.log").read_text()


@pytest.mark.parametrize("victim", [pytest.param(1, marks=pytest.mark.campaign), 3])
def test_policy_ends_to_be_restarted_when_a_rank_is_killed(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path, victim: int
) -> None:
    """Idle or in a step."""
    with replica(hub, "policy-0", tmp_path, *whole_model, *MESH) as policy:
        ranks = children_of(policy_pid(hub))
        train(hub, 1)
        if victim == 3:
            message, buffers = step_of(hub.lease("train"), 2)
            hub.send("policy-0", message, buffers)
        ranks[victim].kill()
        _, errors = policy.communicate(DEADLINE_S)
        assert policy.returncode == EXIT_RESTART, errors
        assert f"rank {victim} was killed by SIGKILL, and the replica starts again" in errors
        assert_ended(ranks)


def test_ranks_end_with_rank_0(hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path) -> None:
    """However it ends, and they ignore the signals that are for it."""
    with replica(hub, "policy-0", tmp_path, *whole_model, *MESH) as policy:
        ranks = children_of(policy_pid(hub))
        for rank in ranks.values():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(rank.pid, number)
        train(hub, 1)
        policy.kill()
        assert_ended(ranks)


def test_a_mesh_that_does_not_fit_is_refused(hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path) -> None:
    with replica(hub, "policy-0", tmp_path, *whole_model, "--policy.parallel.tp", "3") as policy:
        _, errors = policy.communicate(DEADLINE_S)
        assert policy.returncode == 2
        lines = [line for line in errors.splitlines() if line.startswith("starling policy-0: ")]
        assert lines == [
            "starling policy-0: policy.parallel.tp = 3 does not divide the 2 attention heads: set tp = 1 or 2"
        ]


def assert_ended(ranks: dict[int, psutil.Process]) -> None:
    """Wait until all ranks have ended."""
    deadline = time.monotonic() + DEADLINE_S
    while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks.values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_policy_ends_to_be_restarted_when_a_rank_hangs(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path
) -> None:
    """When the others have waited for it for as long as they may."""
    with replica(hub, "policy-0", tmp_path, *whole_model, *MESH, "--policy.parallel.timeout-s", "20") as policy:
        ranks = children_of(policy_pid(hub))
        train(hub, 1)
        ranks[2].suspend()
        message, buffers = step_of(hub.lease("train"), 2)
        hub.send("policy-0", message, buffers)
        _, errors = policy.communicate(2 * DEADLINE_S)
        assert policy.returncode == EXIT_RESTART, errors
        assert_ended(ranks)


def test_ranks_sleep_and_publish_quantised_weights(hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path) -> None:
    """Groups of elements with a common scale lie on several ranks, which exchange their maxima."""
    flags = (*MESH, "--weights.quantise", "fp8_row")
    with replica(hub, "policy-0", tmp_path, *whole_model, *flags) as policy:
        _, (encoded,) = hub.hello("policy-0")
        dtypes = {spec.dtype for spec in decode_layout(encoded).tensors}
        assert "float8_e4m3fn" in dtypes
        train(hub, 1)
        publish(hub, 1)
        hub.ask("policy-0", wire.Sleep(lease=hub.lease("sleep")), wire.Slept)
        hub.ask("policy-0", wire.Wake(lease=hub.lease("wake")), wire.Woken)
        train(hub, 2)
        publish(hub, 2)
        policy.terminate()
        assert exit_code(policy) == 0


@pytest.mark.campaign
def test_user_code_that_fails_on_one_rank_ends_the_run(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path
) -> None:
    """The others would wait for it in vain; and a restarted policy would fail again."""
    (tmp_path / "fails.py").write_text(FAILS_ON_ONE_RANK)
    flags = ("--policy.parallel.dp-shard", "2", "--policy.tokens-per-microbatch", "32")
    flags += ("--policy.algorithm.name", f"{tmp_path}/fails.py:algorithm")
    with replica(hub, "policy-0", tmp_path, *whole_model, *flags) as policy:
        hub.hello("policy-0")
        for step in (1, 2):
            train(hub, step)
        message, buffers = step_of(hub.lease("train"), 3)
        hub.send("policy-0", message, buffers)
        _, errors = policy.communicate(2 * DEADLINE_S)
        assert policy.returncode == EXIT_USAGE, errors
        assert "a wrong value on one rank" in [line for line in errors.splitlines() if line.strip()][-1]


def preferred(hub: FakeHub, objective: str, step: int) -> float:
    """Make a step on pairs, and return its loss."""
    generator = np.random.default_rng(step)
    words = ["".join(generator.choice(list("abcdefgh"), 4)) for _ in range(6)]
    examples = tuple(
        wire.Prompt(id=f"train/{word}", text=f"{word}>", reference=word[::-1], rejected=word * 2) for word in words
    )
    message = wire.TrainStep(lease=hub.lease("train"), step=step, examples=examples, objective=objective, num_steps=3)
    trained, _ = hub.ask("policy-0", message, wire.StepTrained)
    return trained.metrics["loss"]


@pytest.mark.parametrize(
    ("objective", "mesh"),
    [
        pytest.param("dpo", MESH, marks=pytest.mark.campaign),
        ("reward_model", ("--policy.parallel.dp-shard", "2")),
    ],
)
def test_ranks_train_on_preferences(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path, objective: str, mesh: tuple[str, ...]
) -> None:
    losses = []
    for name, flags in (("alone", ()), ("mesh", mesh)):
        small = ("--policy.tokens-per-microbatch", "32")
        folder = tmp_path / name
        with replica(hub, "policy-0", folder, *whole_model, *flags, *small, "--run.kind", objective) as policy:
            hub.hello("policy-0")
            losses.append([preferred(hub, objective, step) for step in (1, 2, 3)])
            saved = wire.SaveCheckpoint(lease=hub.lease("save"), step=3, state=False)
            hub.ask("policy-0", saved, wire.CheckpointSaved)
            policy.terminate()
            assert exit_code(policy) == 0
        assert (folder / "checkpoints/step-3/model.safetensors").exists()
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_rank_that_is_killed_during_a_save_leaves_an_intact_state(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path
) -> None:
    """The replica resumes from the state that was being written, if it was complete, or from the one before."""
    flags = (*whole_model, *MESH)
    with replica(hub, "policy-0", tmp_path, *flags) as policy:
        ranks = children_of(policy_pid(hub))
        train(hub, 1)
        save(hub, 1)
        expected = [train(hub, step) for step in (2, 3)]
        hub.send("policy-0", wire.SaveCheckpoint(lease=hub.lease("save"), step=3, state=True))
        policy.wait_for_output("the state of version 3")
        ranks[1].kill()
        _, errors = policy.communicate(DEADLINE_S)
        assert policy.returncode == EXIT_RESTART, errors
        assert_ended(ranks)
    with replica(hub, "policy-0", tmp_path, *flags) as policy:
        version = hub.hello("policy-0")[0].version
        assert version in (1, 3)
        assert [train(hub, step, replayed=True) for step in range(version + 1, 4)] == expected[version - 1 :]
        publish(hub, 3)
        save(hub, 3)
        policy.terminate()
        assert exit_code(policy) == 0
