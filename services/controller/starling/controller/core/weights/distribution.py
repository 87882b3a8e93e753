"""Distribution of weights: versions are published, rollouts adopt them, and outdated policies catch up.

Stops 9 and 10 of the walk.
"""

from __future__ import annotations

from itertools import islice
from typing import Final, TypeVar

from starling.common.errors import WeightsError
from starling.common.ids import lease_subject, whole_number
from starling.common.wire import messages as wire
from starling.controller.core.dirty import Dirty
from starling.controller.core.events import Buffers, Received
from starling.controller.core.groups.files import fetch_step, take_fetched
from starling.controller.core.records import VersionAdopted, VersionPublished
from starling.controller.core.replicas.assignments import grant, take_back_groups
from starling.controller.core.replicas.conduct import check_slow_offer, note_invalid, note_offered
from starling.controller.core.replicas.departure import distrust, evict
from starling.controller.core.replicas.leases import Lease
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState
from starling.controller.core.training.dispatch import redispatch
from starling.controller.core.weights.accusations import accuse, judge, note_good_pull
from starling.controller.core.weights.pairs import noted_pairs
from starling.controller.core.weights.plans import LayoutPair
from starling.controller.core.weights.publications import MAX_FAILED_ADOPTIONS, PublishedOffer
from starling.controller.core.weights.relays import ChainKey, RelayedOffer
from starling.controller.core.weights.versions import (
    check_outdated,
    is_publication_due,
    set_held_version,
    target_version,
)
from starling.weightsync.offers.offer import decode_offer
from starling.weightsync.offers.tickets import SPENT, offer_for
from starling.weightsync.plan.layout import encode
from starling.weightsync.transports.endpoints import check_offered_transports

MAX_OFFER_BYTES: Final = 4 << 20
"""An offer has some 250 bytes for each rank, of which a layout has at most 4,096; a MiB takes 70 ms to decode."""
MAX_MEASURED: Final = 1 << 62
"""Largest number of bytes, tokens or seconds that a replica may report of an adoption."""
Number = TypeVar("Number", int, float)
MAX_LISTED: Final = 64
"""Lanes, and parts of the time of a pull, that are noted. A replica may send any number."""


# --- publication ------------------------------------------------------------------------------------------------------


def publish(state: ControllerState) -> None:
    """Have a policy offer a version that rollouts need."""
    version, replicas = state.weights_version, state.replicas
    if not is_publication_due(state) or replicas.is_policy_publishing() or not replicas.policies_have_devices():
        return
    for member in replicas.current_policies(version):
        if not replicas.leases.num(member.name, "train"):
            state.weights.requested = version
            _request_offer(state, member, version)
            return


def _request_offer(state: ControllerState, member: Member, version: int) -> None:
    """Have a replica offer the version that it holds; a policy also computes the layout roots of the rollouts."""
    plans = dict[str, bytes]()
    if member.role == "policy" and member.layout is not None:
        rollouts = state.replicas.membership.adopters()
        plans = state.weights.root_plans(member.layout, (one.layout for one in rollouts if one.layout is not None))

    def command(lease: str) -> wire.PublishWeights:
        return wire.PublishWeights(lease=lease, version=version, layouts=tuple(plans))

    grant(state, member, "publish", version, command, tuple(plans.values()))


def on_published(
    state: ControllerState, member: Member, lease: Lease, message: wire.WeightsPublished, event: Received
) -> None:
    """Add an offer; one of a policy of a new version frees the slots of the steps that made it."""
    state.dirty = Dirty.ALL
    before = state.weights.version
    try:
        if lease_subject(lease.id) != str(message.version):
            raise WeightsError(f"Version {message.version} came in answer to {lease.id}.")
        if member.role == "rollout" and (member.version != message.version or not member.can_offer):
            return  # it has adopted another version since it was asked, or may no longer offer
        if member.role == "rollout":
            _check_transports(state, event.buffers[0])
        note_offered(state, member, lease)
        root, is_new = state.weights.publish(member, message.version, event.buffers[0], message.layout_roots)
        state.weights.note_success(member.name)
    except WeightsError as error:
        _offer_failed(state, member, f"the offer of version {message.version} by {member.name} is not usable: {error}")
        return
    if is_new:
        record = VersionPublished(version=message.version, root=root, layout_roots=message.layout_roots)
        state.outbox.write(record)
    if message.version <= before:
        state.outbox.note("offered", replica=member.name, version=message.version)
        return
    state.weights.published_at = state.now
    for step in range(before + 1, message.version + 1):
        state.buffer.retire(step)
    for rollout in state.replicas.membership.adopters():
        check_outdated(state, rollout)
    state.outbox.note("published", version=message.version, publish_s=message.publish_s, offer_s=message.offer_s)


def _check_transports(state: ControllerState, encoded: bytes) -> None:
    """Check that the offer of a rollout is not too large, and that its readers open only what the run allows.

    Raises:
        WeightsError: it would, or it cannot be decoded.
    """
    if len(encoded) > MAX_OFFER_BYTES:
        raise WeightsError(f"It has {len(encoded)} bytes, and {MAX_OFFER_BYTES} are allowed.")
    plan = state.plan
    check_offered_transports(decode_offer(encoded), plan.rollout_transport, plan.host, encrypt=plan.encrypt_weights)


def _offer_failed(state: ControllerState, member: Member, reason: str) -> None:
    """Handle an offer that cannot be used. A rollout is not needed for offers, and another policy can offer instead."""
    if member.role == "policy" and state.replicas.membership.num("policy") == 1:
        state.lifecycle.fail(reason, state.now)
    else:
        note_invalid(state, member.name, reason)
        evict(state, member, reason)


# --- adoption ---------------------------------------------------------------------------------------------------------


def adopt(state: ControllerState) -> None:
    """Have every outdated rollout pull the version that it should hold."""
    unavailable, busy = set[tuple[int, bool, str]](), set[ChainKey]()
    for name in list(state.weights.outdated):
        member = state.replicas.membership.members.get(name)
        if member is None:
            continue  # it was evicted meanwhile
        version = target_version(state, member)
        policies_only = _of_policies_only(state, member, version)
        wanted = version, policies_only, state.weights.plans.key(state.weights.policy_layout, member.layout)
        if wanted in unavailable or not state.weights.may_try(name, state.now):
            continue
        if policies_only and state.plan.fans_out:  # for those that join later, perhaps when the policy is gone
            _request_layout_roots(state, member, version)
        offer = state.weights.source(member, version, of_policies_only=policies_only)
        if not state.replicas.sharing.has_devices(member):  # it pulls when it wakes; an offer is arranged now
            if offer is None:
                _find_holder(state, member, version, policies_only=policies_only)
                unavailable.add(wanted)
            continue
        if offer is not None and not policies_only and (chain := _chain(state, member, offer)) is not None:
            relay = state.weights.relays.choose(member, chain)
            if relay is not None or (chain not in busy and not state.weights.relays.is_expected(chain, state.now)):
                _pull(state, member, offer, chain=chain, relay=relay)
            else:
                busy.add(chain)
            continue
        nearer = _holder_on_host(state, member, version, offer, policies_only=policies_only)
        if nearer is not None:
            if not state.replicas.leases.num(nearer.name, "publish"):
                _request_offer(state, nearer, version)
            else:
                check_slow_offer(state, nearer)
        elif offer is not None:
            _pull(state, member, offer)
        else:
            _find_holder(state, member, version, policies_only=policies_only)
            unavailable.add(wanted)  # for all rollouts of this layout that wait for it


def _chain(state: ControllerState, member: Member, offer: PublishedOffer) -> ChainKey | None:
    """Return the chain of relays by which a rollout gets the version of `offer`; None to pull straight from there.

    Straight from a policy on its host, from a rollout where no policy offers, and what is small; and again, when what a
    relay sent was not what was published.
    """
    weights = state.weights
    is_near = offer.host == member.host or not offer.is_policy
    if is_near or member.layout is None or weights.policy_layout is None or state.plan.rollout_transport == "local":
        return None
    try:
        pair = weights.plans.pair(weights.policy_layout, member.layout)
    except WeightsError:  # the pull finds it out, too
        return None
    is_small = pair.size_bytes < weights.plans.relay_from_bytes
    return None if is_small or weights.relays.avoided.get(member.name) == offer.version else (offer.version, pair.key)


def _of_policies_only(state: ControllerState, member: Member, version: int) -> bool:
    """Say whether `member` may pull `version` from policies only.

    If it is a policy: rollouts have no optimizer state. If it is a rollout: because it could not prove what a rollout
    sends, or because it has already accused one.
    """
    membership = state.replicas.membership
    return member.role == "policy" or member.name in membership.accusers or not state.weights.can_prove(member, version)


def find_source(state: ControllerState, member: Member, version: int) -> PublishedOffer | None:
    """Return the offer that `member` should pull from."""
    return state.weights.source(member, version, of_policies_only=_of_policies_only(state, member, version))


def _pull(
    state: ControllerState,
    member: Member,
    offer: PublishedOffer,
    *,
    chain: ChainKey | None = None,
    relay: RelayedOffer | None = None,
) -> None:
    """Have `member` pull the version of `offer`.

    `chain`: it is to serve what it pulls to others; `relay`: it reads from there instead, as long as that answers.
    """
    version, relays = offer.version, state.weights.relays
    source = state.replicas.membership.members[offer.holder]
    try:
        pair, of_policy = _pairs_of_pull(state, source, member)
    except WeightsError as error:
        evict(state, member, str(error))  # no plan from a policy: a rollout offers only to readers to which it has one
        return
    is_rollout = source.role == "rollout"
    key, plans = of_policy.key, (pair.plan, of_policy.plan) if is_rollout else (pair.plan,)
    layout_roots = () if member.role == "policy" else state.weights.known_layout_roots(version, key)

    def command(lease: str) -> wire.AdoptWeights:
        return wire.AdoptWeights(
            lease=lease,
            version=version,
            source=source.name,
            peer=source.peer if member.role == "policy" else "",
            layout=key,
            layout_roots=layout_roots,
            has_root_plan=is_rollout,
            relays=() if relay is None else (relay.holder,),
            announce=chain is not None and member.may_relay,
        )

    def buffers(lease: str) -> Buffers:
        offers = (offer.offer,) if relay is None else (offer.offer, relay.offer)
        tickets = (offer_for(one, member.name, lease, pair.most_bytes, member.incarnation) for one in offers)
        first, *others = map(encode, tickets)
        return first, *plans, *others

    if chain is not None:
        relays.begin(member, source.name, relay, chain if member.may_relay else None, state.now)
    else:
        relays.begin_directly(member.name)
    grant(state, member, "adopt", version, command, buffers)
    state.weights.outdated.pop(member.name, None)


def _pairs_of_pull(state: ControllerState, source: Member, reader: Member) -> tuple[LayoutPair, LayoutPair]:
    """Return the layouts of a pull with its plan, and those of the same pull from a policy, whose boxes are proven.

    Both are the same unless the source is a rollout.

    Raises:
        WeightsError: there is no plan.
    """
    assert source.layout is not None, "a replica that offers weights joined with its layout"
    assert reader.layout is not None, "a replica that holds weights joined with its layout"
    weights = state.weights
    origin = source.layout if source.role == "policy" else weights.policy_layout
    assert origin is not None, "a rollout may prove a version only by the layout of a policy"
    of_policy = weights.plans.pair(origin, reader.layout)
    return (of_policy if origin is source.layout else weights.plans.pair(source.layout, reader.layout)), of_policy


def on_relay_offered(state: ControllerState, member: Member, message: wire.RelayOffered, event: Received) -> None:
    """Note that a rollout serves the version that it pulls; once for each pull that is to be announced."""
    lease, weights = state.replicas.leases.get(message.lease), state.weights
    command = _command_of(lease) if lease is not None and lease.peer == member.name else None
    if command is None or member.layout is None:
        return  # the pull is over, or an earlier incarnation of the controller asked for it
    chain = command.version, command.layout
    if message.version != command.version or not weights.relays.expects(chain, member.name):
        return
    state.dirty |= Dirty.ADOPT
    if message.problem or not member.may_relay:
        weights.relays.renounce(chain, member.name)
        return
    try:
        _check_transports(state, event.buffers[0])
        offer = decode_offer(event.buffers[0])
        if offer.version != message.version:
            raise WeightsError(f"It is of version {offer.version}.")
        if len(offer.ranks) != len(member.layout.ranks):
            raise WeightsError(f"It has {len(offer.ranks)} ranks, and the layout {len(member.layout.ranks)}.")
    except WeightsError as error:
        weights.relays.renounce(chain, member.name)
        _offer_failed(state, member, f"what {member.name} relays of version {message.version} is not usable: {error}")
        return
    weights.relays.announce(member, chain, message.lease, offer)


def _holder_on_host(
    state: ControllerState, member: Member, version: int, offer: PublishedOffer | None, *, policies_only: bool
) -> Member | None:
    """Return a rollout on the host of `member` that should offer `version` to it, or None when none should.

    It takes a copy in the memory of that host, and spares the network a transfer from another host. `offer` is the
    nearest so far.
    """
    if offer is not None and offer.host == member.host:
        return None
    names = state.weights.holders.get((version, member.host))
    holder = _able_to_offer(state, version, names, None if policies_only else member) if names else None
    if holder is None or not policies_only:
        return holder
    _request_layout_roots(state, member, version)  # for the next one: this one does not wait
    return None


def _request_layout_roots(state: ControllerState, rollout: Member, version: int) -> None:
    """Have a policy compute the layout roots of rollouts that joined since it published, while it has the version.

    Only once for the layout of `rollout`: a policy may be unable to compute its root. Not for one that pulls from
    policies because it has accused another rollout.
    """
    replicas, weights = state.replicas, state.weights
    if rollout.name in replicas.membership.accusers:
        return
    if version != state.weights_version or replicas.is_policy_publishing() or not replicas.policies_have_devices():
        return
    for member in replicas.current_policies(version):
        if not replicas.leases.num(member.name, "train"):
            if weights.request_layout_root(version, weights.plans.key(weights.policy_layout, rollout.layout)):
                _request_offer(state, member, version)
            return


def _find_holder(state: ControllerState, reader: Member, version: int, *, policies_only: bool) -> None:
    """Have any holder of `version` offer it again, when no replica does from which `reader` may pull."""
    replicas = state.replicas
    if replicas.is_policy_publishing() or _awaits_offer_of_rollout(state):
        return
    if version == state.weights_version and replicas.policies_have_devices():
        for member in replicas.current_policies(version):
            if member.can_offer and not replicas.leases.num(member.name, "train"):
                _request_offer(state, member, version)
                return
    if policies_only:
        return
    for host in sorted(host for held, host in state.weights.holders if held == version):
        holder = _able_to_offer(state, version, state.weights.holders[version, host], reader)
        if holder is not None:
            _request_offer(state, holder, version)
            return


def _awaits_offer_of_rollout(state: ControllerState) -> bool:
    """Say whether a rollout that was told to offer weights may still do so. One that takes long is waited for no more.

    Only a policy or another rollout then ends the wait of the others.
    """
    replicas = state.replicas
    if not replicas.leases.has("publish"):
        return False
    told = [one for one in replicas.membership.adopters() if replicas.leases.num(one.name, "publish")]
    for rollout in told:
        check_slow_offer(state, rollout)
    return any(rollout.can_offer for rollout in told)


def _able_to_offer(
    state: ControllerState, version: int, names: dict[str, None], reader: Member | None
) -> Member | None:
    """Return one of the holders of `version` that can offer it, and from which there is a plan to `reader` if given."""
    replicas = state.replicas
    if version not in state.weights.roots:  # no policy has vouched for it: without one, rollouts read it from a folder
        return None
    for name in names:
        member = replicas.membership.members[name]
        can_offer = replicas.sharing.has_devices(member) and member.can_offer
        if not can_offer or not state.weights.may_try(name, state.now) or replicas.leases.num(name, "adopt"):
            continue
        if reader is None or state.weights.plans.exists(member.layout, reader.layout):
            return member
    return None


def on_adopted(state: ControllerState, member: Member, lease: Lease, message: wire.WeightsAdopted) -> None:
    """Note that a replica switched. It holds the version only if it has proven a root that a policy computed."""
    source = source_of(lease)
    state.weights.relays.end_pull(member.name)
    proven = lease_subject(lease.id) == str(message.version) and _is_proven(state, member, lease, message)
    state.outbox.note(
        "adopted",
        replica=member.name,
        version=message.version,
        attested=proven,
        source=source,
        root=message.root,
        pull_s=_within_range(message.pull_s),
        pause_s=_within_range(message.pause_s),
        size_bytes=_within_range(message.size_bytes),
        sent_bytes=_within_range(message.sent_bytes),
        transport=message.transport,
        lanes=message.lanes[:MAX_LISTED],
        split={name: _within_range(seconds) for name, seconds in islice(message.split.items(), MAX_LISTED)},
        mode=message.mode,
        recomputed_tokens=_within_range(message.recomputed_tokens),
        drain_s=_within_range(message.drain_s),
        **noted_pairs(state, member, _command_of(lease), message),
    )
    if proven:
        state.weights.note_success(member.name)
        note_good_pull(state, source, member.name)
    if member.role == "rollout":
        judge(state, member, source, message.version, proven=proven)
    if proven and member.role == "policy":
        member.version = message.version
        state.dirty = Dirty.ALL
    elif proven:
        state.replicas.membership.prove(member, message.version)
        record = VersionAdopted(name=member.name, epoch=member.incarnation, version=message.version)
        state.outbox.write(record)
        set_held_version(state, member, message.version)
    elif member.role == "policy":
        evict(state, member, f"{member.name} does not hold version {message.version} bit for bit after adopting it")
    else:
        # It generates with weights that were never published: it gets no work until it has adopted a published version.
        take_back_groups(state, member, is_counted=source.startswith("policy-"))
        set_held_version(state, member, -1)
        note_failed_adoption(state, member, lease, "it holds something else than was published")
    for reader in state.weights.relays.decide(member.name, lease.id, proven=proven):
        accuse(state, reader, member, message.version)


def _within_range(measured: Number) -> Number:
    """Return a measurement of a replica, as far as it can be one: no number is negative or infinite, or not a number.

    A line of metrics.jsonl with another would be no JSON, and means would be wrong.
    """
    if 0 <= measured <= MAX_MEASURED:
        return measured
    return type(measured)(MAX_MEASURED if measured > 0 else 0)  # NaN is 0


def note_failed_adoption(state: ControllerState, rollout: Member, lease: Lease, reason: str) -> None:
    """Let a rollout wait before it adopts again. One that fails again and again, where others do not, is useless.

    Where all fail, the policy or the network may be at fault: they wait, and `starling why` gives the reason. A pull
    from another rollout does not count: that rollout offers no more if others fail too. Nor does one that has read what
    its tickets allow: it would fail until the next version, and another incarnation may read as much again.
    """
    if not source_of(lease).startswith("policy-"):
        state.weights.wait(rollout.name, state.now)
        return
    version = whole_number(lease_subject(lease.id))
    if SPENT in reason:  # by pulls that succeeded, perhaps: its engine may have been lost each time
        evict(state, rollout, f"{rollout.name} must be started again to pull version {version} once more: it {SPENT}")
        return
    num = state.weights.back_off(rollout.name, state.now, reason)
    others = (one for one in state.replicas.membership.adopters() if one is not rollout)
    if num >= MAX_FAILED_ADOPTIONS and any(one.version >= version for one in others):
        distrust(
            state,
            rollout,
            f"{rollout.name} failed to adopt {num} times in a row, and others hold version {version}: {reason}",
        )


def _is_proven(state: ControllerState, member: Member, lease: Lease, message: wire.WeightsAdopted) -> bool:
    """Say whether a replica has proven to hold a version.

    By its layout root, which does not depend on the source. Only where policies have computed none, by the root that
    the offer of a policy had: that root says no more than that the replica holds what its source sent, so it proves
    nothing about a pull from a rollout, which can copy the root.
    """
    weights, version, command = state.weights, message.version, _command_of(lease)
    if member.role == "policy":
        return weights.is_root(version, message.root)
    # What the replica says of the command counts after a restart of the controller: a false word is at its own cost.
    source, key = (source_of(lease), command.layout) if command is not None else (message.source, message.layout)
    known = weights.known_layout_roots(version, key)
    if known:
        return message.layout_root in known
    return source.startswith("policy-") and weights.is_root(version, message.root)


def source_of(lease: Lease) -> str:
    """Return the replica that a pull is from, the relay if there is one; empty for one of an earlier incarnation of the
    controller."""
    command = _command_of(lease)
    if command is None:
        return ""
    return command.relays[0] if command.relays else command.source


def _command_of(lease: Lease) -> wire.AdoptWeights | None:
    """Return the command of an adoption; None if an earlier incarnation of the controller sent it."""
    message = lease.send.message if lease.send is not None else None
    return message if isinstance(message, wire.AdoptWeights) else None


# --- policies ---------------------------------------------------------------------------------------------------------


def catch_up(state: ControllerState) -> None:
    """Bring outdated policies to the newest version: from another policy, or step by step from the journal.

    A policy copies the present state of another one, which therefore has to be between two steps.
    """
    replicas = state.replicas
    outdated = replicas.outdated_policies(state.weights_version)
    if not outdated or not replicas.policies_have_devices():
        return
    current = replicas.current_policies(state.version)
    for member in outdated:
        if replicas.leases.num(member.name, "adopt") or replicas.leases.num(member.name, "train"):
            continue
        if current and state.training.step is None and state.weights.may_try(member.name, state.now):
            offer = find_source(state, member, state.version)
            if offer is not None:
                _pull(state, member, offer)
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
