"""Evaluation: one version, pinned until every held-out prompt is scored or given up."""

from __future__ import annotations

from transcript import Script


def evaluating(**changes: int) -> Script:
    script = Script(evaluate_at_start=True, evaluate_at_end=True, max_staleness=1, **changes)
    script.begins(slots=4)
    return script


def test_an_evaluation_goes_first() -> None:
    script = evaluating()
    assert script.log[-4:] == [
        "rollout-0 <- generate:e0:0 held0 >= v0",
        "rollout-0 <- generate:e1:0 held1 >= v0",
        "rollout-0 <- generate:t0:0 train0 >= v0",
        "rollout-0 <- generate:t1:0 train1 >= v0",
    ]
    assert script.state.waiting_for == "evaluation of version 0: 0 of 2 prompts"


def test_no_other_version_is_published_while_one_is_evaluated() -> None:
    script = evaluating()
    script.generates("rollout-0", "generate:e0:0", num=1)
    script.generates("rollout-0", "generate:e1:0", num=1)
    script.makes_groups(0, 1)
    assert script.trains(1) == ["policy-0 <- release train:1:0", "(step 1)", "(trained 1)"]
    assert script.state.waiting_for == "evaluation of version 0: 0 of 2 prompts"
    # A scorer fails, and then the rollout is lost: both need version 0 again.
    assert "rollout-0 <- generate:e0:1 held0 >= v0" in script.scores("score:e0:0", None)
    script.loses("rollout-0")
    assert script.joins("rollout-0", slots=4)[-1] == "rollout-0 <- adopt:0:1"
    assert "rollout-0 <- generate:e0:2 held0 >= v0" in script.adopts("rollout-0", 0, 1)
    script.generates("rollout-0", "generate:e0:2", num=1)
    script.scores("score:e0:1", 1.0)
    lines = script.scores("score:e1:0", 0.0)
    assert lines[1:] == ["(evaluation )", "policy-0 <- publish:1:0"]
    (note,) = [c for c in script.commands if getattr(c, "kind", "") == "evaluation"]
    assert {k: note.fields[k] for k in ("version", "num_prompts", "num_failed", "reward_mean", "pass_at_k", "k")} == {
        "version": 0,
        "num_prompts": 2,
        "num_failed": 0,
        "reward_mean": 0.5,
        "pass_at_k": 0.5,
        "k": 1,
    }


def test_the_last_version_is_evaluated_before_the_checkpoint() -> None:
    script = Script(evaluate_at_end=True, num_steps=1)
    script.begins()
    script.makes_groups(0, 1)
    script.trains(1)
    script.publishes(1)
    assert script.adopts("rollout-0", 1)[2:] == [
        "rollout-0 <- generate:e0:0 held0 >= v1",
        "rollout-0 <- generate:e1:0 held1 >= v1",
    ]
    for n in (0, 1):
        script.generates("rollout-0", f"generate:e{n}:0", 1, num=1)
    script.scores("score:e0:0", 1.0)
    assert script.scores("score:e1:0", 1.0)[1:] == ["(evaluation 1)", "policy-0 <- checkpoint:1:0"]


def test_evaluation_alone() -> None:
    script = Script(evaluate_at_start=True, num_steps=0)
    script.begins()
    for n in (0, 1):
        script.generates("rollout-0", f"generate:e{n}:0", num=1)
    script.scores("score:e0:0", 1.0)
    lines = script.scores("score:e1:0", 0.0)
    assert lines[1] == "(evaluation )"
    assert lines[2:] == [f"{name} <- drain: the run is complete" for name in ("policy-0", "reward-0", "rollout-0")]


def test_held_out_prompts_that_cannot_be_answered_are_counted() -> None:
    script = Script(evaluate_at_start=True, num_steps=0)
    script.begins()
    assert script.fails("rollout-0", "generate:e0:0", "too long", fatal=True)[-1] == "(discarded held0)"
    script.generates("rollout-0", "generate:e1:0", num=1)
    script.scores("score:e1:0", 1.0)
    (note,) = [c for c in script.commands if getattr(c, "kind", "") == "evaluation"]
    assert (note.fields["num_failed"], note.fields["reward_mean"]) == (1, 1.0)
