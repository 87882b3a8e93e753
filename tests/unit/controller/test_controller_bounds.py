"""The controller's memory is bounded by present members and live groups, not by the length of the run."""

from __future__ import annotations

import gc
import json
from typing import Any

import msgspec
import pytest
from transcript import SMALL, Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.explain import waits
from starling.controller.core.groups.buffer import GroupBuffer
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry, MemberJoined, MemberLeft, RewardsStored
from starling.controller.core.replicas import joining, membership
from starling.controller.core.replicas.membership import Member, Membership
from starling.controller.core.replicas.routing.slots import FreeSlots
from starling.controller.core.state import Outbox
from starling.controller.core.training.dynamic_settings import SettingChanges
from starling.controller.core.training.metrics import MAX_NAMES, NAME_CHARACTERS, MetricNames
from starling.controller.core.weights import plans
from starling.controller.core.weights.publications import Publications
from starling.controller.shell.status import MetricsHistory, snapshot
from starling.sim.replicas.weights import adopted, encoded_layout, encoded_offer
from starling.weightsync.plan.layout import Box, Layout, Place, RankLayout, Shard, TensorSpec, decode_layout, encode


def size_of(state: Any) -> int:
    """Return the total number of entries in all nested containers of `state`."""
    if isinstance(state, dict):
        return len(state) + sum(size_of(value) for value in state.values())
    if isinstance(state, list | tuple | set):
        return len(state) + sum(size_of(value) for value in state if not isinstance(value, str))
    return sum(size_of(value) for value in vars(state).values()) if isinstance(state, FreeSlots | GroupBuffer) else 0


def test_free_slots_memory_grows_with_members_only() -> None:
    free = FreeSlots()
    members = [
        Member(name=f"r-{i}", role="rollout", incarnation=1, num_slots=4, heard_at=0.0, version=0) for i in range(8)
    ]
    for version in range(500):
        for member in members:
            member.version = version
            for busy in (0, 1, 2):
                free.put(member, busy)
        assert free.least_busy(version) is members[0]
    assert size_of(free) < 1000


def test_routing_memory_grows_with_members_only() -> None:
    free = FreeSlots()
    idle, working = (
        Member(name=name, role="rollout", incarnation=1, num_slots=4, heard_at=0.0, version=0)
        for name in ("r-0", "r-1")
    )
    free.put(idle, 0)
    for number in range(5000):
        free.put(working, 1 + number % 2)
        assert free.least_busy() is idle
    assert size_of(free) < 1000


def test_discarded_prompts_are_counted_and_not_listed() -> None:
    buffer = GroupBuffer(num_steps=500, prompts_per_step=2, max_staleness=0, max_tries=0)
    for step in range(1, 501):
        for _ in range(4):
            buffer.admit(Stream("p").prompt(0))
        first = buffer.num_admitted - 4
        for ordinal in (first, first + 2):
            group = buffer.get(ordinal)
            assert group is not None
            buffer.discard(group)
        for rank, ordinal in enumerate((first + 1, first + 3)):
            group = buffer.get(ordinal)
            assert group is not None
            assert buffer.rank(group) == rank
            buffer.lease(group, 0)
            buffer.store_completions(group, (), (), ())
            buffer.store_rewards(group, RewardsStored(key=group.key, rewards=(1.0,)))
        assert buffer.next_waiting() is buffer.next_to_score() is None
        assert len(buffer.freeze_next(step)) == 2
        buffer.retire(step)
    assert buffer.count(GroupState.FROZEN) == 0
    assert size_of(buffer) < 100


def test_plans_to_a_departed_replica_are_dropped() -> None:
    script = Script()
    script.start_run()
    for incarnation in range(2, 60):
        script.disconnect("rollout-0")
        script.joins("rollout-0", incarnation=incarnation)
        assert script.state.replicas.leases.num("rollout-0", "adopt") == 1
    assert size_of(script.state.weights.plans._pairs) < 20


def test_plans_from_a_departed_replica_are_dropped() -> None:
    weights = Publications()
    here = decode_layout(encoded_layout("rollout-0"))
    for number in range(50):
        name = f"policy-{number}"
        source = decode_layout(encoded_layout(name))
        member = Member(
            name=name, role="policy", incarnation=1, num_slots=0, heard_at=0.0, version=number, host="h", layout=source
        )
        weights.publish(member, number, encoded_offer(number), {})
        weights.plans.pair(source, here)
        weights.forget(name, source)
    assert size_of(weights.plans._pairs) < 20


@pytest.mark.campaign
def test_layouts_of_departed_incarnations_are_dropped() -> None:
    """A layout of a rollout's own, another one in each hello, would fill the memory: each can take hundreds of MiB."""

    def kept() -> int:
        gc.collect()
        return sum(type(one) is Layout and one.replica == "rollout-9" for one in gc.get_objects())

    script = Script()
    script.start_run("rollout-0")
    before = kept()
    for incarnation in range(1, 21):
        layout = decode_layout(encoded_layout("rollout-9"))
        [rank] = layout.ranks
        other = msgspec.structs.replace(rank, shards=rank.shards * incarnation)
        hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
        encoded = encode(msgspec.structs.replace(layout, ranks=(other,)))
        script.receive("rollout-9", hello, encoded, incarnation=incarnation)
        if script.state.replicas.leases.num("rollout-9", "adopt"):
            lease = script.state.replicas.leases.of("rollout-9", "adopt")[0]
            script.adopts("rollout-9", 0, int(script.aliases.short(lease).rpartition(":")[2]))
    del layout, rank, other
    assert kept() - before <= 2
    assert len(script.state.weights.plans._plans._plans) <= 3


def test_rollout_has_no_more_boxes_than_the_model_of_the_policy_can_be_split_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of a larger model would be decoded before there is no plan for them."""
    monkeypatch.setattr("starling.weightsync.plan.layout.FREE_BOXES", 8)
    monkeypatch.setattr("starling.weightsync.plan.layout.BOXES_PER_TENSOR", 0)
    script = Script()
    script.start_run("rollout-0")
    layout = decode_layout(encoded_layout("rollout-9"))
    [rank] = layout.ranks
    larger = TensorSpec(name="larger", shape=(1 << 40,), dtype="int8")
    other = msgspec.structs.replace(rank, shards=rank.shards * 9)
    many = encode(msgspec.structs.replace(layout, tensors=(*layout.tensors, larger), ranks=(other,)))
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    said = script.receive("rollout-9", hello, many, incarnation=1)
    assert any("boxes or more, expected at most 8" in line for line in said), said


def test_rollout_has_no_more_bytes_than_copies_of_the_model_of_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the policy does not have would allow it any number of copies of the others."""
    monkeypatch.setattr("starling.weightsync.plan.layout.FREE_BYTES", 1024)
    script = Script()
    script.start_run("rollout-0")
    layout = decode_layout(encoded_layout("rollout-9"))
    [rank] = layout.ranks
    larger = TensorSpec(name="larger", shape=(1 << 40,), dtype="int8")
    whole = Shard(
        tensor=len(layout.tensors),
        box=Box(offset=(0,), size=(1 << 40,)),
        storage="larger",
        offset_bytes=0,
        strides=(1,),
    )
    other = msgspec.structs.replace(rank, shards=(whole, *rank.shards))
    many = encode(msgspec.structs.replace(layout, tensors=(*layout.tensors, larger), ranks=(other,)))
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    said = script.receive("rollout-9", hello, many, incarnation=1)
    assert any("expected at most 16 times as many" in line for line in said), said


@pytest.mark.parametrize(("num_tensors", "num_boxes"), [(0, 79), (79, 0)])
def test_layouts_of_many_parts_are_decoded_seldom(
    num_tensors: int, num_boxes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are small, and take seconds each."""
    monkeypatch.setattr(joining, "LAYOUT_PARTS_PER_HELLO", 4)
    script = Script()
    script.start_run("rollout-0")
    layout = decode_layout(encoded_layout("rollout-9"))
    [rank] = layout.ranks
    others = tuple(TensorSpec(name=f"t{number}", shape=(), dtype="int8") for number in range(num_tensors))
    ranks = (msgspec.structs.replace(rank, shards=rank.shards * (1 + num_boxes)),)
    many = encode(msgspec.structs.replace(layout, tensors=(*layout.tensors, *others), ranks=ranks))
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    answered = [bool(script.receive("rollout-9", hello, many, incarnation=number)) for number in range(1, 9)]
    assert answered == [True] * 4 + [False] * 4, "64 hellos at once, of 21 each"
    assert "rollout-8 <- welcome" in script.joins("rollout-8"), "others are not affected"


def test_layout_keys_of_policies_that_never_offered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_SOURCES", 10)
    known, here = plans.LayoutPlans(), decode_layout(encoded_layout("rollout-0"))
    sources = [decode_layout(encoded_layout(f"policy-{number}")) for number in range(100)]
    assert len({known.key(source, here) for source in sources}) == 1, "their boxes are the same"
    assert size_of(known._pairs) <= 11


def test_former_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_GONE", 10)
    known = Membership(10.0)
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    for number in range(100):
        name = f"rollout-{number}"
        known.prove(known.join(name, 1, hello, None, 0.0), 7)
        known.remove(name)
        known.ban(name, 1, "it hung")
    for kept in (known.proven, known._incarnations, known._banned):
        assert len(kept) <= 11
    assert known.refusal("rollout-99", 1, hello) == "it hung"


def test_repeated_setting_changes_take_no_memory() -> None:
    changes = SettingChanges()
    for number in range(1000):
        changes.add("rl.max_tries", number, 3, "r")
    assert size_of(changes._changes) < 10
    assert changes.now("rl.max_tries", -1) == 999


def test_recovery_bounds_former_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "MAX_GONE", 10)
    records: list[JournalEntry] = []
    for number in range(100):
        records += [JournalEntry(MemberJoined(name=f"rollout-{number}", role="rollout", epoch=1))]
        records += [JournalEntry(MemberLeft(name=f"rollout-{number}"))]
    streams = Stream("train"), Stream("sft")
    known = Controller(SMALL, *streams, [], journal=records, incarnation=2).state.replicas.membership
    assert len(known._incarnations) <= 11


LONG = "h" * 1_000_000


def noted_bytes(script: Script, *kinds: str) -> int:
    """Return the size of the notes of the last event, all of which have these kinds."""
    notes = [command for command in script.commands if isinstance(command, Note)]
    assert [note.kind for note in notes] == list(kinds)
    return sum(len(json.dumps(note.fields)) for note in notes)


def test_texts_of_replicas_are_noted_in_part() -> None:
    script = Script()
    script.start_run()
    script.receive("reward-7", wire.Hello(role="reward", host=LONG, pid=1, num_slots=1))
    assert noted_bytes(script, "refused") < 20_000
    assert "reward-7" not in script.state.replicas.membership.members
    script.receive("reward-8", wire.Hello(role="reward", host="h" * 255, pid=1, num_slots=1))
    script.receive("reward-8", wire.Leave(reason=LONG))
    assert noted_bytes(script, "left") < 20_000


def test_long_list_in_an_adoption_is_noted_in_part() -> None:
    script = Script()
    script.joins("policy-0")
    script.joins("reward-0")
    script.joins("rollout-0")
    script.publishes(0)
    [pull] = [send for send in script.sent if isinstance(send.message, wire.AdoptWeights)]
    assert isinstance(pull.message, wire.AdoptWeights)
    answer = msgspec.structs.replace(
        adopted(pull.message, pull.buffers, None),
        transport=LONG,
        lanes=("cma/memory",) * 100_000,
        split={str(number): 0.0 for number in range(100_000)},
        mode=LONG,
    )
    script.receive("rollout-0", answer)
    assert noted_bytes(script, "adopted") < 40_000
    assert script.state.replicas.membership.members["rollout-0"].version == 0


def test_view_of_a_replica_is_bounded() -> None:
    script = Script()
    script.start_run()
    wait = wire.Wait(what=LONG, on=LONG, since_s=0.0, seconds_left=1.0)
    progress = wire.LeaseProgress(bytes_done=0, bytes_total=1)
    heartbeat = wire.Heartbeat(
        leases=tuple(
            wire.HeldLease(lease=f"adopt:{number}:1.1", phase="working", progress=progress) for number in range(9000)
        ),
        gauges={"tokens_per_s": 7.0, LONG: 1.0} | {f"{number:x}": 0.0 for number in range(100_000)},
        waits=(wait,) * 1000,
    )
    script.receive("reward-0", heartbeat)
    view = msgspec.msgpack.encode(snapshot(script.state, MetricsHistory(0.0), 1.0, 0))
    assert len(view) < 20_000
    assert len(json.dumps(waits(script.state))) < 500_000
    member = script.state.replicas.membership.members["reward-0"]
    assert not member.progress
    assert member.gauges["tokens_per_s"] == 7.0
    assert member.waits[0].what == "h" * 512


def test_refusal_fits_a_message() -> None:
    script = Script()
    script.start_run()
    layout = Layout(
        replica="rollout-1",
        tensors=(TensorSpec(name="\0" * 9_000_000, shape=(1,), dtype="no such type"),),
        ranks=(RankLayout(place=Place(), shards=()),),
    )
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    script.receive("rollout-1", hello, encode(layout))
    assert noted_bytes(script, "refused") < 60_000
    [refused] = [send.message for send in script.sent]
    assert isinstance(refused, wire.Refused)
    assert len(refused.reason) < 10_000


# --- what one replica makes the controller write and decode ---------------------------------------------------------


def notes(script: Script, kind: str) -> int:
    """Return how many notes of this kind the script has seen."""
    return sum(text.startswith(f"({kind} ") for text in script.log)


@pytest.mark.parametrize("is_refused", [False, True])
def test_lines_about_a_replica_that_joins_again_and_again_are_bounded(is_refused: bool) -> None:
    script = Script()
    for incarnation in range(1, 1001):
        script.joins("reward-0", slots=0 if is_refused else 1, incarnation=incarnation)
        script.receive("reward-0", wire.Leave(reason="x" * 1000), incarnation=incarnation)
    assert notes(script, "refused" if is_refused else "joined") == 64
    assert sum("MemberJoined" in text for text in script.log) == (0 if is_refused else 64)
    script.advance_time(300.0)
    before = notes(script, "joined")
    for incarnation in range(2000, 2100):
        script.joins("reward-0", incarnation=incarnation)
    assert notes(script, "joined") - before == 10, "it may join again after a while"


def test_layouts_of_a_replica_that_joins_again_and_again_are_decoded_seldom() -> None:
    script = Script()
    layout = encoded_layout("rollout-0") + bytes(32 << 20)  # it is refused when it has been read
    hello = wire.Hello(role="rollout", host="h", pid=1, num_slots=1, has_layout=True)
    for incarnation in range(1, 101):
        script.receive("rollout-0", hello, layout, incarnation=incarnation)
    assert notes(script, "refused") == 13, "each counts for five"


def test_notes_about_a_replica_that_fails_again_and_again_are_bounded() -> None:
    script = Script(max_tries=10**6)
    script.start_run()
    size = 0
    for _ in range(5000):
        lease = next(iter(script.state.replicas.leases.of("rollout-0", "generate")))
        failed = wire.LeaseFailed(lease=lease, status=wire.Status.INFRA_LOST, reason="x" * 5000)
        script.receive("rollout-0", failed)
        size += sum(len(json.dumps(c.fields)) for c in script.commands if isinstance(c, Note))
    assert 15 << 20 < size < 18 << 20


def scores(script: Script, number: int, names: list[str]) -> None:
    """Generate a group and let it have scores of these names."""
    script.generates("rollout-0", f"generate:t{number}:0")
    scored = wire.GroupScored(
        lease=f"score:t{number}:0",
        rewards=(1.0, 0.0),
        statuses=(wire.Status.OK,) * 2,
        components=dict.fromkeys(names, (1.0, 0.0)),
    )
    script.receive("reward-0", msgspec.msgpack.decode(msgspec.msgpack.encode(scored), type=wire.GroupScored))


def test_made_up_names_of_scores_do_not_grow_the_lines_of_steps() -> None:
    script = Script(prompts_per_step=8, num_scorers=2)
    script.start_run(slots=8)
    notes: list[Note] = []
    for number in range(8):
        scores(script, number, ["right", *(f"{number}/{index}" for index in range(60))])
        notes += [command for command in script.commands if isinstance(command, Note)]
    [train] = [send.message for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert len(train.groups) == 8, "each group is trained"
    script.trains(1)
    [step] = [command.fields for command in script.commands if isinstance(command, Note) and command.kind == "step"]
    assert len([name for name in step if name.startswith("score/")]) == MAX_NAMES + 2, "two are the recipe's scorers"
    assert step["score/right"] == 0.5
    [left_out] = [note.fields for note in notes if note.kind == "names_left_out"]
    assert left_out == {"replica": "reward-0", "name": "4/17", "limit": MAX_NAMES + 2}


def test_groups_share_the_names_of_their_scores() -> None:
    script = Script(prompts_per_step=2)
    script.start_run()
    for number in range(2):
        scores(script, number, ["a name that is longer than those that the decoder of messages keeps"])
    [first, second] = [next(iter(group.components)) for group in script.state.buffer.live() if group.components]
    assert first is second


def test_made_up_names_of_one_replica_keep_no_names_of_others_out() -> None:
    names = MetricNames()
    made_up = {str(index): 1.0 for index in range(MAX_NAMES)}
    assert names.known("reward-9", made_up) == made_up
    right = {"right": 1.0, "short": 2.0}
    assert names.known("reward-0", right) == right
    assert len(names.known("reward-9", made_up)) == MAX_NAMES - 2, "the newest two made room"
    assert names.known("reward-9", {"more": 1.0}) == {}
    for number in range(3):
        names.known("reward-0", {f"{number}/{index}": 1.0 for index in range(MAX_NAMES)})
    assert len(names.known("reward-9", made_up)) == MAX_NAMES // 2


def test_long_names_of_metrics_leave_room_for_those_of_others() -> None:
    names = MetricNames()
    made_up = {f"{index:0200}": 1.0 for index in range(MAX_NAMES)}
    known = names.known("reward-9", made_up)
    most = NAME_CHARACTERS * MAX_NAMES
    assert sum(map(len, known)) <= most
    right = {"right": 1.0, "x" * 200: 2.0}
    assert names.known("reward-0", right) == right
    assert sum(map(len, names._names)) == names._num_characters <= most


def measured(number: int, purpose: str, metrics: dict[str, float]) -> tuple[wire.GroupGenerated, list[bytes]]:
    """Return a group of one completion with these metrics of its environment."""
    meta = wire.TrajectoryMeta(
        status=wire.Status.OK, num_tokens=1, text="y", oldest_version=0, newest_version=0, metrics=metrics
    )
    tensors = tuple(
        wire.TensorMeta(dtype=kind, shape=(1,), nbytes=4) for kind in ("int32", "int32", "float32", "int32")
    )
    lease = f"generate:{purpose[0]}{number}:0"
    return wire.GroupGenerated(lease=lease, trajectories=(meta,), tensors=tensors), [bytes(4)] * 4


def test_made_up_names_of_metrics_are_not_stored() -> None:
    script = Script(prompts_per_step=2, group_size=1)
    script.start_run()
    for number in range(2):
        message, buffers = measured(number, "train", {"won": 1.0, **{f"{number}/{n}": 1.0 for n in range(900)}})
        script.receive("rollout-0", message, *buffers)
    groups = list(script.state.buffer.live())
    stored = [name for group in groups for trajectory in group.trajectories for name in trajectory.metrics]
    assert len(set(stored)) == MAX_NAMES
    assert stored.count("won") == 2


def test_metrics_of_environments_are_not_stored_in_an_evaluation() -> None:
    """Nothing reads them, and each compaction of the journal would repeat them for each completion."""
    script = Script(evaluate_at_start=True)
    script.start_run(slots=4)
    message, buffers = measured(0, "evaluate", {"won": 1.0})
    script.receive("rollout-0", message, *buffers)
    assert script.state.evaluations.current is not None
    [group] = [group for group in script.state.evaluations.current.live() if group.trajectories]
    assert group.trajectories[0].metrics == {}


@pytest.mark.parametrize("path", ["/data", "/\udcff"])
def test_long_texts_of_a_note_are_cut(path: str) -> None:
    outbox = Outbox()
    outbox.note("failed", replica="rollout-0", reason="x" * 20_000, parts={"n": ["y" * 9_000, 3], "p": (path,)}, num=1)
    fields = {"replica": "rollout-0", "reason": "x" * 8192, "parts": {"n": ["y" * 8192, 3], "p": (path,)}, "num": 1}
    assert outbox.commands() == [Note("failed", fields)]


@pytest.mark.parametrize("name", ["policy-0", "rollout-0", "reward-0", "teacher-0"])
@pytest.mark.parametrize("field", ["peer", "settings_digest", "checkpoint"])
def test_hello_with_a_long_text_is_refused(name: str, field: str) -> None:
    """A member's texts are kept as long as it is one, and a hello may have 16 MiB."""
    script = Script(num_teachers=1)
    hello = hello_of(name)
    assert f"{name} <- welcome" in script.receive(name, hello, encoded_layout(name))
    script.leaves(name)
    lines = script.receive(name, msgspec.structs.replace(hello, **{field: "x" * 262}), encoded_layout(name))
    assert lines[-1] == (f"{name} <- refused: {name} has an address or a digest of 262 characters; it may have 261")
    assert name not in script.state.replicas.membership.members


@pytest.mark.parametrize("name", ["rollout-0", "reward-0", "teacher-0"])
def test_replica_that_is_no_policy_and_shares_steps_is_refused(name: str) -> None:
    script = Script(num_teachers=1)
    lines = script.receive(name, msgspec.structs.replace(hello_of(name), peer="h:1"), encoded_layout(name))
    assert lines[-1] == f"{name} <- refused: {name} offers to share steps, which only policies can"


def hello_of(name: str) -> wire.Hello:
    """Return a valid hello of a replica."""
    role: Any = name.rpartition("-")[0]
    has_layout = role in ("policy", "rollout")
    version = 0 if role == "policy" else -1
    return wire.Hello(
        role=role, host="h", pid=1, num_slots=0 if role == "policy" else 2, version=version, has_layout=has_layout
    )
