"""Profiles at an operator's request: orders to replicas, their reports, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from transcript import SMALL, Script

from starling.common.wire import messages as wire
from starling.controller.core.events import Profiled, ProfileSelf, Send
from starling.controller.core.lifecycle.profiles import WRITE_S

FIRST, SECOND = "1" * 32, "2" * 32


def running() -> Script:
    script = Script()
    script.start_run()
    return script


def ask(script: Script, request: str = FIRST, *targets: str, **fields: Any) -> wire.OperatorReply:
    script.receive("operator-0", wire.RequestProfile(request=request, targets=targets or ("policy-0",), **fields))
    return reply_of(script)


def reply_of(script: Script) -> wire.OperatorReply:
    replies = [one.message for one in script.commands if isinstance(one, Send) and one.peer == "operator-0"]
    assert len(replies) == 1
    assert isinstance(replies[0], wire.OperatorReply)
    return replies[0]


def orders(script: Script) -> list[str]:
    sent = [one.peer for one in script.commands if isinstance(one, Send) and isinstance(one.message, wire.Profile)]
    return [*sent, *("controller" for one in script.commands if isinstance(one, ProfileSelf))]


def report(script: Script, name: str, state: Any = "ended", *, profile: str = FIRST, **fields: Any) -> None:
    told = wire.ProfileReport(profile=profile, state=state, text=fields.pop("text", "5 spans"), **fields)
    script.receive(name, wire.Heartbeat(version=0, profile=told))


def test_profile_is_ordered_once_and_reported() -> None:
    script = running()
    reply = ask(script, FIRST, "policy-0", "controller", num_steps=2)
    assert reply.ok
    assert reply.data["active"]
    assert orders(script) == ["policy-0", "controller"]
    assert ask(script, FIRST, "policy-0", "controller", num_steps=2).data["active"]
    assert orders(script) == [], "a repeated request starts nothing"
    report(script, "policy-0", files=("policy-0.spans.json",), folder="/run/profiles/x")
    assert ask(script, FIRST, "policy-0", "controller").data["active"], "the controller's own is not ended"
    script.happens(Profiled(script.now, wire.ProfileReport(profile=FIRST, state="ended", text="3 spans")))
    reply = ask(script, FIRST, "policy-0", "controller")
    assert not reply.data["active"]
    targets = reply.data["targets"]
    assert targets["policy-0"]["files"] == ("policy-0.spans.json",)
    assert targets["controller"]["text"] == "3 spans"


def test_second_profile_is_refused_while_one_is_active() -> None:
    script = running()
    assert ask(script).ok
    refused = ask(script, SECOND)
    assert not refused.ok
    assert "another profile is being taken of policy-0, for at most" in refused.text
    report(script, "policy-0")
    assert ask(script, SECOND).ok


def test_order_is_sent_again_until_it_is_reported() -> None:
    script = running()
    ask(script)
    script.advance_time(2 * SMALL.heartbeat_s)
    script.receive("policy-0", wire.Heartbeat(version=0))
    assert orders(script) == ["policy-0"]
    script.advance_time(2 * SMALL.heartbeat_s)
    report(script, "policy-0", "active")
    assert orders(script) == []
    assert ask(script).data["active"]


def test_silent_and_departed_processes_are_given_up() -> None:
    script = running()
    ask(script, FIRST, "reward-0", "rollout-0", limit_s=1.0)
    script.receive("reward-0", wire.Leave(reason="done"))
    text = ask(script, FIRST).data["targets"]
    assert text["reward-0"]["state"] == "failed"
    for _ in range(int((WRITE_S + 2) // SMALL.heartbeat_s)):
        script.advance_time(SMALL.heartbeat_s)
        script.receive("rollout-0", wire.Heartbeat(version=0))
    reply = ask(script, FIRST)
    assert not reply.data["active"]
    assert "did not report the end of its profile in time" in reply.data["targets"]["rollout-0"]["text"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"targets": ("policy-7",)}, "policy-7 is not in the run; it has controller, policy-0, reward-0, rollout-0"),
        ({"targets": ()}, "0 processes cannot be profiled"),
        ({"targets": ("policy-0", "policy-0")}, "each once"),
        ({"num_steps": 0}, "0 steps cannot be profiled: give 1 to"),
        ({"num_groups": -1}, "-1 groups cannot be profiled"),
        ({"seconds": float("nan")}, "nan s cannot be profiled"),
        ({"limit_s": 1e9}, "a limit of 1e+09 s is out of range"),
        ({"ranks": (-1,)}, "ranks cannot be profiled"),
        ({"request": "../../etc"}, "'../../etc' is no id of a profile"),
    ],
)
def test_unusable_request_is_refused_with_one_sentence(fields: dict[str, Any], complaint: str) -> None:
    script = running()
    request = wire.RequestProfile(**{"request": FIRST, "targets": ("policy-0",), **fields})
    script.receive("operator-0", request)
    reply = reply_of(script)
    assert not reply.ok
    assert complaint in reply.text
    assert orders(script) == []


def test_lying_report_stays_small_and_counts_for_its_sender_only() -> None:
    script = running()
    ask(script, FIRST, "policy-0", "rollout-0")
    report(script, "rollout-0", text="\x1b[2J" + "x" * 100_000, files=("a\n",) * 100_000)
    report(script, "policy-0", profile=SECOND)
    targets = ask(script).data["targets"]
    assert len(targets["rollout-0"]["text"]) < 2000
    assert "\x1b" not in targets["rollout-0"]["text"]
    assert len(targets["rollout-0"]["files"]) <= 256
    assert targets["rollout-0"]["files"][0] == r"a\n"
    assert targets["policy-0"]["state"] == "active", "that report is of another profile"
