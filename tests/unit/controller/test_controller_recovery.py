"""A controller that is made again from the journal knows what the one before knew, but for who has what in hand.

The laws are checked after random stories: replicas answer, fail, die and return, operators change settings and want
evaluations. The records go through their real encoding.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
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
stories = st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 999)), max_size=60)
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


class Story(Script):
    """A run whose replicas do what a list of numbers says."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.epochs = dict.fromkeys(NAMES, 0)

    def tell(self, story: list[tuple[str, int]]) -> None:
        """Let all replicas join, and then happen what `story` says."""
        for name in NAMES:
            self.enters(name)
        for action, number in story:
            # Many answers at a time, for a story of a few dozen events to come to the later steps.
            for _ in range(1 + number % 10 if action == "answer" else 1):
                self.goes_on(action, number)

    def goes_on(self, action: str, number: int) -> None:
        """One thing happens."""
        self.now += 0.01
        leases = [lease for name in NAMES for lease in self.state.replicas.leases.all_of(name)]
        if self.state.training.fetching >= 0:
            self.fetched(self.state.training.fetching)
        elif action in ("answer", "fail"):
            if leases:
                self.answers(leases[number % len(leases)], number, well=action == "answer")
        else:
            self.happens(action, number)

    def enters(self, name: str) -> None:
        """Another incarnation of `name` says hello; a policy holds the newest saved state."""
        self.epochs[name] += 1
        role: Any = name.rpartition("-")[0]
        hello = wire.Hello(
            role=role,
            host=name[-1],
            pid=1,
            num_slots=3,
            version=self.state.training.saved.newest if role == "policy" else -1,
            has_layout=role in ("policy", "rollout"),
            serves=role in ("policy", "rollout"),
            shares_steps=True,
        )
        self.says(name, hello, *((encoded_layout(name),) if hello.has_layout else ()))

    def says(self, name: str, message: wire.Up, *buffers: bytes) -> None:
        """`name`, in its present incarnation, says `message`."""
        self.hears(name, message, *buffers, epoch=self.epochs[name])

    def happens(self, action: str, number: int) -> None:
        """Do what concerns no lease."""
        name = NAMES[number % len(NAMES)]
        if action == "lose":
            self.loses(name)
        elif action == "join" and name not in self.state.replicas.membership.members:
            self.enters(name)
        elif action == "set":
            key, value = SETTINGS[number % len(SETTINGS)]
            self.hears("operator-0", wire.ChangeSetting(request=str(number % 20), key=key, value=value))
        elif action == "evaluate":
            self.hears("operator-0", wire.RequestEvaluation(request=str(number % 3)))
        elif action == "stop" and number % 10 == 0:
            self.hears("operator-0", wire.RequestStop(request=str(number), reason=f"for reason {number}"))
        elif action == "wait":
            self.waits(number / 500)

    def answers(self, lease: Lease, number: int, *, well: bool) -> None:
        """Whoever has `lease` has done the work, or has failed where that does not end the run."""
        name, subject = lease.peer, lease_subject(lease.id)
        if not well and lease.kind in ("generate", "score", "teach", "adopt"):
            reason = wire.LeaseFailed(lease=lease.id, status=wire.Status.INFRA_LOST, reason="x", fatal=number % 4 == 0)
            self.says(name, reason)
            return
        match lease.kind:
            case "generate":
                self.says(name, *self.completions(lease.id, self.state.replicas.membership.members[name].version))
            case "score":
                group = self.state.group_of_lease(lease.id)
                assert group is not None
                num = len(group[1].trajectories)
                rewards = tuple(float((number + i) % 2 * (number % 3 > 0)) for i in range(num))
                self.says(name, wire.GroupScored(lease=lease.id, rewards=rewards, statuses=(wire.Status.OK,) * num))
            case "teach":
                meta = wire.TensorMeta(dtype="float32", shape=(2,), nbytes=8, name="teacher_logprobs")
                self.says(name, wire.TokensScored(lease=lease.id, tensors=(meta,)), lease.id.encode()[-8:])
            case "train":
                self.says(name, wire.StepTrained(lease=lease.id, step=int(subject), metrics={}))
            case "publish":
                published = wire.WeightsPublished(lease=lease.id, version=int(subject), publish_s=0.0)
                self.says(name, published, encoded_offer(int(subject)))
            case "adopt":
                self.says(name, adopted(lease.id, int(subject)))
            case "checkpoint" | "save":
                saved = wire.CheckpointSaved(lease=lease.id, step=int(subject), path="/", state=lease.kind == "save")
                self.says(name, saved)

    def completions(self, lease: str, version: int) -> tuple[Any, ...]:
        """Return what a rollout says that has generated a group: the message, and its buffers."""
        found = self.state.group_of_lease(lease)
        assert found is not None
        num = num_completions(self.state, found[1].purpose)
        meta = wire.TrajectoryMeta(
            status=wire.Status.OK, num_tokens=1, text=lease, oldest_version=version, newest_version=version
        )
        tensors = tuple(wire.TensorMeta(dtype="int32", shape=(1,), nbytes=4) for _ in range(4))
        message = wire.GroupGenerated(lease=lease, trajectories=(meta,) * num, tensors=tensors)
        return (message, *(lease.encode()[:4] for _ in range(4)))


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
    """Return the records as the journal gives them back: encoded, decoded, and without payload once it is trained."""
    committed = {write.record.step for write in script.journal if isinstance(write.record, StepCommitted)}
    steps = [write.record for write in script.journal if isinstance(write.record, StepFrozen)]
    trained = {f"t{ordinal}" for sealed in steps if sealed.step in committed for ordinal in sealed.ordinals}
    kept = []
    for write in script.journal:
        record = msgspec.msgpack.decode(msgspec.msgpack.encode(write.record), type=Record)  # type: ignore[arg-type]
        gone = isinstance(record, CompletionsStored | TeacherLogprobsStored) and record.key in trained
        kept.append(JournalEntry(record, () if gone else write.payload))
    return kept


def restored(script: Script) -> ControllerState:
    """Return the state of a controller that is made again from what `script` has written."""
    past = read_back(script)
    return Controller(script.plan, Stream("train"), Stream("sft"), script.held_out, journal=past, incarnation=2).state


def groups_of(book: Groups, num_committed: int) -> dict[int, Any]:
    """Return all that counts of the live groups; one that is in a rollout's hands waits."""
    found = {}
    for group in book.live():
        state = GroupState.WAITING if group.state is GroupState.LEASED else group.state
        trained = 0 < group.step <= num_committed
        found[group.ordinal] = (
            state,
            group.prompt,
            group.step,
            group.tries,
            group.trajectories if state is not GroupState.WAITING else (),
            group.rewards if state is not GroupState.WAITING else (),
            (group.has_teacher_logprobs, group.generated_by) if state is not GroupState.WAITING else (),
            group.buffers if state is not GroupState.WAITING and group.purpose == "train" and not trained else (),
            group.temperature if state is not GroupState.WAITING else 0.0,
        )
    return found


def known(state: ControllerState) -> dict[str, Any]:
    """Return what a controller must know of a run, whoever holds what."""
    ledger, evaluation = state.buffer, state.evaluations.current
    return {
        "version": state.version,
        "published": state.weights.version,
        "roots": state.weights.roots,
        "saved": (state.training.saved.newest, state.training.saved.previous),
        "metrics": state.training.metrics.all(),
        "groups": groups_of(ledger, state.version),
        "filtered": (
            ledger.num_filtered,
            ledger.num_filtered_in_a_row,
            tuple(ledger.filtered_rewards(state.version + 1)),
        ),
        "counts": (ledger.num_admitted, ledger.num_discarded, ledger.num_frozen_steps, ledger.num_trained_groups),
        "free_slots": ledger.free_slots(),
        "ranks": {group.ordinal: ledger.rank(group) for group in ledger.live()},
        "full": ledger.is_full(),
        "settings": state.training.changes,
        "sampling": state.training.sampling,
        "bounds": (ledger.max_staleness, ledger.max_tries),
        "evaluated": state.evaluations.evaluated,
        "granted": state.evaluations.granted,
        "requested": [(wanted.request, wanted.num_completions) for wanted in state.evaluations.requested],
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


@given(plans, stories)
@settings(max_examples=150, deadline=None)
def test_recovery_restores_the_whole_state(plan: dict[str, Any], story: list[tuple[str, int]]) -> None:
    script = Story(num_policies=2, num_rollouts=2, **plan)
    script.tell(story)
    assert known(restored(script)) == known(script.state)


@given(plans, stories)
@settings(max_examples=50, deadline=None)
def test_restored_groups_wait_for_a_reclaim(plan: dict[str, Any], story: list[tuple[str, int]]) -> None:
    script = Story(num_policies=2, num_rollouts=2, **plan)
    script.tell(story)
    state = restored(script)
    books: list[Groups] = [state.buffer] + (
        [state.evaluations.current] if state.evaluations.current is not None else []
    )
    assert not any(group.state is GroupState.LEASED for book in books for group in book.live())
    assert not any(group.score_lease or group.teacher_lease for book in books for group in book.live())
    for book in books:
        waiting = [group.ordinal for group in book.within(GroupState.WAITING)]
        first = book.next_waiting()
        assert (first.ordinal if first else None) == (waiting[0] if waiting else None)


def test_stories_get_far() -> None:
    """The laws above mean something: a long story of answers alone ends the run."""
    script = Story(num_policies=2, num_rollouts=2, evaluate_at_start=True, save_every=1, num_steps=3)
    script.tell([("answer", 0)] * 150)
    assert script.state.version == 3
    assert script.state.evaluations.evaluated == {"start": 0}
    assert str(script.state.lifecycle.stage) == "draining"
