"""Distribution of weights: versions are published, rollouts adopt them, and outdated policies catch up.

Stops 9 and 10 of the walk.
"""

from __future__ import annotations

from typing import Final

from starling.common.errors import WeightsError
from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers, Received
from starling.controller.core.groups.files import fetch_step, take_fetched
from starling.controller.core.records import VersionAdopted, VersionPublished
from starling.controller.core.replicas.assignments import grant, take_back_groups
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import redispatch
from starling.controller.core.weights.publications import PublishedOffer
from starling.controller.core.weights.versions import check_outdated, set_held_version, target_version
from starling.weightsync.plan.layout import encode
from starling.weightsync.plan.tickets import offer_for

MAX_BAD_PULLS: Final = 3
"""Number of consecutive failed or mismatched pulls from a rollout after which it is no longer used as a source."""


# --- publication ------------------------------------------------------------------------------------------------------


def publish(state: ControllerState) -> None:
    """Have a policy offer a version that rollouts need."""
    plan, version, replicas = state.plan, state.version, state.replicas
    due = plan.kind.publishes(plan) and version >= plan.num_supervised_steps and version > state.weights.version
    if not due or replicas.is_policy_publishing() or not replicas.policies_have_devices():
        return
    for member in replicas.current_policies(version):
        if not replicas.leases.num(member.name, "train"):
            state.weights.requested = version
            _request_offer(state, member, version)
            return


def _request_offer(state: ControllerState, member: Member, version: int) -> None:
    """Have a replica offer the version that it holds."""
    grant(state, member, "publish", version, lambda lease: wire.PublishWeights(lease=lease, version=version))


def on_published(
    state: ControllerState, member: Member, lease: Lease, message: wire.WeightsPublished, event: Received
) -> None:
    """Add an offer; one of a policy of a new version frees the slots of the steps that made it."""
    state.dirty = Dirty.ALL
    before = state.weights.version
    try:
        if lease_subject(lease.id) != str(message.version):
            raise WeightsError(f"Version {message.version} came in answer to {lease.id}.")
        if member.role == "rollout" and member.version != message.version:
            return  # it has adopted another version since it was asked
        root, is_new = state.weights.publish(member, message.version, event.buffers[0])
    except WeightsError as error:
        _offer_failed(state, member, f"the offer of version {message.version} by {member.name} is not usable: {error}")
        return
    if is_new:
        state.outbox.write(VersionPublished(version=message.version, root=root))
    if message.version <= before:
        state.outbox.note("offered", replica=member.name, version=message.version)
        return
    for step in range(before + 1, message.version + 1):
        state.buffer.retire(step)
    for rollout in state.replicas.membership.of("rollout"):
        check_outdated(state, rollout)
    state.outbox.note("published", version=message.version, publish_s=message.publish_s, offer_s=message.offer_s)


def _offer_failed(state: ControllerState, member: Member, reason: str) -> None:
    """Handle an offer that cannot be used. A rollout is not needed for offers, and another policy can offer instead."""
    if member.role == "policy" and state.replicas.membership.num("policy") == 1:
        state.lifecycle.fail(reason, state.now)
    else:
        state.replicas.membership.num_invalid[member.name] += 1
        num = state.replicas.membership.num_invalid[member.name]
        state.outbox.note("invalid", replica=member.name, reason=reason, num=num)
        evict(state, member, reason)


# --- adoption ---------------------------------------------------------------------------------------------------------


def adopt(state: ControllerState) -> None:
    """Have every outdated rollout pull the version that it should hold."""
    unavailable = set[int]()
    for name in list(state.weights.outdated):
        member = state.replicas.membership.members.get(name)
        if member is None:
            continue  # it was evicted as the source of another
        version = target_version(state, member)
        if version in unavailable or not state.weights.may_try(name, state.now):
            continue
        if not state.replicas.sharing.has_devices(member):  # it pulls when it wakes; an offer is arranged now
            if not state.weights.is_offered(version):
                _find_holder(state, version)
                unavailable.add(version)
            continue
        offer = state.weights.source(member, version)
        nearer = _holder_on_host(state, member, version, offer)
        if nearer is not None:
            if not state.replicas.leases.num(nearer.name, "publish"):
                _request_offer(state, nearer, version)
        elif offer is not None:
            _pull(state, member, offer)
        else:
            _find_holder(state, version)
            if not state.weights.is_offered(version):
                unavailable.add(version)  # for all rollouts that wait for it


def _pull(state: ControllerState, member: Member, offer: PublishedOffer, *, with_state: bool = False) -> None:
    """Have `member` pull the version of `offer`."""
    version = offer.version
    source = state.replicas.membership.members[offer.holder]
    assert source.layout is not None, "a replica that offers weights joined with its layout"
    assert member.layout is not None, "a replica that holds weights joined with its layout"
    try:
        plan = state.weights.plan(source.layout, member.layout)
    except WeightsError as error:
        # A rollout that offers with an impossible layout must not cost those that would pull from it their membership.
        evict(state, member if source.role == "policy" else source, str(error))
        return

    def command(lease: str) -> wire.AdoptWeights:
        return wire.AdoptWeights(lease=lease, version=version, source=source.name, with_state=with_state)

    def buffers(lease: str) -> Buffers:
        return encode(offer_for(offer.offer, member.name, lease)), plan

    grant(state, member, "adopt", version, command, buffers)
    state.weights.outdated.pop(member.name, None)


def _holder_on_host(
    state: ControllerState, member: Member, version: int, offer: PublishedOffer | None
) -> Member | None:
    """Return a rollout on the host of `member` that should offer `version` to it, or None when none should.

    It takes a copy in the memory of that host, and spares the network a transfer from another host. `offer` is the
    nearest so far.
    """
    if offer is not None and offer.host == member.host:
        return None
    return _able_to_offer(state, version, state.weights.holders.get((version, member.host), {}))


def _find_holder(state: ControllerState, version: int) -> None:
    """Have any holder of `version` offer it again, when no replica does."""
    replicas = state.replicas
    if replicas.leases.has("publish"):
        return
    if version == state.version and replicas.policies_have_devices():
        for member in replicas.current_policies(version):
            if member.can_offer and not replicas.leases.num(member.name, "train"):
                _request_offer(state, member, version)
                return
    for host in sorted(host for held, host in state.weights.holders if held == version):
        holder = _able_to_offer(state, version, state.weights.holders[version, host])
        if holder is not None:
            _request_offer(state, holder, version)
            return


def _able_to_offer(state: ControllerState, version: int, names: dict[str, None]) -> Member | None:
    replicas = state.replicas
    if version not in state.weights.roots:  # no policy has vouched for it: without one, rollouts read it from a folder
        return None
    for name in names:
        member = replicas.membership.members[name]
        can_offer = replicas.sharing.has_devices(member) and member.can_offer
        if can_offer and state.weights.may_try(name, state.now) and not replicas.leases.num(name, "adopt"):
            return member
    return None


def on_adopted(state: ControllerState, member: Member, lease: Lease, message: wire.WeightsAdopted) -> None:
    """Note that a replica switched. It holds the version only if it has proven the root of an offer."""
    source = source_of(lease)
    # An older version than the newest was proven by the rollout against its own offer, and checked here when newest.
    proven = lease_subject(lease.id) == str(message.version) and (
        state.weights.is_root(message.version, message.root)
        or (member.role == "rollout" and state.weights.is_vouched_for(message.version, message.root, source))
    )
    state.outbox.note(
        "adopted",
        replica=member.name,
        version=message.version,
        attested=proven,
        root=message.root,
        pull_s=message.pull_s,
        pause_s=message.pause_s,
        size_bytes=message.size_bytes,
        sent_bytes=message.sent_bytes,
        transport=message.transport,
        lanes=message.lanes,
        split=message.split,
        mode=message.mode,
        recomputed_tokens=message.recomputed_tokens,
        drain_s=message.drain_s,
    )
    if proven:
        state.weights.failing_since.pop(member.name, None)
        del state.weights.num_bad_pulls[source]
    else:
        note_bad_pull(state, source)
    if proven and member.role == "policy":
        member.version = message.version
        state.dirty = Dirty.ALL
    elif proven:
        state.replicas.membership.prove(member, message.version)
        record = VersionAdopted(name=member.name, epoch=member.incarnation, version=message.version)
        state.outbox.write(record)
        set_held_version(state, member, message.version)
        if state.weights.outdated and member.can_offer:
            state.dirty |= Dirty.ADOPT  # for rollouts that wait for an offer
    elif member.role == "policy":
        evict(state, member, f"{member.name} does not hold version {message.version} bit for bit after adopting it")
    else:
        # It generates with weights that were never published: it gets no work until it has adopted a published version.
        take_back_groups(state, member)
        state.weights.back_off(member.name, state.now)
        set_held_version(state, member, -1)


def source_of(lease: Lease) -> str:
    """Return the replica that a pull is from; empty for one of an earlier incarnation of the controller."""
    message = lease.send.message if lease.send is not None else None
    return message.source if isinstance(message, wire.AdoptWeights) else ""


def note_bad_pull(state: ControllerState, source: str) -> None:
    """Count a pull that failed, or brought other weights. A rollout that several such pulls were from offers no more.

    It stays a member, because the destinations may be at fault.
    """
    member = state.replicas.membership.members.get(source)
    if member is None or member.role != "rollout":
        return
    state.weights.num_bad_pulls[source] += 1
    if state.weights.num_bad_pulls[source] >= MAX_BAD_PULLS:
        member.can_offer = False
        state.weights.withdraw(source)
        reason = f"{MAX_BAD_PULLS} pulls in a row from {source} did not bring the version that it offers"
        state.outbox.note("offers_no_more", replica=source, reason=reason)


# --- policies ---------------------------------------------------------------------------------------------------------


def catch_up(state: ControllerState) -> None:
    """Bring outdated policies to the newest version: from another policy, or step by step from the journal."""
    replicas = state.replicas
    outdated = replicas.outdated_policies(state.version)
    if not outdated or not replicas.policies_have_devices():
        return
    current = replicas.current_policies(state.version)
    for member in outdated:
        if replicas.leases.num(member.name, "adopt") or replicas.leases.num(member.name, "train"):
            continue
        if current and state.weights.may_try(member.name, state.now):
            offer = state.weights.source(member, state.version, with_state=True)
            if offer is not None:
                _pull(state, member, offer, with_state=True)
            else:
                _offer_to_policies(state, current)
    if not current:
        leader = max(outdated, key=lambda member: (member.version, member.name))
        if not replicas.leases.num(leader.name, "train") and not replicas.leases.num(leader.name, "adopt"):
            _replay(state, leader, leader.version + 1)


def _offer_to_policies(state: ControllerState, current: list[Member]) -> None:
    leases = state.replicas.leases
    if not any(leases.num(member.name, "publish") for member in current):
        idle = [member for member in current if not leases.num(member.name, "train")]
        if idle:
            _request_offer(state, idle[0], state.version)


def _replay(state: ControllerState, policy: Member, step: int) -> None:
    """Have a policy make `step` again, from the groups that the journal has of it."""
    if step <= state.training.saved.previous:
        evict(state, policy, _too_old(state, policy))
    elif step <= state.plan.num_supervised_steps:
        redispatch(state, policy, step, [])
    elif (groups := take_fetched(state, step)) is not None:
        if len(groups) == state.plan.prompts_per_step:
            redispatch(state, policy, step, groups)
            return
        state.lifecycle.fail(
            f"{policy.name} begins at version {policy.version}, and the journal no longer has the groups of step "
            f"{step}; start the policy from the newest saved state of this run",
            state.now,
        )
    else:
        fetch_step(state, step)


def _too_old(state: ControllerState, policy: Member) -> str:
    """Return why a policy of this version cannot be brought up to date from the journal."""
    return (
        f"{policy.name} is at version {policy.version}, and the journal keeps only the steps after version "
        f"{state.training.saved.previous}, which has a saved state; start it again where it finds that state"
    )
