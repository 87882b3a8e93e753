"""A policy whose ranks are on two nodes, here both on this host: the same steps, and one sentence for what is wrong."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from fake_hub import DEADLINE_S, FakeHub
from replica_processes import Replica, exit_code, replica
from test_policy_process import FLAGS, publish, save, train

from starling.common.observe.process import EXIT_FAILED, EXIT_RESTART, EXIT_USAGE
from starling.common.wire import messages as wire
from starling.weightsync.offers.offer import decode_offer

MESH = ("--policy.parallel.tp", "2", "--policy.parallel.dp-shard", "2")
Node = Callable[..., AbstractContextManager[Replica]]


def free_address() -> str:
    """Return an address at which nothing listens; its port is none that the kernel gives to outgoing connections."""
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20_000, 32_000)))
            return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def node(hub: FakeHub, model: Path, tmp_path: Path) -> Node:
    """Return a function that starts a node of two."""
    flags = ("--model.path", str(model), *FLAGS, *MESH, "--nnodes", "2", "--rdzv", free_address())
    start = partial(replica, hub, "policy-0", tmp_path, *flags)
    return lambda number, *more: start("--node-rank", str(number), *more)


def processes_titled(part: str, parent: int) -> dict[str, psutil.Process]:
    """Return the children of a process whose titles have `part`."""
    titles = {"".join(child.cmdline()[:1]): child for child in psutil.Process(parent).children()}
    return {title.removeprefix("starling: "): child for title, child in titles.items() if part in title}


def sentence(node: Replica, code: int) -> str:
    """Wait for the end of a node, and return its last sentence."""
    _, errors = node.communicate(DEADLINE_S)
    assert node.returncode == code, errors
    assert "Traceback" not in errors, errors
    return [line for line in errors.splitlines() if line.startswith("starling ")][-1]


def test_policy_of_two_nodes_makes_the_steps_of_one(hub: FakeHub, node: Node, model: Path, tmp_path: Path) -> None:
    """Also after a rank of the other node was killed: its agent stays, and joins the next incarnation."""
    with replica(hub, "policy-0", tmp_path / "alone", "--model.path", str(model), *FLAGS) as policy:
        hub.hello("policy-0")
        expected = [train(hub, step) for step in (1, 2, 3, 4)]
        policy.terminate()
        assert exit_code(policy) == 0
    with node(1) as agent:
        with node(0) as policy:
            hub.hello("policy-0")
            found = [train(hub, step) for step in (1, 2)]
            save(hub, 2)
            offer = decode_offer(publish(hub, 2))
            assert [one.rank for one in offer.ranks] == [0, 1, 2, 3]
            ranks = processes_titled(".rank-", agent.pid)
            assert sorted(ranks) == ["policy-0.rank-2", "policy-0.rank-3"]
            ranks["policy-0.rank-3"].kill()
            what = "rank 3 was killed by SIGKILL, and the replica starts again from its newest state; see "
            assert sentence(policy, EXIT_RESTART).startswith(f"starling policy-0: {what}")
        with node(0) as policy:
            assert hub.hello("policy-0")[0].version == 2
            found += [train(hub, step, replayed=True) for step in (3, 4)]
            saved = wire.SaveCheckpoint(lease=hub.lease("save"), step=4, state=False)
            hub.ask("policy-0", saved, wire.CheckpointSaved)
            hub.send("policy-0", wire.Drain(reason="the run is over"))
            assert exit_code(policy) == 0
        assert exit_code(agent) == 0
    for metrics, alone in zip(found, expected, strict=True):
        assert metrics == pytest.approx(alone, rel=2e-3, abs=1e-4)
    assert (tmp_path / "checkpoints/step-4/model.safetensors").exists()


@pytest.mark.campaign
def test_nodes_that_do_not_fit_are_refused_and_others_wait_for_them(
    hub: FakeHub, node: Node, model: Path, tmp_path: Path
) -> None:
    join = ("--policy.parallel.join-s", "120", "--network.lease-s", "2")
    other = tmp_path / "other"
    other.mkdir()
    for path in model.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "generation_config.json").write_text("{}")
    with ExitStack() as stack:
        start = lambda *flags: stack.enter_context(node(*flags, *join))  # noqa: E731
        policy, third = start(0), start(1, "--nnodes", "4")
        setting, files = start(1, "--policy.optimizer.weight-decay", "0.5"), start(1, "--model.path", str(other))
        folder = start(1, "--dir", str(other))
        host = socket.gethostname()
        assert f"--nnodes 4 of node 1 ({host}) is not the --nnodes 2 of node 0" in sentence(third, EXIT_USAGE)
        wrong = f"policy.optimizer.weight_decay of node 1 ({host}) is not that of node 0; start all nodes with the same"
        assert wrong in sentence(setting, EXIT_USAGE)
        assert f"the model folder {other} of node 1 ({host}) has other files" in sentence(files, EXIT_USAGE)
        assert f"has --dir {other} and does not see the folder {tmp_path} of node 0" in sentence(folder, EXIT_USAGE)
        agent = start(1)
        hub.hello("policy-0")
        assert "give each node its own --node-rank" in sentence(start(1), EXIT_USAGE)
        train(hub, 1)
        agent.kill()
        assert f"node 1 ({host}) of policy-0 is gone, and the replica starts again" in sentence(policy, EXIT_RESTART)


def test_node_that_is_alone_ends_at_its_deadline(node: Node, tmp_path: Path) -> None:
    join = ("--policy.parallel.join-s", "1")
    with node(0, *join) as policy, node(1, *join, "--rdzv", free_address()) as agent:
        assert "node 1 of policy-0 did not join at 127.0.0.1:" in sentence(policy, EXIT_FAILED)
        found = sentence(agent, EXIT_FAILED)
        assert "node 1 of policy-0 could not join node 0 at 127.0.0.1:" in found
        assert "within 1 s (policy.parallel.join_s): there was no connection; check that all nodes run" in found
        assert "with the same --rdzv and key file" in found


@pytest.mark.campaign
def test_agent_that_is_stopped_alone_asks_for_a_restart(hub: FakeHub, node: Node) -> None:
    """It waits for node 0, which may have been stopped too, and needs the ranks to save its state."""
    leave = ("--policy.saving.leave-s", "1")
    with node(0, *leave) as policy, node(1, *leave) as agent:
        hub.hello("policy-0")
        agent.send_signal(signal.SIGTERM)
        assert "node 1 of policy-0 was stopped by SIGTERM, and the replica" in sentence(agent, EXIT_RESTART)
        assert "node 1 (" in sentence(policy, EXIT_RESTART)
