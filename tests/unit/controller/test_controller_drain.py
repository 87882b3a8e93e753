"""Rules of the end of a run, as a table: each with the state of the run, an event, and the expected commands.

The rules were collected from the failures of other systems at the end of a run. Rules that do not apply here, and why:

| rule of another system                                               | here                                          |
|----------------------------------------------------------------------|-----------------------------------------------|
| a replica has ended when each of its ranks has reported that         | a replica is one peer, whatever its ranks     |
| an ended replica stays in the collective, or is excluded from it     | there is no collective between replicas       |
| building the collective is a fence for transfers                     | as above; each replica that needs a version   |
|                                                                      | pulls it from an offer that stays valid       |
| the remaining members rebuild the collective, even a single one      | a step is dispatched to remaining policies:   |
|                                                                      | `tests/scenarios/policy_dies_*.txt`           |
| redundant transfers are dropped while one is                         | at most one version is being published, then  |
| in progress                                                          | the newest: `test_controller_walk.py`         |
| the last batch is padded with synthetic samples                      | all steps are full; remaining groups stay in  |
|                                                                      | the journal, and are reported (rules below)   |
| the end is sent again until it is acknowledged, except by a          | it is sent with each heartbeat, however many  |
| single process                                                       | processes there are (rules below)             |
| a scheduler does not restart a job that ended with status 0          | the launcher's: `tests/system/test_stop.py`   |
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
class DrainRule:
    """A rule, with an event in a given state and the lines that must follow."""

    rule: str
    setup: Callable[[], Script]
    action: Callable[[Script], list[str]]
    expected: list[str]
    """All messages and notes of the controller."""


def generating_run(**changes: Any) -> Script:
    """Return a run whose groups are being generated."""
    script = Script(**changes)
    script.start_run()
    return script


def trained_run(**changes: Any) -> Script:
    """Return a run whose only step is trained, and not published yet."""
    script = generating_run(num_steps=1, **changes)
    script.generate_and_score(0, 1)
    script.trains(1)
    return script


def published_run(**changes: Any) -> Script:
    """Return a run whose last version is published."""
    script = trained_run(**changes)
    script.publishes(1)
    return script


def drained_run(**changes: Any) -> Script:
    """Return a run whose replicas were told to leave."""
    script = published_run(**changes)
    report_checkpoint(script)
    return script


def report_checkpoint(
    script: Script, name: str = "policy-0", lease: str = "checkpoint:1:0", step: int = 1
) -> list[str]:
    return script.receive(name, wire.CheckpointSaved(lease=lease, step=step, path="/c"))


def shared_run() -> Script:
    """Return a run of two policies that only lacks the last checkpoint, which one of them writes."""
    script = Script(num_steps=1, num_policies=2)
    for name in ("policy-0", "policy-1"):
        join_sharing_policy(script, name)
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.generate_and_score(0, 1)
    script.trains(1, 0, name="policy-0")
    script.trains(1, 1, name="policy-1")
    assert script.publishes(1)[-1] == "policy-0 <- checkpoint:1:0"
    return script


def join_sharing_policy(script: Script, name: str) -> None:
    """Let `name` join as a policy that shares steps."""
    hello = wire.Hello(role="policy", host="h", pid=1, version=0, has_layout=True, serves=True, peer="h:1")
    script.receive(name, hello, encoded_layout(name))


def evaluating_run() -> Script:
    """Return a run whose last version is being evaluated."""
    script = published_run(evaluate_at_end=True)
    assert script.adopts("rollout-0", 1)[-1] == "rollout-0 <- generate:e0:0 held0 >= v1"
    return script


def finish_evaluation_group(script: Script) -> list[str]:
    script.generates("rollout-0", "generate:e0:0", 1, num=1)
    return script.scores("score:e0:0", 1.0)


def leave_in_turn(script: Script, *names: str) -> list[str]:
    lines: list[str] = []
    for name in names:
        lines = script.leaves(name)
    return lines


def lose_all_rollouts(script: Script) -> list[str]:
    script.disconnect("rollout-0")
    return script.advance_time(1.0)


def supervised_run() -> Script:
    script = Script(num_steps=0, num_supervised_steps=1)
    script.joins("policy-0")
    return script


def half_scored_run() -> Script:
    script = generating_run(num_steps=1)
    script.generate_and_score(0)
    return script


def run_with_generated_group() -> Script:
    script = generating_run()
    script.generates("rollout-0", "generate:t0:0")
    return script


def ended_run() -> Script:
    script = drained_run()
    leave_in_turn(script, "policy-0", "reward-0", "rollout-0")
    return script


DRAIN_RULES = [
    # --- the last version -----------------------------------------------------------------------------------------
    DrainRule(
        "the last version is published before the end, without an evaluation",
        lambda: generating_run(num_steps=1),
        lambda script: (script.generate_and_score(0, 1), script.trains(1))[1],
        ["policy-0 <- release train:1:0", "(step 1)", "(trained 1)", "policy-0 <- publish:1:0"],
    ),
    DrainRule(
        "the last version is evaluated before the checkpoint is written",
        lambda: trained_run(evaluate_at_end=True),
        lambda script: script.publishes(1),
        ["policy-0 <- release publish:1:0", "(published 1)", "rollout-0 <- adopt:1:0"],
    ),
    DrainRule(
        "a run of supervised steps publishes nothing, as it has no rollouts",
        supervised_run,
        lambda script: script.trains(1),
        ["policy-0 <- release train:1:0", "(step 1)", "policy-0 <- checkpoint:1:0"],
    ),
    DrainRule(
        "a step is committed by the policy's result, and not by a publication",
        lambda: generating_run(num_steps=2),
        lambda script: script.receive(
            "policy-0", wire.WeightsPublished(lease="publish:1:9", version=1, publish_s=0.0), b""
        ),
        ["policy-0 <- release publish:1:9"],
    ),
    # --- when no replica is told to leave -------------------------------------------------------------------------
    DrainRule("no drain at the start, without replicas", Script, lambda script: script.advance_time(1.0), []),
    DrainRule(
        "no drain at the start, when the first replica joins",
        Script,
        lambda script: script.joins("rollout-0"),
        ["(joined rollout-0)", "rollout-0 <- welcome"],
    ),
    DrainRule("no drain when rollouts are missing for a while", generating_run, lose_all_rollouts, []),
    DrainRule(
        "no drain when all groups are generated and steps remain",
        lambda: generating_run(num_steps=1),
        lambda script: (script.generate_and_score(0), script.generates("rollout-0", "generate:t1:0"))[1],
        ["rollout-0 <- release generate:t1:0", "reward-0 <- score:t1:0"],
    ),
    DrainRule(
        "no drain while the last version is evaluated",
        evaluating_run,
        finish_evaluation_group,
        ["reward-0 <- release score:e0:0"],
    ),
    DrainRule(
        "the last evaluation continues when the policy has left",
        evaluating_run,
        lambda script: (script.leaves("policy-0"), finish_evaluation_group(script))[1],
        ["reward-0 <- release score:e0:0"],
    ),
    DrainRule(
        "the drain is sent once",
        drained_run,
        lambda script: script.advance_time(1.0),
        [],
    ),
    DrainRule(
        "a run without steps ends at once",
        lambda: Script(num_steps=0),
        lambda script: script.advance_time(0.0),
        ["done: the run is complete"],
    ),
    # --- which policies must have written the checkpoint ----------------------------------------------------------
    DrainRule(
        "one of two policies writes the last checkpoint",
        shared_run,
        report_checkpoint,
        [
            "policy-0 <- release checkpoint:1:0",
            "(checkpoint 1)",
            f"policy-0 <- {COMPLETE}",
            f"policy-1 <- {COMPLETE}",
            f"reward-0 <- {COMPLETE}",
            f"rollout-0 <- {COMPLETE}",
        ],
    ),
    DrainRule(
        "when it leaves without the checkpoint, the other one writes it",
        shared_run,
        lambda script: script.leaves("policy-0"),
        ["(left policy-0)", "policy-1 <- checkpoint:1:1"],
    ),
    DrainRule(
        "a policy that does not write it may leave",
        shared_run,
        lambda script: script.leaves("policy-1"),
        ["(left policy-1)"],
    ),
    DrainRule(
        "a result of another lease is ignored",
        published_run,
        lambda script: report_checkpoint(script, lease="checkpoint:1:7"),
        ["policy-0 <- release checkpoint:1:7"],
    ),
    DrainRule(
        "a late result of an earlier step is ignored",
        published_run,
        lambda script: script.trains(1),
        ["policy-0 <- release train:1:0"],
    ),
    # --- the tail -------------------------------------------------------------------------------------------------
    DrainRule(
        "no more groups are opened than the steps need",
        lambda: generating_run(num_steps=1, max_staleness=3),
        lambda script: script.generates("rollout-0", "generate:t0:0"),
        ["rollout-0 <- release generate:t0:0", "reward-0 <- score:t0:0"],
    ),
    DrainRule(
        "groups that are generated and will not be trained are reported",
        half_scored_run,
        lambda script: script.request_stop(),
        ["(tail )", "policy-0 <- drain: enough", "reward-0 <- drain: enough", "rollout-0 <- drain: enough"],
    ),
    # --- invalid counts -------------------------------------------------------------------------------------------
    DrainRule(
        "a group with a wrong number of completions is generated again",
        generating_run,
        lambda script: script.generates("rollout-0", "generate:t0:0", num=0),
        [
            "rollout-0 <- release generate:t0:0",
            "(waiting train0)",
            "(invalid rollout-0)",
            "rollout-0 <- generate:t0:1 train0 >= v0",
        ],
    ),
    DrainRule(
        "a group with a wrong number of rewards is generated again",
        run_with_generated_group,
        lambda script: script.scores("score:t0:0", 1.0, 1.0, 1.0),
        [
            "reward-0 <- release score:t0:0",
            "(waiting train0)",
            "(invalid reward-0)",
            "rollout-0 <- generate:t0:1 train0 >= v0",
        ],
    ),
    # --- the goodbye ---------------------------------------------------------------------------------------------
    DrainRule(
        "the drain is repeated with each heartbeat",
        drained_run,
        lambda script: script.heartbeats("rollout-0", version=1),
        ["rollout-0 <- welcome", f"rollout-0 <- {COMPLETE}"],
    ),
    DrainRule(
        "a repeated goodbye counts once",
        drained_run,
        lambda script: leave_in_turn(script, "rollout-0", "rollout-0"),
        [],
    ),
    DrainRule(
        "the run ends with the last goodbye",
        drained_run,
        lambda script: leave_in_turn(script, "policy-0", "reward-0", "rollout-0"),
        ["(left rollout-0)", "done: the run is complete"],
    ),
    DrainRule(
        "the run ends after drain_s without the last goodbye",
        lambda: drained_run(drain_s=5.0),
        lambda script: script.advance_time(5.0),
        ["(left policy-0)", "(left reward-0)", "(left rollout-0)", "done: the run is complete"],
    ),
    DrainRule(
        "later events change nothing",
        ended_run,
        lambda script: [*script.request_stop(), *script.advance_time(100.0), *script.leaves("policy-0")],
        [],
    ),
    # --- results --------------------------------------------------------------------------------------------------
    DrainRule(
        "a stopped run has not failed",
        Script,
        lambda script: script.request_stop("maintenance"),
        ["done: maintenance"],
    ),
    DrainRule(
        "a run without its policy fails",
        lambda: Script(start_s=1.0),
        lambda script: [*script.advance_time(0.0), *script.advance_time(1.5)],
        [
            "failed: the run needs the policy, which has not joined, for 1 s; start what is missing or lower the "
            "number in the recipe"
        ],
    ),
]


@pytest.mark.parametrize("case", DRAIN_RULES, ids=[case.rule for case in DRAIN_RULES])
def test_drain_rule(case: DrainRule) -> None:
    assert case.action(case.setup()) == case.expected


def test_resumed_run_writes_a_missing_last_checkpoint() -> None:
    before = published_run()
    journaled = [JournalEntry(write.record) for write in before.journal]
    controller = Controller(
        before.plan, Stream("train"), Stream("sft"), before.held_out, journal=journaled, incarnation=2
    )
    script = Script(num_steps=1)
    script.controller, script.state = controller, controller.state
    script.joins("policy-0", version=1)
    script.advance_time(script.plan.heartbeat_s * 3)
    assert script.sent_lines() == ["policy-0 <- checkpoint:1:0"], "no step is left, and no group is generated"


def test_latest_metrics_hold_numbers_only() -> None:
    script = half_scored_run()
    script.request_stop()
    [tail] = [command for command in script.commands if isinstance(command, Note) and command.kind == "tail"]
    assert tail.fields == {"leased": 1, "generated": 0, "scored": 1}
