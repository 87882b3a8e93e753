"""Replicas that hold up the run although they keep to the protocol: they are evicted, or get no work for a while.

What is counted against replicas is noted in `conduct.py` and `blame.py`, and here it is looked at, at each tick.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from starling.common.ids import Role
from starling.controller.core.groups.filtering import SIDES
from starling.controller.core.records import FilterCountReset
from starling.controller.core.replicas.conduct import note_invalid
from starling.controller.core.replicas.departure import evict
from starling.controller.core.replicas.membership import Conduct, Member
from starling.controller.core.state import ControllerState

SCORERS: Final[tuple[Role, ...]] = ("reward", "teacher")
CULPRIT_SHARE: Final = 0.75
"""Share of the groups that were discarded, or filtered out, in a row, from which on one replica is at fault."""
SET_ASIDE_S: Final = 300.0
"""How long a replica gets no work whose groups are filtered out, or which a single scorer cannot score."""


def evict_culprit(state: ControllerState) -> None:
    """Evict the replica that led to nearly all groups that were discarded in a row, if another one has its role.

    Otherwise one replica that fails whatever it is given, and fails it fast, would end the run. A few of the groups may
    be of others: they too fail a prompt now and then. A rollout that only one scorer speaks against is set aside.
    """
    buffer, num = state.buffer, state.buffer.num_discarded_in_a_row
    if num < state.plan.max_discarded:
        return
    # A scorer that fails may be at fault, or the completions that it was given.
    generators, scorers = buffer.discarded_by["rollout"], buffer.discarded_by["answer"]
    suspects = sorted((scorers, generators), key=lambda names: _share_used(state, _greatest_share(names)[0]))
    scorer = _greatest_share(scorers)[0]
    fails_alone = _fails_alone(state, _greatest_share(generators)[0], scorer)
    member = state.replicas.membership.members.get(scorer)
    if fails_alone and member is not None and state.replicas.membership.has_another(member):
        suspects = [scorers]
    for names in suspects:
        on_one_word = fails_alone and names is generators
        act = _set_aside_if_culprit if on_one_word else _evict_if_culprit
        if act(state, names, f"{num} groups that were discarded in a row"):
            buffer.note_not_discarded()
            return


def set_filtering_aside(state: ControllerState) -> None:
    """Give no work for a while to replicas whose groups are nearly all filtered out.

    They are neither evicted nor counted. Groups are filtered out by honest replicas, too, and whether a reward replica
    or its rollouts are at fault cannot be told for certain. A replica that led to three quarters of a long row may
    leave so few groups to others that these cannot be compared; if that is so of a rollout and of a reward replica, the
    latter is set aside, and others score the same rollout.
    """
    filtering, membership = state.buffer.filtering, state.replicas.membership
    if filtering.num_in_a_row >= state.plan.max_filtered:
        for role in reversed(SIDES):
            name, share = _greatest_share(filtering.in_a_row_of(role))
            reason = f"it led to {share:.0%} of {filtering.num_in_a_row} groups in a row that were filtered out"
            if share >= CULPRIT_SHARE and _set_aside_for_filtering(state, name, reason):
                break
    if filtering.counts.is_due(state.now):
        for role, counterpart in (SIDES, SIDES[::-1]):
            names = [member.name for member in membership.of(role)]
            found = filtering.counts.culprit(role, names, membership.num(counterpart), without_best=True)
            if found is not None:
                _set_aside_for_filtering(state, found[0], f"{found[1]} that it had to do with were filtered out")


def _set_aside_for_filtering(state: ControllerState, name: str, reason: str) -> bool:
    """Set a replica aside, if possible, and count its filtered groups anew."""
    if not _set_aside(state, name, reason):
        return False
    state.buffer.filtering.forget(name)
    state.outbox.write(FilterCountReset(name=name))
    return True


def _set_aside(state: ControllerState, name: str, reason: str) -> bool:
    """Give a replica no work for a while, unless none of its role would be left."""
    replicas, until = state.replicas, state.now + SET_ASIDE_S
    member = replicas.membership.members.get(name)
    if member is None or replicas.membership.is_set_aside(name, state.now):
        return False
    if not replicas.membership.works_without(name, state.now):
        return False
    replicas.membership.set_aside[name] = until
    state.outbox.note("set_aside", replica=name, reason=reason, seconds=SET_ASIDE_S)
    replicas.slots.cool_down(member, until)
    return True


def evict_unable(state: ControllerState) -> None:
    """Evict and count replicas with far more groups that could not be scored than others of their role.

    Both sides of a pair are looked at: a scorer may be unable, and what a rollout generates impossible to score. A
    scorer that is alone may lie about a rollout, which is then only set aside.
    """
    membership = state.replicas.membership
    for scorers, unscored in membership.unscored.items():
        if not unscored.is_due(state.now):
            continue
        sides: tuple[tuple[Role, Role], ...] = (("rollout", scorers), (scorers, "rollout"))
        for role, counterpart in sides:
            present = {member.name: member for member in membership.of(role)}
            found = unscored.culprit(role, present, membership.num(counterpart), without_best=False)
            if found is not None and len(present) > 1:
                name, how_many = found
                reason = f"{name} had to do with {how_many} that could not be scored"
                if role == "rollout" and membership.num(scorers) == 1:
                    if _set_aside(state, name, reason):
                        unscored.forget(name)
                    continue
                unscored.forget(name)
                note_invalid(state, name, reason)
                evict(state, present[name], reason)


def _share_used(state: ControllerState, name: str) -> float:
    """Return which share of the groups that a replica had to do with were of use."""
    conduct = state.replicas.membership.conduct[name] if name else Conduct()
    return conduct.num_used / max(1, conduct.num_used + conduct.num_spoiled)


def _greatest_share(names: Counter[str]) -> tuple[str, float]:
    """Return the replica that led to the most of some groups, and to which share of them."""
    [(name, num)] = names.most_common(1) or [("", 0)]
    return name, num / max(1, names.total())


def _set_aside_if_culprit(state: ControllerState, names: Counter[str], groups: str) -> bool:
    """Set aside the one of `names` that led to nearly all `groups`. True also if it is: groups that it had follow."""
    name, share = _greatest_share(names)
    if share < CULPRIT_SHARE:
        return False
    reason = f"{name} led to {share:.0%} of {groups}, and no other scorer failed them"
    return state.replicas.membership.is_set_aside(name, state.now) or _set_aside(state, name, reason)


def _evict_if_culprit(state: ControllerState, names: Counter[str], groups: str) -> bool:
    """Evict and count the one of `names` that led to nearly all `groups`, if another replica has its role."""
    name, share = _greatest_share(names)
    membership = state.replicas.membership
    member = membership.members.get(name)
    if share < CULPRIT_SHARE or not name or (member is not None and not membership.has_another(member)):
        return False
    reason = f"{name} led to {'all' if share == 1 else f'{share:.0%}'} of {groups}"
    note_invalid(state, name, reason)
    if member is not None:
        evict(state, member, reason)
    return True


def evict_useless(state: ControllerState) -> None:
    """Evict replicas that keep groups and give no result, or spoil more than others can use, if others do better.

    Otherwise one replica could hold up the run: with results that only the policy can refuse, or with none.
    """
    membership = state.replicas.membership
    for name, conduct in list(membership.conduct.items()):
        member = membership.members.get(name)
        if member is None or not (conduct.is_idle or _spoils(state, member, conduct)):
            continue
        if conduct.is_idle:
            conduct.is_idle = False  # it is counted already
            if membership.has_another(member):
                evict(state, member, f"{name} keeps groups and gives no result")
            continue
        others = [membership.conduct[one.name] for one in membership.of(member.role) if one is not member]
        if any(one.num_used > one.num_spoiled for one in others):  # else the prompts or the scorers may be at fault
            excess, conduct.excess = conduct.excess, 0
            reason = f"{name} led to {excess} more groups that were thrown away than to groups with rewards"
            note_invalid(state, name, reason)
            evict(state, member, reason)


def _spoils(state: ControllerState, member: Member, conduct: Conduct) -> bool:
    """Say whether a replica spoils more groups than it is of use to; of a scorer, `evict_unable` decides that."""
    return conduct.excess >= state.plan.max_discarded and member.role not in SCORERS


def _fails_alone(state: ControllerState, generator: str, scorer: str) -> bool:
    """Say whether `scorer`, present or not, is a scorer, and no other one fails what `generator` has generated."""
    unscored = state.replicas.membership.unscored
    return any(scorer.rpartition("-")[0] == role and unscored[role].fails_alone(generator, scorer) for role in SCORERS)
