"""Operator requests: changeable settings, queries and their replies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.common.wire.codec import pack
from starling.controller.core.events import Note
from starling.controller.core.explain import explain, waits, why
from starling.controller.core.training.dynamic_settings import DYNAMIC, FIXED, SettingChanges, check

VALUES: dict[str, tuple[list[float], list[float]]] = {
    "policy.optimizer.learning_rate": ([1e-7, 1.0], [0.0, -1e-6]),
    "policy.optimizer.max_grad_norm": ([0.0, 1.5], [-0.1]),
    "policy.algorithm.kl_coefficient": ([0.0, 0.04], [-0.01]),
    "policy.algorithm.clip_low": ([0.2, 1.0], [0.0, 1.1]),
    "policy.algorithm.clip_high": ([0.28, 3.0], [0.0]),
    "policy.diffusion.nft_beta": ([0.1, 1.0], [0.0]),
    "policy.diffusion.advantage_bound": ([1.0, 5.0], [0.0]),
    "sampling.temperature": ([0.1, 2.0, 0.001], [0.0, -1.0, 1e-320, 1e300]),
    "sampling.top_p": ([0.5, 1.0], [0.0, 1.01]),
    "sampling.top_k": ([0, 50, 50.0], [-1, 1.5, 1e12]),
    "sampling.min_p": ([0.0, 0.05, 1.0], [-0.1, 1.01]),
    "sampling.max_tokens": ([1, 4096], [0, 2.5, 1e300]),
    "rl.max_staleness": ([0, 3], [-1, 0.5]),
    "rl.max_tries": ([0, 5], [-1, 0.5]),
    "evaluation.every": ([0, 10], [-1, 2.5]),
    "controller.save_every": ([0, 10], [-1, 2.5]),
}
"""Valid and invalid values of each setting."""


def test_table_covers_every_lease_kind() -> None:
    assert VALUES.keys() == DYNAMIC.keys()
    assert not FIXED.keys() & DYNAMIC.keys()


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("sampling.top_k", 0, "top_k = 0 does not bound their number"),
        ("sampling.top_k", 2000, "set sampling.top_k from 1 to 1024"),
        ("sampling.max_tokens", 16_000_000, "can be sent; lower one of the three"),
        ("sampling.top_k", 7, ""),
        ("sampling.top_p", 0.5, ""),
    ],
)
def test_change_must_keep_the_bound_of_recorded_tokens(key: str, value: float, complaint: str) -> None:
    recorded = wire.Sampling(max_tokens=8, top_p=0.8, top_k=3, logprobs="truncated")
    for sampling in (recorded, replace(recorded, logprobs="full")):
        script = Script(sampling=sampling)
        script.start_run()
        script.receive("operator-0", wire.ChangeSetting(request="r", key=key, value=value))
        (reply,) = [send.message for send in script.sent if isinstance(send.message, wire.OperatorReply)]
        refused = bool(complaint) and sampling is recorded
        assert reply.ok == (not refused)
        if refused:
            assert complaint in reply.text
            assert script.state.training.sampling == recorded


@pytest.mark.parametrize("key", VALUES)
def test_setting_has_a_range(key: str) -> None:
    right, wrong = VALUES[key]
    for value in right:
        assert check(key, value) == value
    for value in wrong:
        with pytest.raises(ValueError, match=f"{key} = .* is out of range; it must be {DYNAMIC[key].valid_range}$"):
            check(key, value)
    for value in (float("nan"), float("inf"), float("-inf")):
        with pytest.raises(ValueError, match="is out of range"):
            check(key, value)
    for value in (True, "1"):
        with pytest.raises(ValueError, match="is not a number"):
            check(key, value)


@pytest.mark.parametrize("key", FIXED)
def test_fixed_settings_are_refused_with_a_reason(key: str) -> None:
    with pytest.raises(ValueError, match=FIXED[key]):
        check(key, 1)


@given(st.lists(st.tuples(st.sampled_from(sorted(DYNAMIC)), st.integers(1, 9), st.integers(1, 9))))
def test_last_setting_change_wins(changes: list[tuple[str, int, int]]) -> None:
    made = SettingChanges()
    for number, (key, value, step) in enumerate(sorted(changes, key=lambda change: change[2])):
        made.add(key, float(value), step, str(number))
    for step in range(1, 10):
        expected: dict[str, float] = {}
        for key, value, first in sorted(changes, key=lambda change: change[2]):
            if first <= step and key.startswith("policy."):
                expected[key] = value
        assert made.for_policies(step) == expected


def change(script: Script, key: str, value: Any, request: str = "r") -> list[str]:
    return script.receive("operator-0", wire.ChangeSetting(request=request, key=key, value=value))


def test_setting_change_applies_from_the_first_step_that_was_not_dispatched() -> None:
    script = Script(num_steps=3, max_staleness=1, prompts_per_step=1)
    script.start_run(slots=4)
    for step, run in enumerate((lambda: None, lambda: script.generate_and_score(0), lambda: script.trains(1)), start=1):
        run()
        reply = change(script, "policy.algorithm.clip_low", step / 10, str(step))
        expected = 1 if step == 1 else 2
        assert reply[-1] == f"operator-0 <- yes: policy.algorithm.clip_low = {step / 10:g} from step {expected} on"


def test_more_slots_are_used_at_once() -> None:
    script = Script(num_steps=3, max_staleness=0)
    script.start_run(slots=8)
    assert change(script, "rl.max_staleness", 1)[-2:] == [
        "rollout-0 <- generate:t2:0 train2 >= v0",
        "rollout-0 <- generate:t3:0 train3 >= v0",
    ]


def test_refused_operator_request_changes_nothing() -> None:
    script = Script()
    script.start_run()
    num = len(script.journal)
    assert change(script, "rl.max_staleness", -1)[-1].startswith("operator-0 <- no: ")
    assert (len(script.journal), script.state.training.changes) == (num, SettingChanges())


# --- why -----------------------------------------------------------------------------------------------------------


def ask(script: Script) -> dict[str, Any]:
    text, data = why(script.state)
    [reply] = script.receive("operator-0", wire.QueryRun(request="r", about="why"))
    assert reply == f"operator-0 <- yes: {text}"
    assert data["waiting_for"] == explain(script.state)
    return data


def test_why_follows_waits_to_their_root() -> None:
    script = Script()
    for name in ("policy-0", "reward-0", "rollout-0"):
        script.joins(name)
    script.publishes(0)
    script.now = 3.0
    script.heartbeats("policy-0")
    buckets = wire.Wait(what="buckets of version 0", on="policy-0", since_s=2.5, seconds_left=10.0)
    disk = wire.Wait(what="room for the snapshot", on="disk", since_s=2.0, seconds_left=60.0)
    script.receive("rollout-0", heartbeat_with_waits(script, "rollout-0", buckets))
    script.receive("policy-0", heartbeat_with_waits(script, "policy-0", disk))
    data = ask(script)
    assert data["root"] == {
        "owner": "policy-0",
        "what": "room for the snapshot",
        "on": "disk",
        "since_s": 2.0,
        "seconds_left": 60.0,
    }
    assert [wait["owner"] for wait in data["waits"]] == ["policy-0", "controller", "rollout-0"]


def heartbeat_with_waits(script: Script, name: str, *found: wire.Wait) -> wire.Heartbeat:
    """Return a replica's heartbeat with all its leases and these waits."""
    held = tuple(wire.HeldLease(lease=lease.id, phase="working") for lease in script.state.replicas.leases.all_of(name))
    return wire.Heartbeat(leases=held, version=script.state.replicas.membership.members[name].version, waits=found)


def test_texts_of_replicas_begin_no_lines_of_an_answer() -> None:
    script = Script()
    forged = "x\nat the root: policy-0"
    hello = wire.Hello(role="reward", host=forged, pid=1, num_slots=1)
    script.receive("reward-0", hello)
    wait = wire.Wait(what=forged, on=forged, since_s=1.0, seconds_left=5.0)
    script.receive("reward-0", heartbeat_with_waits(script, "reward-0", wait))
    for about in ("status", "why"):
        script.receive("operator-0", wire.QueryRun(request=about, about=about))
        [reply] = [send.message for send in script.sent if isinstance(send.message, wire.OperatorReply)]
        assert "\nat the root: policy-0" not in reply.text
    assert reply.data["waits"][-1]["what"] == r"x\nat the root: policy-0"


def test_answer_fits_into_a_message_whatever_replicas_wait_for() -> None:
    names = [f"rollout-{number}" for number in range(12)]
    script = Script(prompts_per_step=24)
    script.start_run(*names)
    long = "\N{GRINNING FACE}" * 512
    waits = [wire.Wait(what=long, on=long, since_s=1.0, seconds_left=5.0)] * 256
    for name in names:
        script.receive(name, heartbeat_with_waits(script, name, *waits))
    script.receive("operator-0", wire.QueryRun(request="r", about="why"))
    [reply] = [send.message for send in script.sent if isinstance(send.message, wire.OperatorReply)]
    envelope = wire.Envelope(protocol=1, run="r", sender="controller", incarnation=1, seq=1)
    pack(envelope, reply)
    assert "characters, too many for one answer" in reply.text


def test_why_handles_circular_waits() -> None:
    script = Script()
    script.start_run("rollout-0", "rollout-1")
    for name, other in (("rollout-0", "rollout-1"), ("rollout-1", "rollout-0")):
        circle = wire.Wait(what="the other", on=other, since_s=1.0, seconds_left=5.0)
        script.receive(name, heartbeat_with_waits(script, name, circle))
    assert ask(script)["root"]["owner"] in ("rollout-0", "rollout-1")


@pytest.mark.parametrize("stage", ["alone", "publishing", "adopting", "generating", "scoring", "training", "draining"])
def test_every_wait_has_an_end(stage: str) -> None:
    script = Script(num_steps=1)
    if stage == "publishing":
        script.joins("policy-0")
    elif stage == "adopting":
        script.joins("policy-0")
        script.joins("rollout-0")
        script.publishes(0)
    elif stage != "alone":
        script.start_run()
    if stage == "scoring":
        script.generates("rollout-0", "generate:t0:0")
    elif stage in ("training", "draining"):
        script.generate_and_score(0, 1)
    if stage == "draining":
        script.trains(1)
        script.publishes(1)
        script.receive("policy-0", wire.CheckpointSaved(lease="checkpoint:1:0", step=1, path="/"))
    script.advance_time(1.0)
    found = waits(script.state)
    assert found, "the controller reports what it waits for"
    assert all(wait["seconds_left"] >= 0 for wait in found)
    assert ask(script)["root"] is not None


def test_root_of_why_is_what_its_first_sentence_names() -> None:
    """Older waits for other work, such as groups of later steps, are not what the run waits for."""
    script = Script(num_steps=3, max_staleness=1)
    script.start_run("rollout-0", "rollout-1", slots=8)
    script.advance_time(5.0)
    script.generate_and_score(0, 1)
    script.advance_time(1.0)
    data = ask(script)
    assert data["waiting_for"] == "the policy to train step 1"
    assert any("groups to generate" in wait["what"] for wait in data["waits"]), "an older wait"
    assert (data["root"]["on"], data["root"]["what"]) == ("policy-0", "1 step to train, the oldest 1")


def test_why_names_a_missing_role() -> None:
    script = Script()
    script.advance_time(1.0)
    assert why(script.state)[0].split("\n")[:2] == [
        "the run needs the policy, which has not joined",
        "at the root: controller waits for the policy, which has not joined on launcher, for 0.0 s, "
        "and gives up in 120.0 s",
    ]


def test_status_lists_work_by_replica() -> None:
    script = Script()
    script.start_run()
    change(script, "rl.max_tries", 3)
    [reply] = script.receive("operator-0", wire.QueryRun(request="r", about="status"))
    assert reply.split("\n") == [
        "operator-0 <- yes: rl: version 0 of 2, published 0, saved 0; controller's incarnation 1",
        "groups: 0 waiting, 2 leased, 0 generated, 0 scored, 0 frozen",
        "waits for the groups of step 1: 2 being generated, 0 being scored, 0 scored of 2",
        "set: rl.max_tries = 3",
        "  policy-0 on h: version 0, no work",
        "  reward-0 on h: no work",
        "  rollout-0 on h: version 0, 2 generate",
    ]


def test_status_before_the_first_publication_has_no_negative_versions() -> None:
    script = Script(num_supervised_steps=1)
    script.start_run()
    [reply] = script.receive("operator-0", wire.QueryRun(request="r", about="status"))
    assert "published none" in reply
    assert "rollout-0 on h: version none, " in reply
    assert "-1" not in reply


def test_changed_settings_are_sent_with_each_later_step() -> None:
    script = Script(num_steps=3)
    script.start_run()
    script.receive("operator-0", wire.ChangeSetting(request="r", key="sampling.temperature", value=0.5))
    reply_text = []
    for step in (1, 2):
        script.generate_and_score(2 * step - 2, 2 * step - 1, version=step - 1)
        script.trains(step)
        reply_text += [c.fields for c in script.commands if isinstance(c, Note) and c.kind == "step"]
        script.publishes(step)
        script.adopts("rollout-0", step)
    assert [fields.get("set/sampling.temperature") for fields in reply_text] == [0.5, 0.5]
