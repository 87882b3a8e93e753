"""The end of a run as a table: each row a rule, the run that it is about, what happens, and what that leads to.

The rules are those that a system of this kind must keep, gathered from what goes wrong in such systems when a run ends.
Rules that have no meaning in this one, and why:

| rule elsewhere                                                       | here                                          |
|----------------------------------------------------------------------|-----------------------------------------------|
| a replica has ended only when each of its ranks has said so          | a replica is one peer; its ranks are its own  |
| one that has ended stays in the collective, or is left out of it     | there is no collective between replicas       |
| building the collective is a fence for transfers, and not overtaken  | as above; a version is pulled by whoever      |
|                                                                      | needs it, from an offer that stays            |
| the members left over build the collective anew, also a single one   | a step is dispatched to those left over:      |
|                                                                      | `tests/scenarios/policy_dies_*.txt`           |
| transfers that would repeat another are dropped while one is         | one version at most is being published, then  |
| under way                                                            | the newest: `test_controller_walk.py`         |
| a last batch is filled up with synthetic samples                     | steps are whole; the tail stays in the        |
|                                                                      | journal, and is reported (rows below)         |
| the end is posted again until it is acknowledged, except by a        | heartbeats carry it, for one process and for  |
| single process                                                       | a thousand (rows below)                       |
| a scheduler does not start a job again that ended with status 0      | the launcher's: `tests/system/test_stop.py`   |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.controller.core.events import Note
from starling.controller.core.machine import Controller
from starling.controller.core.records import JournalEntry
from starling.sim.replicas.weights import encoded_layout

COMPLETE = "drain: the run is complete"


@dataclass(frozen=True)
class Row:
    """One rule."""

    rule: str
    given: Callable[[], Script]
    happens: Callable[[Script], list[str]]
    then: list[str]
    """All that the controller says and notes."""


def begun(**changes: Any) -> Script:
    """Return a run whose groups are being generated."""
    script = Script(**changes)
    script.begins()
    return script


def trained(**changes: Any) -> Script:
    """Return a run whose only step is made, and not published yet."""
    script = begun(num_steps=1, **changes)
    script.makes_groups(0, 1)
    script.trains(1)
    return script


def published(**changes: Any) -> Script:
    """Return a run whose last version is published."""
    script = trained(**changes)
    script.publishes(1)
    return script


def drained(**changes: Any) -> Script:
    """Return a run that was told to leave."""
    script = published(**changes)
    exports(script)
    return script


def exports(script: Script, name: str = "policy-0", lease: str = "checkpoint:1:0", step: int = 1) -> list[str]:
    return script.hears(name, wire.CheckpointSaved(lease=lease, step=step, path="/c"))


def shared() -> Script:
    """Return a run that only lacks the checkpoints of its two policies, which share steps."""
    script = Script(num_steps=1, num_policies=2)
    for name in ("policy-0", "policy-1"):
        joins_as_sharer(script, name)
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.makes_groups(0, 1)
    script.trains(1, 0, name="policy-0")
    script.trains(1, 1, name="policy-1")
    assert script.publishes(1)[-2:] == ["policy-0 <- checkpoint:1:0", "policy-1 <- checkpoint:1:1"]
    return script


def joins_as_sharer(script: Script, name: str) -> None:
    """`name` says hello as a policy that shares steps."""
    hello = wire.Hello(role="policy", host="h", pid=1, version=0, has_layout=True, serves=True, shares_steps=True)
    script.hears(name, hello, encoded_layout(name))


def evaluating_at_the_end() -> Script:
    """Return a run whose last version is being evaluated."""
    script = published(evaluate_at_end=True)
    assert script.adopts("rollout-0", 1)[-1] == "rollout-0 <- generate:e0:0 held0 >= v1"
    return script


def one_more(script: Script) -> list[str]:
    script.generates("rollout-0", "generate:e0:0", 1, num=1)
    return script.scores("score:e0:0", 1.0)


def ends_without(script: Script, *names: str) -> list[str]:
    lines: list[str] = []
    for name in names:
        lines = script.leaves(name)
    return lines


def empties_rollouts(script: Script) -> list[str]:
    script.loses("rollout-0")
    return script.waits(1.0)


def supervised() -> Script:
    script = Script(num_steps=0, num_supervised_steps=1)
    script.joins("policy-0")
    return script


def written_by_one(script: Script) -> Script:
    exports(script)
    script.leaves("policy-0")
    return script


def half_scored() -> Script:
    script = begun(num_steps=1)
    script.makes_groups(0)
    return script


def generated() -> Script:
    script = begun()
    script.generates("rollout-0", "generate:t0:0")
    return script


def over() -> Script:
    script = drained()
    ends_without(script, "policy-0", "reward-0", "rollout-0")
    return script


ROWS = [
    # --- the last version -----------------------------------------------------------------------------------------
    Row(
        "the last version is published before the end, without an evaluation",
        lambda: begun(num_steps=1),
        lambda script: (script.makes_groups(0, 1), script.trains(1))[1],
        ["policy-0 <- release train:1:0", "(step 1)", "(trained 1)", "policy-0 <- publish:1:0"],
    ),
    Row(
        "and with one, which the checkpoint waits for",
        lambda: trained(evaluate_at_end=True),
        lambda script: script.publishes(1),
        ["policy-0 <- release publish:1:0", "(published 1)", "rollout-0 <- adopt:1:0"],
    ),
    Row(
        "a run of supervised steps publishes nothing, for nobody generates",
        supervised,
        lambda script: script.trains(1),
        ["policy-0 <- release train:1:0", "(step 1)", "policy-0 <- checkpoint:1:0"],
    ),
    Row(
        "a step is made by the policy's answer, and no publication makes one",
        lambda: begun(num_steps=2),
        lambda script: script.hears(
            "policy-0", wire.WeightsPublished(lease="publish:1:9", version=1, publish_s=0.0), b""
        ),
        ["policy-0 <- release publish:1:9"],
    ),
    # --- when nobody is told to leave -----------------------------------------------------------------------------
    Row("nobody leaves at the start, when nobody has come", Script, lambda script: script.waits(1.0), []),
    Row(
        "nobody leaves at the start, when the first replica comes",
        Script,
        lambda script: script.joins("rollout-0"),
        ["(joined rollout-0)", "rollout-0 <- welcome"],
    ),
    Row("nobody leaves because there are no rollouts for a while", begun, empties_rollouts, []),
    Row(
        "nobody leaves because all groups are generated: steps are left",
        lambda: begun(num_steps=1),
        lambda script: (script.makes_groups(0), script.generates("rollout-0", "generate:t1:0"))[1],
        ["rollout-0 <- release generate:t1:0", "reward-0 <- score:t1:0"],
    ),
    Row(
        "nobody leaves while the last version is evaluated",
        evaluating_at_the_end,
        one_more,
        ["reward-0 <- release score:e0:0"],
    ),
    Row(
        "the last evaluation goes on when the policy has left",
        evaluating_at_the_end,
        lambda script: (script.leaves("policy-0"), one_more(script))[1],
        ["reward-0 <- release score:e0:0"],
    ),
    Row(
        "once only",
        drained,
        lambda script: script.waits(1.0),
        [],
    ),
    Row(
        "a run without steps is over at once",
        lambda: Script(num_steps=0),
        lambda script: script.waits(0.0),
        ["done: the run is complete"],
    ),
    # --- who must have written the checkpoint ---------------------------------------------------------------------
    Row(
        "every policy writes the last checkpoint",
        shared,
        exports,
        ["policy-0 <- release checkpoint:1:0", "(checkpoint 1)"],
    ),
    Row(
        "one that has written it may leave, and counts",
        lambda: written_by_one(shared()),
        lambda script: exports(script, "policy-1", "checkpoint:1:1"),
        [
            "policy-1 <- release checkpoint:1:1",
            "(checkpoint 1)",
            f"policy-1 <- {COMPLETE}",
            f"reward-0 <- {COMPLETE}",
            f"rollout-0 <- {COMPLETE}",
        ],
    ),
    Row(
        "one that leaves without having written it does not end the run for the other",
        shared,
        lambda script: script.leaves("policy-1"),
        ["(left policy-1)"],
    ),
    Row(
        "the answer to another lease is none",
        published,
        lambda script: exports(script, lease="checkpoint:1:7"),
        ["policy-0 <- release checkpoint:1:7"],
    ),
    Row(
        "nor is a step that was made long ago",
        published,
        lambda script: script.trains(1),
        ["policy-0 <- release train:1:0"],
    ),
    # --- the tail -------------------------------------------------------------------------------------------------
    Row(
        "no more prompts are read than the steps need",
        lambda: begun(num_steps=1, max_staleness=3),
        lambda script: script.generates("rollout-0", "generate:t0:0"),
        ["rollout-0 <- release generate:t0:0", "reward-0 <- score:t0:0"],
    ),
    Row(
        "what was generated and will not be trained is reported",
        half_scored,
        lambda script: script.stops(),
        ["(tail )", "policy-0 <- drain: enough", "reward-0 <- drain: enough", "rollout-0 <- drain: enough"],
    ),
    # --- counts that cannot be ------------------------------------------------------------------------------------
    Row(
        "a group with another number of completions is no group",
        begun,
        lambda script: script.generates("rollout-0", "generate:t0:0", num=0),
        ["rollout-0 <- release generate:t0:0", "(waiting train0)", "rollout-0 <- generate:t0:1 train0 >= v0"],
    ),
    Row(
        "another number of rewards is no reward",
        generated,
        lambda script: script.scores("score:t0:0", 1.0, 1.0, 1.0),
        ["reward-0 <- release score:t0:0", "(waiting train0)", "rollout-0 <- generate:t0:1 train0 >= v0"],
    ),
    # --- the goodbye ---------------------------------------------------------------------------------------------
    Row(
        "whoever has not heard it is told with each heartbeat",
        drained,
        lambda script: script.beats("rollout-0", version=1),
        ["rollout-0 <- welcome", f"rollout-0 <- {COMPLETE}"],
    ),
    Row(
        "a repeated goodbye counts once",
        drained,
        lambda script: ends_without(script, "rollout-0", "rollout-0"),
        [],
    ),
    Row(
        "the run is over with the last goodbye",
        drained,
        lambda script: ends_without(script, "policy-0", "reward-0", "rollout-0"),
        ["(left rollout-0)", "done: the run is complete"],
    ),
    Row(
        "or after drain_s without it",
        lambda: drained(drain_s=5.0),
        lambda script: script.waits(5.0),
        ["(left policy-0)", "(left reward-0)", "(left rollout-0)", "done: the run is complete"],
    ),
    Row(
        "what comes afterwards changes nothing",
        over,
        lambda script: [*script.stops(), *script.waits(100.0), *script.leaves("policy-0")],
        [],
    ),
    # --- how it went ----------------------------------------------------------------------------------------------
    Row(
        "a run that was stopped is no failure",
        Script,
        lambda script: script.stops("maintenance"),
        ["done: maintenance"],
    ),
    Row(
        "one that lost its work for good is",
        lambda: Script(start_s=1.0),
        lambda script: [*script.waits(0.0), *script.waits(1.5)],
        [
            "failed: the run needs the policy, which has not joined, for 1 s; start what is missing or lower the "
            "number in the recipe"
        ],
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=[row.rule for row in ROWS])
def test_rule(row: Row) -> None:
    assert row.happens(row.given()) == row.then


def test_resumed_run_writes_a_missing_last_checkpoint() -> None:
    before = published()
    past = [JournalEntry(write.record) for write in before.journal]
    controller = Controller(before.plan, Stream("train"), Stream("sft"), before.held_out, journal=past, incarnation=2)
    script = Script(num_steps=1)
    script.controller, script.state = controller, controller.state
    script.joins("policy-0", version=1)
    script.waits(script.plan.heartbeat_s * 3)
    assert script.sent_lines() == ["policy-0 <- checkpoint:1:0"], "no step is left, and nobody is told to generate"


def test_latest_metrics_hold_numbers_only() -> None:
    script = half_scored()
    script.stops()
    [tail] = [command for command in script.commands if isinstance(command, Note) and command.kind == "tail"]
    assert tail.fields == {"leased": 1, "generated": 0, "scored": 1}
