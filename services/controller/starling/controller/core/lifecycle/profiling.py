"""Profiles of processes at an operator's request: orders to the replicas, and their reports, which heartbeats carry.

An order that a replica does not report is sent again at its next heartbeats. Nothing is decided on what it reports.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from starling.common.counts import counted
from starling.common.observe.profiling.limits import order_problem
from starling.common.observe.terminal import one_line
from starling.common.wire import messages as wire
from starling.controller.core.events import ProfileSelf
from starling.controller.core.lifecycle.profiles import WRITE_S, RunProfile
from starling.controller.core.lifecycle.stages import RunStage
from starling.controller.core.replicas.membership import Member
from starling.controller.core.state import ControllerState

CONTROLLER: Final = "controller"
MAX_TARGETS: Final = 256
MAX_TEXT: Final = 1024
"""Characters of each text of a report that are kept."""
MAX_FILES: Final = 256
"""File names of a report that are kept."""


def request_profile(state: ControllerState, request: wire.RequestProfile) -> tuple[str, dict[str, Any]]:
    """Start a profile, or say how far it is if it was started before. Raises ValueError if it cannot be taken."""
    newest = state.profiles.newest
    if newest is None or newest.request.request != request.request:
        _check(state, request)
        newest = state.profiles.newest = RunProfile(request, state.now + request.limit_s + WRITE_S)
        for name in request.targets:
            _order(state, newest, name)
        state.outbox.note("profile", profile=request.request, targets=list(request.targets))
    _give_up(state, newest)
    return _shown(newest)


def _check(state: ControllerState, request: wire.RequestProfile) -> None:
    """Raise ValueError if this profile cannot be taken now."""
    before = state.profiles.newest
    if before is not None:
        _give_up(state, before)
        if waiting := before.waiting():
            left_s = max(0.0, before.deadline - state.now)
            raise ValueError(
                f"another profile is being taken of {', '.join(waiting)}, for at most {left_s:.0f} s; try again when "
                "it has ended"
            )
    if state.lifecycle.stage is not RunStage.RUNNING:
        raise ValueError("the run is ending; nothing more is profiled")
    if not 0 < len(request.targets) <= MAX_TARGETS or len(set(request.targets)) < len(request.targets):
        raise ValueError(
            f"{counted(len(request.targets), 'process', 'processes')} cannot be profiled: name 1 to {MAX_TARGETS}, "
            "each once"
        )
    members = state.replicas.membership.members
    for name in request.targets:
        if name != CONTROLLER and name not in members:
            raise ValueError(f"{name} is not in the run; it has {', '.join([CONTROLLER, *sorted(members)])}")
    if problem := order_problem(order_of(request)):
        raise ValueError(problem)


def order_of(request: wire.RequestProfile) -> wire.Profile:
    """Return the order to a process."""
    return wire.Profile(
        profile=request.request,
        num_steps=request.num_steps,
        seconds=request.seconds,
        num_groups=request.num_groups,
        limit_s=request.limit_s,
        ranks=request.ranks,
        memory=request.memory,
        flames=request.flames,
    )


def _order(state: ControllerState, profile: RunProfile, name: str) -> None:
    profile.sent_at[name] = state.now
    order = order_of(profile.request)
    if name == CONTROLLER:
        state.outbox.add(ProfileSelf(order))
    else:
        state.outbox.send(name, order)


def on_report(state: ControllerState, member: Member, report: wire.ProfileReport | None) -> None:
    """Note what the heartbeat of a replica reports of its newest profile; an order that it did not get goes again."""
    profile = state.profiles.newest
    if profile is None or member.name not in profile.waiting():
        return
    if report is not None and report.profile == profile.request.request:
        note_report(state, member.name, report)
    elif state.now < profile.deadline and state.now - profile.sent_at[member.name] > state.plan.heartbeat_s:
        _order(state, profile, member.name)


def note_report(state: ControllerState, name: str, report: wire.ProfileReport) -> None:
    """Keep a report of the newest profile, with short texts: a peer may send any."""
    profile = state.profiles.newest
    if profile is None or report.profile != profile.request.request or name not in profile.waiting():
        return
    profile.reports[name] = msgspec.structs.replace(
        report,
        text=one_line(report.text[:MAX_TEXT]),
        folder=one_line(report.folder[:MAX_TEXT]),
        files=tuple(one_line(file[:MAX_TEXT]) for file in report.files[:MAX_FILES]),
    )


def _give_up(state: ControllerState, profile: RunProfile) -> None:
    """Close the profiles of processes that have left, and of all that are silent after the deadline."""
    for name in profile.waiting():
        if name != CONTROLLER and name not in state.replicas.membership.members:
            profile.close(name, "it has left the run")
        elif state.now >= profile.deadline:
            profile.close(name, "it did not report the end of its profile in time")


def _shown(profile: RunProfile) -> tuple[str, dict[str, Any]]:
    waiting = profile.waiting()
    names = ", ".join(profile.request.targets)
    text = f"profiling {', '.join(waiting)}" if waiting else f"the profile of {names} has ended"
    none = wire.ProfileReport(profile=profile.request.request, state="active", text="it has not answered yet")
    reports = {name: msgspec.to_builtins(profile.reports.get(name, none)) for name in profile.request.targets}
    return text, {"profile": profile.request.request, "active": bool(waiting), "targets": reports}
