"""Digest of what a step trained: that of each policy, and that of a step which is made again."""

from __future__ import annotations

from typing import Any

from transcript import Script, encoded_layout

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.records import StepCommitted


def trained(lease: str, step: int, digest: int) -> wire.StepTrained:
    return wire.StepTrained(lease=lease, step=step, metrics={"loss": 1.0}, batch_digest=digest)


def notes(script: Script, kind: str) -> list[dict[str, Any]]:
    """Return the fields of the last event's notes of this kind."""
    return [dict(one.fields) for one in script.commands if isinstance(one, Note) and one.kind == kind]


def script_of_two_policies() -> Script:
    """Return a run in which two policies make step 1 together."""
    script = Script(num_policies=2, num_steps=1, prompts_per_step=2)
    for name in ("policy-0", "policy-1"):
        hello = wire.Hello(role="policy", host="h", pid=1, version=0, has_layout=True, serves=True, peer="h:1")
        script.receive(name, hello, encoded_layout(name))
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.generate_and_score(0, 1)
    return script


def test_digest_of_a_step_is_journaled_and_noted() -> None:
    script = Script(num_steps=2, prompts_per_step=1)
    script.start_run()
    script.generate_and_score(0)
    script.receive("policy-0", trained("train:1:0", 1, 0xAB))
    assert notes(script, "step")[0]["batch_digest"] == "00000000000000ab"
    committed = [write.record for write in script.journal if isinstance(write.record, StepCommitted)]
    assert committed[0].metrics["batch_digest"] == "00000000000000ab"


def test_digest_of_a_step_of_two_policies_is_that_of_each() -> None:
    script = script_of_two_policies()
    script.receive("policy-0", trained("train:1:0", 1, 0xAB))
    assert not notes(script, "step"), "the other one has not answered"
    script.receive("policy-1", trained("train:1:1", 1, 0xAB))
    assert notes(script, "step")[0]["batch_digest"] == "00000000000000ab"
    assert not script.state.lifecycle.failure


def test_policies_that_trained_different_groups_end_the_run() -> None:
    script = script_of_two_policies()
    script.receive("policy-0", trained("train:1:0", 1, 7))
    script.receive("policy-1", trained("train:1:1", 1, 8))
    assert script.state.lifecycle.failure == (
        "policy-0 and policy-1 trained different groups in step 1: they run different code"
    )


def test_step_has_the_digest_of_the_policy_that_reports_one() -> None:
    script = script_of_two_policies()
    script.receive("policy-0", trained("train:1:0", 1, 7))
    script.heartbeats("policy-1", version=1)
    assert notes(script, "step")[0]["batch_digest"] == "0000000000000007"


def test_repeated_step_is_noted_with_its_digest() -> None:
    script = Script(num_steps=3, prompts_per_step=1)
    script.start_run()
    script.generate_and_score(0)
    script.receive("policy-0", trained("train:1:0", 1, 5))
    script.disconnect("policy-0")
    script.advance_time(script.plan.lease_s + 1)
    script.joins("policy-0", incarnation=2)
    script.fetched(1)
    script.receive("policy-0", trained("train:1:1", 1, 6), incarnation=2)
    assert notes(script, "step_repeated") == [{"replica": "policy-0", "step": 1, "batch_digest": "0000000000000006"}]
    assert not notes(script, "step")
