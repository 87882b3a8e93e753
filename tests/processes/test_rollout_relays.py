"""Rollout processes that serve a version to others while they pull it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from fake_hub import FakeHub
from replica_processes import replica
from test_rollout_process import own_address

from starling.common.wire import messages as wire
from starling.policy.train.model.load import load_model, version_tensors
from starling.weightsync.offers.offer import Offer, decode_offer
from starling.weightsync.plan.layout import Layout, decode, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.publisher.publisher import Publisher
from starling.weightsync.tensors.modules import layout_of


@dataclass
class Order:
    """A command to adopt, with its buffers."""

    message: wire.AdoptWeights
    buffers: tuple[bytes, ...]


def order(hub: FakeHub, offer: Offer, plan: bytes, *, relay: tuple[str, bytes] | None = None) -> Order:
    """Return the command to pull what a policy offers, from a relay where there is one."""
    message = wire.AdoptWeights(
        lease=hub.lease("adopt"),
        version=offer.version,
        source="policy-0",
        relays=() if relay is None else (relay[0],),
        announce=True,
    )
    return Order(message, (encode(offer), plan, *([] if relay is None else [relay[1]])))


def announced(hub: FakeHub, name: str, command: Order) -> bytes:
    """Give a command, and return what the replica says that it serves."""
    hub.send(name, command.message, command.buffers)
    said, buffers = hub.next(name, wire.RelayOffered)
    assert (said.lease, said.version, said.problem) == (command.message.lease, command.message.version, "")
    return buffers[0]


def weights(model: Path, version: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a version."""
    return version_tensors(load_model(model, init="random", seed=version))


@pytest.mark.sample(1)
@pytest.mark.parametrize("address", ["loopback", "network"])
def test_rollout_reads_from_another_while_that_pulls(hub: FakeHub, model: Path, tmp_path: Path, address: str) -> None:
    """The policy sends each version once; where its offer is gone, what the relay has arrives nevertheless."""
    host = "127.0.0.1" if address == "loopback" else own_address()
    flags = ("--model.path", str(model), "--model.device", "cpu", "--network.host", host)
    published = {version: weights(model, version) for version in (1, 2, 3)}
    source = layout_of(published[1], "policy-0")
    with (
        replica(hub, "rollout-0", tmp_path, *flags),
        replica(hub, "rollout-1", tmp_path, *flags),
        Publisher(source, transport="tcp", delta_versions=2, encrypt=True, host=host) as publisher,
    ):
        layout = decode(Layout, hub.hello("rollout-0")[1][0])
        hub.hello("rollout-1")
        plan, roots = encode(make_plan(source, layout)), set[str]()
        for version in (1, 2):  # dense, then a delta
            offer = publisher.publish(version, published[version])
            command = order(hub, offer, plan)
            relay = announced(hub, "rollout-0", command)
            assert "secret" in str(decode_offer(relay)), "the controller makes tickets from it"
            through = order(hub, offer, plan, relay=("rollout-0", relay))
            announced(hub, "rollout-1", through)
            for name, lease in (("rollout-0", command.message.lease), ("rollout-1", through.message.lease)):
                adopted, _ = hub.answer(name, lease, wire.WeightsAdopted)
                assert (adopted.version, adopted.root) == (version, offer.root)
                roots.add(adopted.layout_root)
            assert adopted.source == "rollout-0"
            assert len(roots) == version, "both hold the same bits"
        offer = publisher.publish(3, published[3])
        command = order(hub, offer, plan)
        relay = announced(hub, "rollout-0", command)
        first, _ = hub.answer("rollout-0", command.message.lease, wire.WeightsAdopted)
        publisher.close()
        through = order(hub, offer, plan, relay=("rollout-0", relay))
        announced(hub, "rollout-1", through)
        second, _ = hub.answer("rollout-1", through.message.lease, wire.WeightsAdopted)
        assert second.layout_root == first.layout_root
        assert second.sent_bytes > 0


def test_rollout_turns_to_the_policy_when_its_relay_is_killed(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    flags = ("--model.path", str(model), "--model.device", "cpu")
    published = weights(model, 1)
    source = layout_of(published, "policy-0")
    with (
        replica(hub, "rollout-0", tmp_path, *flags) as process,
        replica(hub, "rollout-1", tmp_path, *flags),
        Publisher(source, transport="tcp", delta_versions=0) as publisher,
    ):
        plan = encode(make_plan(source, decode(Layout, hub.hello("rollout-0")[1][0])))
        hub.hello("rollout-1")
        offer = publisher.publish(1, published)
        command = order(hub, offer, plan)
        relay = announced(hub, "rollout-0", command)
        hub.answer("rollout-0", command.message.lease, wire.WeightsAdopted)
        process.kill()
        process.wait(10.0)
        through = order(hub, offer, plan, relay=("rollout-0", relay))
        announced(hub, "rollout-1", through)
        adopted, _ = hub.answer("rollout-1", through.message.lease, wire.WeightsAdopted)
        assert adopted.root == offer.root


def test_rollout_without_staging_says_that_it_serves_nothing(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    flags = ("--model.path", str(model), "--model.device", "cpu", "--rollout.double-buffer", "false")
    published = weights(model, 1)
    source = layout_of(published, "policy-0")
    with (
        replica(hub, "rollout-0", tmp_path, *flags),
        Publisher(source, transport="tcp", delta_versions=0) as publisher,
    ):
        plan = encode(make_plan(source, decode(Layout, hub.hello("rollout-0")[1][0])))
        command = order(hub, publisher.publish(1, published), plan)
        hub.send("rollout-0", command.message, command.buffers)
        said, buffers = hub.next("rollout-0", wire.RelayOffered)
        assert said.problem == "rollout.double_buffer is off: nothing is staged that others could read"
        assert buffers == ()
        hub.answer("rollout-0", command.message.lease, wire.WeightsAdopted)
