"""Arrival of messages: what is looked at, and what is not, before a message is known to be wanted."""

from __future__ import annotations

import msgspec
import pytest
from generated_results import valid
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.common.wire.tensors import TEACHER_TENSORS
from starling.controller.core.events import Received
from starling.controller.core.groups.arrival import received
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry
from starling.controller.core.replicas import joining
from starling.sim.replicas.weights import encoded_layout


def malformed(script: Script, lease: str) -> wire.GroupGenerated:
    """Return a result of `lease` without any tensor."""
    meta = wire.TrajectoryMeta(status=wire.Status.OK, num_tokens=1, text="y", oldest_version=0, newest_version=0)
    return wire.GroupGenerated(lease=script.aliases.long(lease), trajectories=(meta, meta), tensors=())


def event_of(script: Script, sender: str, message: wire.Up, incarnation: int = 1) -> Received:
    """Return the event of `message`."""
    return received(script.state, script.now, sender, incarnation, message, ())


def test_tensors_are_checked_only_for_the_holder_of_the_lease() -> None:
    script = Script()
    script.start_run("rollout-0", "rollout-1", slots=1)
    [mine, others] = [
        script.aliases.short(script.state.replicas.leases.all_of(name)[0].id) for name in ("rollout-0", "rollout-1")
    ]
    assert event_of(script, "rollout-0", malformed(script, mine)).problem is not None
    for sender, incarnation, lease in (
        ("rollout-0", 1, others),
        ("rollout-0", 1, "generate:t0:1.999"),
        ("rollout-0", 1, "generate:t0"),
        ("rollout-0", 1, "teach:t0:1.999"),
        ("rollout-0", 2, mine),
        ("rollout-7", 1, mine),
    ):
        assert event_of(script, sender, malformed(script, lease), incarnation).problem is None, lease


def test_tensors_of_a_lease_that_will_be_reclaimed_are_checked() -> None:
    script = Script()
    script.start_run("rollout-0", slots=1)
    lease = script.state.replicas.leases.all_of("rollout-0")[0].id
    journal = [JournalEntry(write.record, write.payload) for write in script.journal]
    script.controller = Controller(script.plan, Stream("train"), Stream("sft"), [], journal=journal, incarnation=2)
    script.state = script.controller.state
    script.joins("rollout-0", slots=1)
    assert not script.state.replicas.leases.all_of("rollout-0")
    event = event_of(script, "rollout-0", malformed(script, lease))
    assert event.problem is not None
    assert not script.state.replicas.leases.all_of("rollout-0"), "the look at the lease changes nothing"
    script.controller.step(event)
    assert script.state.replicas.membership.num_invalid["rollout-0"] == 1


def hello(script: Script, layout: bytes, incarnation: int = 1) -> list[str]:
    """Let rollout-0 send a hello with these bytes as its layout."""
    message = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    return script.receive("rollout-0", message, layout, incarnation=incarnation)


def holder_of(script: Script, kind: str) -> tuple[str, str]:
    """Return a replica that has a lease of this kind, and the lease."""
    names = sorted(script.state.replicas.membership.members)
    leases = [lease for name in names for lease in script.state.replicas.leases.all_of(name)]
    return next((lease.peer, lease.id) for lease in leases if lease.kind == kind)


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("pixel_values", "float32", (0, 2**64 - 1)),
        ("pixel_values", "float32", (2**62, 0)),
        ("routing", "uint8", (0, 2**40, 2**40)),
        ("routing", "uint16", (0, 2**31, 2**31)),
    ],
)
def test_tensor_without_elements_of_a_shape_that_no_array_has_is_malformed(
    name: str, dtype: str, shape: tuple[int, ...]
) -> None:
    script = Script()
    script.start_run()
    sender, lease = holder_of(script, "generate")
    result = valid()
    result.tensors.append(wire.TensorMeta(dtype=dtype, shape=shape, nbytes=0, name=name))
    message = wire.GroupGenerated(lease=lease, trajectories=tuple(result.trajectories), tensors=tuple(result.tensors))
    event = received(script.state, script.now, sender, 1, message, (*result.buffers, b""))
    assert event.problem is not None
    assert event.problem.is_malformed
    script.controller.step(event)
    interrupted = wire.GroupInterrupted(
        lease=holder_of(script, "generate")[1],
        reason="it leaves",
        partial=(wire.PartialCompletionMeta(num_tokens=2),) * 2,
        tensors=tuple(result.tensors[1:]),
    )
    script.controller.step(Received(script.now, sender, 1, interrupted, (*result.buffers[1:], b"")))
    assert script.state.replicas.membership.num_invalid[sender] == 2


def test_likeliest_tokens_of_no_token_have_a_shape_that_an_array_can_have() -> None:
    script = Script(num_teachers=1)
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    sender, lease = holder_of(script, "teach")
    tensors = [
        wire.TensorMeta(dtype=form.dtype, shape=(0, 2**63)[: form.num_dims], nbytes=0, name=name)
        for name, form in TEACHER_TENSORS.items()
    ]
    message = wire.TokensScored(lease=lease, tensors=tuple(tensors))
    event = received(script.state, script.now, sender, 1, message, (b"",) * len(tensors))
    assert event.problem is not None
    assert event.problem.is_malformed


def test_layout_of_a_member_is_not_decoded_again() -> None:
    script = Script()
    assert "rollout-0 <- welcome" in hello(script, encoded_layout("rollout-0"))
    known = script.state.replicas.membership.members["rollout-0"].layout
    assert hello(script, b"no layout")[-1] == "rollout-0 <- welcome"
    assert script.state.replicas.membership.members["rollout-0"].layout is known


def test_incarnation_with_an_unusable_layout_is_not_decoded_again() -> None:
    script = Script()
    refusal = hello(script, b"no layout")
    assert "are not a Layout" in refusal[-1]
    assert hello(script, encoded_layout("rollout-0")) == refusal
    assert "rollout-0 <- welcome" in hello(script, encoded_layout("rollout-0"), incarnation=2)


def test_layout_of_many_bytes_is_refused_before_it_is_decoded() -> None:
    script = Script()
    layout = msgspec.msgpack.encode("x" * joining.MAX_LAYOUT_BYTES)
    [_, refusal] = hello(script, layout)
    assert refusal == (
        f"rollout-0 <- refused: the layout of rollout-0 has {len(layout)} bytes, and {joining.MAX_LAYOUT_BYTES} are "
        "allowed"
    )
