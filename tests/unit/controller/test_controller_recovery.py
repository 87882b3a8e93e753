"""Recovery: a controller rebuilt from the journal has the state of its predecessor, except for leases.

The properties are checked after random event sequences: replicas answer, fail, die and return, operators change
settings and request evaluations. Records are encoded and decoded as in the journal.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from transcript import Script, Stream

from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.groups.admission import num_completions
from starling.controller.core.groups.group import Groups, GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.records import (
    CompletionsStored,
    JournalEntry,
    Record,
    StepCommitted,
    StepFrozen,
    TeacherLogprobsStored,
)
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.state import ControllerState
from starling.sim.replicas.weights import encoded_layout, encoded_offer, offer_of

NAMES = ("policy-0", "policy-1", "rollout-0", "rollout-1", "reward-0", "teacher-0")
SETTINGS = (
    ("policy.optimizer.learning_rate", 1e-4),
    ("sampling.temperature", 0.5),
    ("rl.max_staleness", 0),
    ("rl.max_tries", 0),
    ("evaluation.every", 1),
    ("controller.save_every", 1),
    ("no.such", 1),
)
ACTIONS = ("answer",) * 12 + ("stop", "fail", "lose", "join", "join", "set", "evaluate", "wait")
action_lists = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), max_size=60)
plans = st.fixed_dictionaries(
    {
        "num_supervised_steps": st.sampled_from((0, 0, 1)),
        "num_steps": st.integers(1, 4),
        "prompts_per_step": st.integers(1, 3),
        "max_staleness": st.integers(0, 2),
        "max_tries": st.integers(0, 2),
        "evaluate_at_start": st.booleans(),
        "evaluate_every": st.integers(0, 2),
        "save_every": st.integers(0, 2),
        "dynamic_sampling": st.booleans(),
        "num_teachers": st.integers(0, 1),
        "begin_version": st.sampled_from((0, 0, 1)),
        "begin_prompt": st.sampled_from((0, 0, 5)),
    }
)


class RandomRun(Script):
    """A run driven by a list of (action, number) pairs."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.incarnations = dict.fromkeys(NAMES, 0)

    def play(self, actions: list[tuple[str, int]]) -> None:
        """Let all replicas join, then perform `actions`."""
        for name in NAMES:
            self.join(name)
        for action, number in actions:
            # Several answers per action, so that a few dozen actions reach the later steps.
            for _ in range(1 + number % 10 if action == "answer" else 1):
                self.perform(action, number)

    def perform(self, action: str, number: int) -> None:
        """Perform one action."""
        self.now += 0.01
        leases = [lease for name in NAMES for lease in self.state.replicas.leases.all_of(name)]
        if self.state.training.fetching >= 0:
            self.fetched(self.state.training.fetching)
        elif action in ("answer", "fail"):
            if leases:
                self.answer(leases[number % len(leases)], number, succeeds=action == "answer")
        else:
            self.perform_without_lease(action, number)

    def join(self, name: str) -> None:
        """Let a new incarnation of `name` join; a policy starts from the newest saved state."""
        self.incarnations[name] += 1
        role: Any = name.rpartition("-")[0]
        hello = wire.Hello(
            role=role,
            host=name[-1],
            pid=1,
            num_slots=3,
            version=self.state.training.saved.newest if role == "policy" else -1,
            has_layout=role in ("policy", "rollout"),
            serves=role in ("policy", "rollout"),
            peer="h:1" if role == "policy" else "",
        )
        self.send(name, hello, *((encoded_layout(name),) if hello.has_layout else ()))

    def send(self, name: str, message: wire.Up, *buffers: bytes) -> None:
        """Deliver `message` from the present incarnation of `name`."""
        self.receive(name, message, *buffers, incarnation=self.incarnations[name])

    def perform_without_lease(self, action: str, number: int) -> None:
        """Perform an action that concerns no lease."""
        name = NAMES[number % len(NAMES)]
        if action == "lose":
            self.disconnect(name)
        elif action == "join" and name not in self.state.replicas.membership.members:
            self.join(name)
        elif action == "set":
            key, value = SETTINGS[number % len(SETTINGS)]
            self.receive("operator-0", wire.ChangeSetting(request=str(number % 20), key=key, value=value))
        elif action == "evaluate":
            self.receive("operator-0", wire.RequestEvaluation(request=str(number % 3)))
        elif action == "stop" and number % 10 == 0:
            self.receive("operator-0", wire.RequestStop(request=str(number), reason=f"for reason {number}"))
        elif action == "wait":
            self.advance_time(number / 500)

    def answer(self, lease: Lease, number: int, *, succeeds: bool) -> None:
        """Answer `lease` with its result, or with a failure where that does not end the run."""
        name, subject = lease.peer, lease_subject(lease.id)
        if not succeeds and lease.kind in ("generate", "score", "teach", "adopt"):
            reason = wire.LeaseFailed(lease=lease.id, status=wire.Status.INFRA_LOST, reason="x", fatal=number % 4 == 0)
            self.send(name, reason)
            return
        match lease.kind:
            case "generate":
                self.send(name, *self.completions(lease.id, self.state.replicas.membership.members[name].version))
            case "score":
                group = self.state.group_of_lease(lease.id)
                assert group is not None
                num = len(group[1].trajectories)
                rewards = tuple(float((number + i) % 2 * (number % 3 > 0)) for i in range(num))
                self.send(name, wire.GroupScored(lease=lease.id, rewards=rewards, statuses=(wire.Status.OK,) * num))
            case "teach":
                meta = wire.TensorMeta(dtype="float32", shape=(2,), nbytes=8, name="teacher_logprobs")
                self.send(name, wire.TokensScored(lease=lease.id, tensors=(meta,)), lease.id.encode()[-8:])
            case "train":
                self.send(name, wire.StepTrained(lease=lease.id, step=int(subject), metrics={}))
            case "publish":
                published = wire.WeightsPublished(lease=lease.id, version=int(subject), publish_s=0.0)
                self.send(name, published, encoded_offer(int(subject)))
            case "adopt":
                self.send(name, adopted(lease.id, int(subject)))
            case "checkpoint" | "save":
                saved = wire.CheckpointSaved(lease=lease.id, step=int(subject), path="/", state=lease.kind == "save")
                self.send(name, saved)

    def completions(self, lease: str, version: int) -> tuple[Any, ...]:
        """Return the message of a generated group, and its buffers."""
        group = self.state.group_of_lease(lease)
        assert group is not None
        num = num_completions(self.state, group[1].purpose)
        meta = wire.TrajectoryMeta(
            status=wire.Status.OK, num_tokens=1, text=lease, oldest_version=version, newest_version=version
        )
        kinds = (("int32", 1), ("int32", num), ("float32", num), ("int32", num))
        tensors = tuple(wire.TensorMeta(dtype=kind, shape=(n,), nbytes=4 * n) for kind, n in kinds)
        message = wire.GroupGenerated(lease=lease, trajectories=(meta,) * num, tensors=tensors)
        # The prompt says whose tokens they are.
        return message, lease.encode()[-4:], bytes(4 * num), bytes(4 * num), struct.pack("<i", version) * num


def adopted(lease: str, version: int) -> wire.WeightsAdopted:
    return wire.WeightsAdopted(
        lease=lease,
        version=version,
        root=offer_of(version).root,
        pull_s=0.0,
        pause_s=0.0,
        size_bytes=16,
        transport="local",
    )


def read_back(script: Script) -> list[JournalEntry]:
    """Return the records as the journal returns them: encoded, decoded, and without payloads of trained groups."""
    committed = {write.record.step for write in script.journal if isinstance(write.record, StepCommitted)}
    steps = [write.record for write in script.journal if isinstance(write.record, StepFrozen)]
    trained = {f"t{ordinal}" for frozen in steps if frozen.step in committed for ordinal in frozen.ordinals}
    entries = []
    for write in script.journal:
        record = msgspec.msgpack.decode(msgspec.msgpack.encode(write.record), type=Record)  # type: ignore[arg-type]
        pruned = isinstance(record, CompletionsStored | TeacherLogprobsStored) and record.key in trained
        entries.append(JournalEntry(record, () if pruned else write.payload))
    return entries


def recovered_state(script: Script) -> ControllerState:
    """Return the state of a controller recovered from the journal of `script`."""
    journaled = read_back(script)
    return Controller(
        script.plan, Stream("train"), Stream("sft"), script.held_out, journal=journaled, incarnation=2
    ).state


def groups_of(groups: Groups, num_committed: int) -> dict[int, Any]:
    """Return the durable fields of the live groups; a leased group counts as waiting."""
    fields = {}
    for group in groups.live():
        state = GroupState.WAITING if group.state is GroupState.LEASED else group.state
        trained = 0 < group.step <= num_committed
        fields[group.ordinal] = (
            state,
            group.prompt,
            group.step,
            group.tries,
            group.trajectories if state is not GroupState.WAITING else (),
            group.rewards if state is not GroupState.WAITING else (),
            (group.has_teacher_logprobs, group.generated_by) if state is not GroupState.WAITING else (),
            group.generator if state is not GroupState.WAITING else "",
            group.buffers if state is not GroupState.WAITING and group.purpose == "train" and not trained else (),
            group.temperature if state is not GroupState.WAITING else 0.0,
        )
    return fields


def durable_state(state: ControllerState) -> dict[str, Any]:
    """Return the state of a run that recovery must restore: all but leases."""
    buffer, evaluation = state.buffer, state.evaluations.current
    return {
        "version": state.version,
        "published": state.weights.version,
        "roots": state.weights.roots,
        "saved": (state.training.saved.newest, state.training.saved.previous),
        "metrics": state.training.metrics.all(),
        "groups": groups_of(buffer, state.version),
        "filtered": (
            buffer.num_filtered,
            buffer.filtering.summary(),
            tuple(buffer.filtered_rewards(state.version + 1)),
        ),
        "counts": (buffer.num_admitted, buffer.num_discarded, buffer.num_frozen_steps, buffer.num_trained_groups),
        "free_slots": buffer.num_free_slots(),
        "ranks": {group.ordinal: buffer.rank(group) for group in buffer.live()},
        "full": buffer.is_full(),
        "settings": state.training.changes,
        "sampling": state.training.sampling,
        "bounds": (buffer.max_staleness, buffer.max_tries),
        "evaluated": state.evaluations.evaluated,
        "granted": state.evaluations.granted,
        "requested": [
            (evaluation_request.request, evaluation_request.num_completions)
            for evaluation_request in state.evaluations.requested
        ],
        "stopping": state.lifecycle.stopping if state.lifecycle.stop_is_journaled else "",
        "evaluations": (state.evaluations.num_begun, state.evaluations.num_groups),
        "evaluating": evaluation
        and (
            evaluation.number,
            evaluation.version,
            evaluation.cause,
            evaluation.num_completions,
            evaluation.num_discarded,
            groups_of(evaluation, 0),
        ),
        "proven": state.replicas.membership.proven,
        "members": set(state.replicas.membership.members) | state.replicas.membership.awaited,
    }


@given(plans, action_lists)
@examples(150)
def test_recovery_restores_the_whole_state(plan: dict[str, Any], actions: list[tuple[str, int]]) -> None:
    script = RandomRun(num_policies=2, num_rollouts=2, **plan)
    script.play(actions)
    assert durable_state(recovered_state(script)) == durable_state(script.state)


@given(plans, action_lists)
@examples(50)
def test_restored_groups_wait_for_a_reclaim(plan: dict[str, Any], actions: list[tuple[str, int]]) -> None:
    script = RandomRun(num_policies=2, num_rollouts=2, **plan)
    script.play(actions)
    state = recovered_state(script)
    all_groups: list[Groups] = [state.buffer] + (
        [state.evaluations.current] if state.evaluations.current is not None else []
    )
    assert not any(group.state is GroupState.LEASED for groups in all_groups for group in groups.live())
    assert not any(group.score_lease or group.teacher_lease for groups in all_groups for group in groups.live())
    for groups in all_groups:
        waiting = [group.ordinal for group in groups.within(GroupState.WAITING)]
        first = groups.next_waiting()
        assert (first.ordinal if first else None) == (waiting[0] if waiting else None)


def test_long_action_list_completes_the_run() -> None:
    """The properties above cover whole runs: enough answers complete the run."""
    script = RandomRun(num_policies=2, num_rollouts=2, evaluate_at_start=True, save_every=1, num_steps=3)
    script.play([("answer", 0)] * 150)
    assert script.state.version == 3
    assert script.state.evaluations.evaluated == {"start": 0}
    assert str(script.state.lifecycle.stage) == "draining"
