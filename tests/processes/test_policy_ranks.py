"""A policy of several ranks: the same steps as one process, and the end of all when one ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import exit_code, replica
from test_policy_process import FLAGS, LAST, publish, step_of, train

from starling.common.observe.process import EXIT_RESTART
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import decode_layout

MESH = ("--policy.parallel.tp", "2", "--policy.parallel.dp-shard", "2")
RANKS = [1, 2, 3]


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


def test_policy_of_four_ranks_makes_the_steps_of_one_process(
    hub: FakeHub, whole_model: tuple[str, ...], tmp_path: Path
) -> None:
    with replica(hub, "policy-0", tmp_path / "alone", *whole_model) as policy:
        hub.hello("policy-0")
        expected = [train(hub, step) for step in range(1, LAST + 1)]
        policy.terminate()
        assert exit_code(policy) == 0
    with replica(hub, "policy-0", tmp_path / "mesh", *whole_model, *MESH) as policy:
        hello, (encoded,) = hub.hello("policy-0")
        layout = decode_layout(encoded)
        assert len(layout.ranks) == 4
        held = [sum(int(np.prod(shard.box.size)) for shard in rank.shards) for rank in layout.ranks]
        total = sum(int(np.prod(spec.shape)) for spec in layout.tensors)
        assert max(held) < 0.4 * total, "each rank offers its shards"
        ranks = children_of(hello.pid)
        assert sorted(ranks) == RANKS
        found = []
        for step in range(1, LAST + 1):
            offer = decode_offer(publish(hub, step - 1))
            assert [one.rank for one in offer.ranks] == [0, *RANKS]
            found.append(train(hub, step))
        hub.send("policy-0", drain())
        assert exit_code(policy) == 0
    for metrics, alone in zip(found, expected, strict=True):
        assert metrics.keys() == alone.keys()
        assert metrics == pytest.approx(alone, rel=2e-3, abs=1e-4)
    assert not any(rank.is_running() for rank in ranks.values())
    logs = sorted(path.name for path in (tmp_path / "mesh" / "logs").iterdir())
    assert logs == [f"policy-0.rank-{rank}.log" for rank in RANKS]
    assert "role=policy-0.rank-1" in (tmp_path / "mesh/logs/policy-0.rank-1.log").read_text()


def drain() -> Any:
    from starling.common.wire import messages as wire

    return wire.Drain(reason="the run is over")


@pytest.mark.parametrize("victim", [1, 3])
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
