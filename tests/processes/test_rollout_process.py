"""Rollout processes that adopt bitwise from the policy and from each other, and end on command."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from fake_hub import FakeHub
from replica_processes import Replica, exit_code, replica
from test_policy_process import step_of

from starling.common.wire import messages as wire
from starling.policy.train.model.load import load_model, version_tensors
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.plan.layout import Layout, decode, encode
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.puller.puller import Puller
from starling.weightsync.tensors.modules import layout_of
from starling.weightsync.transports.endpoints import choose_transport, is_loopback

SEED = 11


def publish(hub: FakeHub, name: str, version: int) -> bytes:
    message = wire.PublishWeights(lease=hub.lease("publish"), version=version)
    published, (offer,) = hub.ask(name, message, wire.WeightsPublished)
    assert published.version == version
    return offer


def order(hub: FakeHub, source: str, offer: bytes, plan: bytes) -> tuple[wire.AdoptWeights, tuple[bytes, ...]]:
    version = decode_offer(offer).version
    return wire.AdoptWeights(lease=hub.lease("adopt"), version=version, source=source), (offer, plan)


def pull_tensors(layout: Layout, offer: bytes, model: Path) -> dict[str, torch.Tensor]:
    """Pull an offer into a local model with other weights, and return its tensors."""
    tensors = version_tensors(load_model(model, init="random", seed=SEED + 1))
    puller = Puller(layout_of(tensors, "test"))
    try:
        puller.pull(decode_offer(offer), make_plan(layout, layout_of(tensors, "test")), deadline_s=60.0)
        puller.switch(tensors)
    finally:
        puller.close()
    return tensors


def generate(hub: FakeHub, min_version: int) -> wire.GenerateGroup:
    return wire.GenerateGroup(
        lease=hub.lease("generate"),
        purpose="train",
        prompt=wire.Prompt(id="p", text="abc>"),
        num_completions=2,
        sampling=wire.Sampling(max_tokens=4),
        min_version=min_version,
    )


def own_address() -> str:
    """Return an IPv4 address of this machine that other hosts can reach; that of the loopback if there is none."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not is_loopback(one.address):
                return str(one.address)
    return "127.0.0.1"


def test_rollout_adopts_from_rollout(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    """Weights that other hosts could be sent are encrypted, though no setting says so."""
    host = own_address()
    shared = ("--model.path", str(model), "--model.device", "cpu", "--run.seed", str(SEED), "--network.host", host)
    wanted, encrypted = choose_transport("auto", host, encrypt=None)
    own = ("--policy.init", "random")
    serving = ("--rollout.version-timeout-s", "0.5")
    with (
        replica(hub, "policy-0", tmp_path, *shared, *own) as policy,
        replica(hub, "rollout-0", tmp_path, *shared, *serving) as first,
        replica(hub, "rollout-1", tmp_path, *shared, *serving) as second,
    ):
        layouts = {}
        for name in ("policy-0", "rollout-0", "rollout-1"):
            hello, (layout,) = hub.hello(name)
            assert (hello.serves, hello.version) == (True, 0 if name == "policy-0" else -1)
            layouts[name] = decode(Layout, layout)

        early = wire.PublishWeights(lease=hub.lease("publish"), version=0)
        failed, _ = hub.ask("rollout-0", early, wire.LeaseFailed)
        assert "this rollout holds no version that it could prove" in failed.reason
        assert not failed.fatal, "the failure is temporary"

        offers = {"policy-0": publish(hub, "policy-0", 0)}
        for source, name in (("policy-0", "rollout-0"), ("rollout-0", "rollout-1")):
            plan = encode(make_plan(layouts[source], layouts[name]))
            adopted, _ = hub.ask(name, *_flat(order(hub, source, offers[source], plan)))
            assert (adopted.version, adopted.transport) == (0, wanted)
            assert [rank.encrypted for rank in decode_offer(offers[source]).ranks] == [encrypted]
            assert not encrypted or adopted.lanes == ("tcp+aes-gcm",)
            offers[name] = publish(hub, name, 0)
            assert publish(hub, name, 0) == offers[name], "a repeated command returns the same offer"
            assert adopted.root == decode_offer(offers[source]).root
            assert hub.heartbeat(name, lambda status: status.offered == 0).version == 0
        roots = {name: decode_offer(offer).root for name, offer in offers.items()}
        assert len(set(roots.values())) == 1, "replicas with the same boxes must have the same root"

        expected = version_tensors(load_model(model, init="random", seed=SEED))
        for name, offer in offers.items():
            found = pull_tensors(layouts[name], offer, model)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], value) for key, value in expected.items()), name

        check_versions_of_groups(hub)
        check_pull_from_suspended_policy(hub, policy, layouts, roots["rollout-0"])
        for process in (first, second):
            process.terminate()
        assert [exit_code(process) for process in (first, second)] == [0, 0]
        policy.send_signal(signal.SIGCONT)
        policy.terminate()
        assert exit_code(policy) == 0


def check_versions_of_groups(hub: FakeHub) -> None:
    """A group that needs a future version fails; one that needs the present version is generated."""
    failed, _ = hub.ask("rollout-1", generate(hub, 5), wire.LeaseFailed)
    assert failed.reason == "an order to adopt version 5 or newer did not come within 0.5 s"
    generated, _ = hub.ask("rollout-1", generate(hub, 0), wire.GroupGenerated)
    assert len(generated.trajectories) == 2


def check_pull_from_suspended_policy(hub: FakeHub, policy: Replica, layouts: Mapping[str, Layout], root: str) -> None:
    """Let one rollout adopt version 1, and the other begin its pull from a suspended policy.

    `root`: of version 0.
    """
    step, buffers = step_of(hub.lease("train"), 1)
    hub.ask("policy-0", step, wire.StepTrained, buffers)
    offer = publish(hub, "policy-0", 1)
    plan = encode(make_plan(layouts["policy-0"], layouts["rollout-0"]))
    adopted, _ = hub.ask("rollout-0", *_flat(order(hub, "policy-0", offer, plan)))
    again = publish(hub, "rollout-0", 1)
    assert decode_offer(again).root == adopted.root == decode_offer(offer).root
    assert decode_offer(again).root != root, "the root of another version must differ"
    policy.send_signal(signal.SIGSTOP)
    message, buffers = order(hub, "policy-0", offer, plan)
    hub.send("rollout-1", message, buffers)
    status = hub.heartbeat("rollout-1", lambda status: bool(status.waits))
    assert [(wait.what, wait.on) for wait in status.waits] == [("the weights of version 1", "policy-0")]
    assert 0.0 < status.waits[0].seconds_left <= 60.0
    assert status.version == 0, "the rollout keeps its version during the pull"


def _flat(
    ordered: tuple[wire.AdoptWeights, tuple[bytes, ...]],
) -> tuple[wire.AdoptWeights, type[wire.WeightsAdopted], tuple[bytes, ...]]:
    return ordered[0], wire.WeightsAdopted, ordered[1]
