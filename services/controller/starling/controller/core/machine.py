"""The controller: `Controller.step(event) -> commands` is its only method that changes its state.

The topics (`groups`, `replicas`, `weights`, `training`, `evaluation`, `lifecycle`) each have their own state, event
handlers and derivations. This module alone couples them: a handler notes what an event changes, and then all
derivations that are due run in the order of the walk.

| derivation            | consumes                          | waits for                                              |
|-----------------------|-----------------------------------|--------------------------------------------------------|
| `commit`              | a step that was made              | every policy that has a share of it                    |
| `switch_devices`      | devices that both sides share     | the sleep of the other side, in a colocated run        |
| `evaluate`            | held-out prompts                  | a version that is due, and rollouts to pin             |
| `publish`             | a version that rollouts need      | the step that makes it                                 |
| `catch_up`            | an outdated policy                | the weights of another policy, or the journal          |
| `adopt`               | a publication                     | an outdated rollout, and a replica that offers it      |
| `admit`               | prompts                           | a slot, freed when a step is published                 |
| `dispatch`            | waiting groups                    | a rollout with a slot and a version that is new enough |
| `score`               | generated groups                  | a reward replica with a slot                           |
| `score_with_teachers` | generated groups                  | a teacher with a slot, in a run with teachers          |
| `save`                | a version to save                 | an idle policy                                         |
| `train`               | scored groups, the oldest first   | all groups of the step, and the publication before     |
| `end`                 | the last step                     | evaluation, checkpoint, the goodbye of every replica   |

Each derivation is idempotent: a second run without an event in between does nothing. The handler of an event says which
ones it makes due. One that a handler forgot would run at the next tick, which makes all of them due.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from starling.common.ids import LEASE_KINDS, LeaseKind, lease_kind
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.schedule import evaluate
from starling.controller.core.events import (
    CheckpointRead,
    Command,
    Event,
    Fetched,
    NotSent,
    Profiled,
    Prompts,
    Received,
    ReplicaDisconnected,
    StopRequested,
    Stored,
    Ticked,
)
from starling.controller.core.explain import explain, overdue
from starling.controller.core.groups.admission import admit
from starling.controller.core.groups.dispatch import dispatch, score, score_with_teachers
from starling.controller.core.groups.files import on_stored
from starling.controller.core.groups.repair import repair_restored_groups
from starling.controller.core.groups.results import on_generated, on_interrupted, on_scored, on_tokens_scored
from starling.controller.core.lifecycle.ending import end
from starling.controller.core.lifecycle.operators import on_operator_command
from starling.controller.core.lifecycle.profiling import CONTROLLER, note_report, on_report
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import JournalEntry
from starling.controller.core.recovery import restore
from starling.controller.core.replicas.assignments import release
from starling.controller.core.replicas.departure import (
    depart,
    distrust,
    evict_hanging,
    stop_awaiting,
)
from starling.controller.core.replicas.eviction import evict_culprit, evict_unable, evict_useless, set_filtering_aside
from starling.controller.core.replicas.failures import on_failed, on_not_sent
from starling.controller.core.replicas.heartbeat import on_heartbeat
from starling.controller.core.replicas.joining import on_checkpoint_read, on_hello
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.replicas.reclaim import reclaim
from starling.controller.core.replicas.scaling.scaling import autoscale, drain_surplus
from starling.controller.core.replicas.switching import evict_awake, on_switched, switch_devices
from starling.controller.core.state import ControllerState, RunPrompts
from starling.controller.core.training.dispatch import commit, evict_silent, save, train
from starling.controller.core.training.results import note_digest, on_policy_version, on_saved, on_trained
from starling.controller.core.weights.distribution import (
    adopt,
    catch_up,
    on_adopted,
    on_published,
    on_relay_offered,
    publish,
)

AWAITED_HEARTBEATS: Final = 3
"""Heartbeats for which a restarted controller waits for replicas that may hold work."""
OPERATOR_COMMANDS: Final = (
    wire.QueryRun,
    wire.ChangeSetting,
    wire.RequestEvaluation,
    wire.RequestCheckpoint,
    wire.RequestStop,
    wire.RequestProfile,
    wire.ScaleReplicas,
    wire.DrainReplica,
)
"""`wire.OperatorMessage` as a tuple: `isinstance` takes ten times as long with a union."""
RUNNING: Final = RunStage.RUNNING
OVER: Final = RunStage.OVER
ACTIVE: Final = (RunStage.RUNNING, RunStage.CHECKPOINTING)
"""Stages of the run by names of their own: each look at a member of an enumeration takes as long as a call."""
FROM_NO_MEMBER: Final = frozenset({*OPERATOR_COMMANDS, wire.Hello})
"""Messages whose sender need not be a member."""
Result = (
    wire.GroupGenerated
    | wire.GroupInterrupted
    | wire.GroupScored
    | wire.TokensScored
    | wire.StepTrained
    | wire.WeightsPublished
    | wire.WeightsAdopted
    | wire.Slept
    | wire.Woken
    | wire.CheckpointSaved
    | wire.LeaseFailed
)
ANSWERS: Final[dict[type, tuple[LeaseKind, ...]]] = {
    wire.GroupGenerated: ("generate",),
    wire.GroupInterrupted: ("generate",),
    wire.GroupScored: ("score",),
    wire.TokensScored: ("teach",),
    wire.StepTrained: ("train",),
    wire.WeightsPublished: ("publish",),
    wire.WeightsAdopted: ("adopt",),
    wire.Slept: ("sleep",),
    wire.Woken: ("wake",),
    wire.CheckpointSaved: ("checkpoint", "save"),
    wire.LeaseFailed: LEASE_KINDS,
}
"""The kinds of leases that a result may end. By any other the work of the lease would be lost."""


class Controller:
    """Decides everything about one run."""

    def __init__(
        self,
        plan: RunPlan,
        prompts: Prompts,
        examples: Prompts,
        held_out: Sequence[wire.Prompt],
        *,
        journal: Sequence[JournalEntry] = (),
        incarnation: int = 1,
    ) -> None:
        """Begin a run, or resume it.

        Args:
            plan: the kind of the run, its sizes, bounds and deadlines.
            prompts: for reinforcement learning, or to be answered.
            examples: for the steps of examples.
            held_out: for evaluations.
            journal: its records, in order; the payload of groups of committed steps may be left out.
            incarnation: how often a controller of this run has started, from 1.
        """
        self.state = ControllerState(plan, RunPrompts(prompts, examples, list(held_out)), incarnation)
        restore(self.state, journal)

    @property
    def waiting_for(self) -> str:
        """What the run waits for, in words."""
        return explain(self.state)

    def step(self, event: Event) -> list[Command]:
        """Handle one event and return the commands that follow, in order."""
        state = self.state
        state.outbox.clear(event.now)
        state.now = event.now
        if state.lifecycle.stage is OVER:
            return []  # messages that arrive before the process ends are ignored
        if state.replicas.membership.await_until == -math.inf:
            _begin(state)
        if type(event) is Received:
            _received(state, event)
        else:
            _handle(state, event)
        if state.dirty:
            advance(state)
        return state.outbox.commands()


def _begin(state: ControllerState) -> None:
    """Set the deadlines that restored state lacks, because the journal has no clock, and repair restored groups."""
    if state.incarnation > 1:
        state.replicas.sharing.restart(state.now)
        if state.replicas.autoscale is not None:
            state.replicas.autoscale.restart(state.now)
        repair_restored_groups(state)
    state.replicas.membership.await_until = state.now + AWAITED_HEARTBEATS * state.plan.heartbeat_s
    if state.lifecycle.stage is RunStage.DRAINING:
        state.lifecycle.drain(state.now)
    elif state.lifecycle.stopping:
        state.lifecycle.deadline = state.now + state.plan.stop_s


# --- events -----------------------------------------------------------------------------------------------------------


def _handle(state: ControllerState, event: Event) -> None:
    """Handle an event that is no message."""
    match event:
        case Ticked():
            _tick(state)
        case ReplicaDisconnected(peer=peer):
            member = state.replicas.membership.members.get(peer)
            # A policy that is alone cannot be replaced at once, and may come back: its lease decides.
            if member is not None and (member.role != "policy" or member.shares_steps):
                depart(state, member, "its connection closed")
        case StopRequested(reason=reason):
            state.lifecycle.stop(reason, event.now)
            state.dirty = Dirty.ALL
        case Fetched(problem=problem) if problem:
            state.lifecycle.fail(problem, event.now)
            state.dirty = Dirty.ALL
        case Fetched(step=step, records=records):
            if state.training.fetching == step:
                state.training.fetching, state.training.fetched = -1, (step, records)
                state.dirty |= Dirty.CATCH_UP | Dirty.TRAIN
        case Stored(step=step):
            on_stored(state, step)
        case CheckpointRead(digest=digest):
            on_checkpoint_read(state, digest)
        case NotSent(peer=peer, lease=lease, reason=reason):
            on_not_sent(state, peer, lease, reason)
        case Profiled(report=report):
            note_report(state, CONTROLLER, report)


def _tick(state: ControllerState) -> None:
    """Remove replicas that are silent or hang, fail a run that cannot continue, and make every derivation due."""
    replicas, now = state.replicas, state.now
    if replicas.membership.awaited and not replicas.membership.is_awaiting(now):
        stop_awaiting(state)
    for name in replicas.membership.expired(now):
        depart(state, replicas.membership.members[name], f"it was silent for {state.plan.lease_s:g} s")
    for lease in replicas.leases.expired(now):
        member = replicas.membership.members.get(lease.peer)
        if member is not None:
            evict_hanging(state, member, lease)
    if state.lifecycle.stage in ACTIVE:
        evict_silent(state)
        evict_culprit(state)
        set_filtering_aside(state)
        evict_unable(state)
        evict_useless(state)
        evict_awake(state)
        drain_surplus(state)
        if replicas.autoscale is not None:
            autoscale(state)
        problem = overdue(state)
        if problem is not None:
            state.lifecycle.fail(problem, now)
    replicas.slots.end_cooldowns(now)
    state.dirty = Dirty.ALL


def _received(state: ControllerState, event: Received) -> None:
    """Handle a message of an operator, or of a replica: a hello, a heartbeat, a goodbye, or the result of a lease."""
    # Most messages are results and heartbeats. A failed `isinstance` takes ten times as long as one that holds, so one
    # look at the type spares them those of all others.
    sender, membership = event.sender, state.replicas.membership
    message: Any = event.message
    if type(message) in FROM_NO_MEMBER:
        _received_from_anybody(state, event)
        return
    member = membership.members.get(sender)
    if member is None or member.incarnation != event.incarnation:
        if not isinstance(message, wire.Leave) and not membership.is_stale(sender, event.incarnation):
            state.outbox.send(sender, wire.RequestHello())
        return
    member.heard_at = event.now
    if type(message) is wire.Heartbeat:
        on_heartbeat(state, member, message)
        if state.profiles.newest is not None:
            on_report(state, member, message.profile)
    elif type(message) is wire.RelayOffered:
        on_relay_offered(state, member, message, event)
    elif type(message) is wire.Leave:
        depart(state, member, f"it left: {message.reason}", ended=True)
    else:
        _ended(state, member, message, event)


def _received_from_anybody(state: ControllerState, event: Received) -> None:
    """Handle a message of an operator, or a hello."""
    message = event.message
    if isinstance(message, OPERATOR_COMMANDS):
        on_operator_command(state, event.sender, message)
    elif isinstance(message, wire.Hello) and not state.replicas.membership.is_stale(event.sender, event.incarnation):
        on_hello(state, event, message)


def _ended(state: ControllerState, member: Member, message: Result, event: Received) -> None:
    """Handle the end of a piece of work: settle its lease, if the replica has it, and take the result."""
    leases, kind = state.replicas.leases, type(message)
    lease = leases.get(message.lease)
    if lease is not None and lease.peer == member.name and lease.kind not in ANSWERS[kind]:
        distrust(state, member, f"{member.name} answered {lease.id} by a {kind.__name__}")
        return  # if it stays, it still has the work, until the deadline of the lease
    # The release of a lease that is not, or no longer, in force makes a late result harmless.
    release(state, member.name, message.lease)
    if lease is None and lease_kind(message.lease) in ANSWERS[kind] and reclaim(state, member, message.lease):
        lease = leases.get(message.lease)
    if lease is not None and lease.peer == member.name:  # else the result comes too late
        leases.end(lease)
        state.replicas.slots.mark(member, lease.kind)
        RESULTS[kind](state, member, lease, message, event)
    elif isinstance(message, wire.StepTrained):
        # Whatever happened to its lease: this policy has made the step, and that cannot be undone.
        note_digest(state, member, message)
        on_policy_version(state, member, message.step)


RESULTS: Final[dict[type, Callable[[ControllerState, Member, Lease, Any, Received], None]]] = {
    wire.GroupGenerated: on_generated,
    wire.GroupInterrupted: on_interrupted,
    wire.GroupScored: lambda state, member, lease, message, event: on_scored(state, member, lease, message),
    wire.TokensScored: on_tokens_scored,
    wire.StepTrained: lambda state, member, lease, message, event: on_trained(state, member, message),
    wire.WeightsPublished: on_published,
    wire.WeightsAdopted: lambda state, member, lease, message, event: on_adopted(state, member, lease, message),
    wire.Slept: lambda state, member, lease, message, event: on_switched(state, member, asleep=True),
    wire.Woken: lambda state, member, lease, message, event: on_switched(state, member, asleep=False),
    wire.CheckpointSaved: lambda state, member, lease, message, event: on_saved(state, member, message),
    wire.LeaseFailed: lambda state, member, lease, message, event: on_failed(state, member, lease, message),
}
"""The handler of the result of a lease that was in force, by the type of the message."""


# --- derivations ------------------------------------------------------------------------------------------------------


def advance(state: ControllerState) -> None:
    """Run all derivations that are due, until none is."""
    membership = state.replicas.membership
    if membership.awaited and state.lifecycle.stage is RUNNING and membership.is_awaiting(state.now):
        return  # work that no replica has reported yet may still be in progress
    while state.dirty:
        due, state.dirty = state.dirty, Dirty.NONE
        if state.lifecycle.stage in ACTIVE:
            _walk(state, due)
        if due & Dirty.END:
            end(state)


def _walk(state: ControllerState, due: int) -> None:
    """Run the derivations of a running run, in the order of the walk."""
    if due & Dirty.TRAIN:
        commit(state)
    if state.replicas.sharing.shared:
        switch_devices(state)
    if due & (Dirty.EVALUATE | Dirty.PIN):
        evaluate(state, all_rollouts=bool(due & Dirty.PIN))
    if due & Dirty.PUBLISH:
        publish(state)
    if due & Dirty.CATCH_UP:
        catch_up(state)
    if state.lifecycle.stage is not RUNNING:
        return
    if due & Dirty.ADOPT:
        adopt(state)
    if due & Dirty.ADMIT:
        admit(state)
    if due & Dirty.DISPATCH:
        dispatch(state)
    if due & Dirty.SCORE:
        score(state)
        if state.buffer.needs_teacher:
            score_with_teachers(state)
    if due & Dirty.TRAIN:
        save(state)
        train(state)
