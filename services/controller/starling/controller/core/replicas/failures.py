"""Failed leases: a replica reports that it could not do a piece of work."""

from __future__ import annotations

from typing import Final

from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.groups.repair import reject_groups
from starling.controller.core.groups.results import MAX_REASON_CHARACTERS, retry
from starling.controller.core.replicas.conduct import note_no_offer, note_unscored
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.results import on_policy_version
from starling.controller.core.weights.accusations import note_bad_pull
from starling.controller.core.weights.distribution import note_failed_adoption, source_of
from starling.controller.core.weights.versions import check_outdated

SAVE_RETRY_S: Final = 15.0
"""Seconds after which a failed save of a state is retried."""
MAX_FAILING_LEASES: Final = 3
"""Lease periods for which a policy may fail to adopt the weights of another, before it is evicted."""


def on_failed(state: ControllerState, member: Member, lease: Lease, message: wire.LeaseFailed) -> None:
    """Retry failed work, or fail the run, by the kind of the work."""
    kind, subject = message.lease.split(":")[:2]
    reason = message.reason[:MAX_REASON_CHARACTERS]
    state.outbox.note("failed", replica=member.name, lease=message.lease, reason=reason)
    state.dirty = Dirty.ALL
    if member.role == "policy":
        if kind == "train" and reject_groups(state, int(subject), message.rejected, reason):
            return
        on_policy_version(state, member, message.version)  # it may have made the very step that it reports as failed
    found = state.group_of_lease(message.lease)
    if found is not None:
        is_scoring = kind in ("score", "teach")
        if is_scoring:
            note_unscored(state, found[1], member)
        # Another replica may well be able to score it.
        retry(state, *found, reason, member.name, retryable=is_scoring or not message.fatal)
    elif kind == "adopt" or (kind == "publish" and member.role == "rollout"):
        if kind == "adopt":
            state.weights.relays.end_pull(member.name, failed=True)
        note_bad_pull(state, source_of(lease), member.name)
        _transfer_failed(state, member, lease, subject, reason)
    elif kind in ("sleep", "wake"):
        state.replicas.sharing.note_failure(member, state.now)  # it is sent the command again
    elif member.role == "policy":
        _policy_failed(state, member, kind, int(subject), reason, fatal=message.fatal)


def on_not_sent(state: ControllerState, peer: str, lease_id: str, reason: str) -> None:
    """Retry a group whose command no message holds, or fail the run for any other work: no other replica could do it.

    Nothing counts against a replica: a prompt, or the texts of others, made the command too large.
    """
    lease = state.replicas.leases.get(lease_id)
    if lease is None or lease.peer != peer:
        return
    state.replicas.leases.end(lease)
    state.replicas.slots.mark(state.replicas.membership.members[peer], lease.kind)
    state.dirty = Dirty.ALL
    found = state.group_of_lease(lease_id)
    if found is not None:
        retry(state, *found, reason)
    else:
        state.lifecycle.fail(f"{peer} could not be sent {lease.kind} {lease_id.split(':')[1]}: {reason}", state.now)


def _transfer_failed(state: ControllerState, member: Member, lease: Lease, version: str, reason: str) -> None:
    weights = state.weights
    if member.role == "rollout":
        check_outdated(state, member)
        if lease.kind == "adopt":
            note_failed_adoption(state, member, lease, reason)
        else:
            weights.back_off(member.name, state.now, reason)
            note_no_offer(state, member, lease)
        return
    weights.back_off(member.name, state.now, reason)
    since = weights.failing_since.setdefault(member.name, state.now)
    if state.now - since > MAX_FAILING_LEASES * state.plan.lease_s:
        evict(state, member, f"{member.name} could not adopt version {version}: {reason}")


def _policy_failed(state: ControllerState, member: Member, kind: str, number: int, reason: str, *, fatal: bool) -> None:
    """Handle the failure of a policy with a step, a publication, a state or a checkpoint.

    `number`: its version; `fatal`: the step would fail again, on any policy.
    """
    training, can_work = state.training, state.replicas.sharing.has_devices(member)
    match kind:
        case "save":
            # The run can continue without it for a while: the journal keeps the steps since the last saved state.
            training.saved.not_before = state.now + SAVE_RETRY_S
        case "train" if not can_work:
            # It was asleep, having lost this controller meanwhile. The step is dispatched again.
            training.drop_share(member.name)
        case _ if not can_work:
            pass  # as above
        case "publish" if member.version != number:
            pass  # it has begun the next step: that version will be published instead
        case "train" if not fatal and training.step is not None and training.step.is_shared:
            training.step.note_failure(member.name, reason, state.now)
        case "train" if member.version >= number:
            pass  # it has made that step already
        case "train" | "publish" | "checkpoint":
            state.lifecycle.fail(f"{member.name} could not {kind}: {reason}", state.now)
