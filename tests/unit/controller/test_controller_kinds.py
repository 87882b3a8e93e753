"""Kinds of run in journals and recordings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transcript import SMALL

from starling.common.kinds import KINDS, RunKind, kind_of
from starling.controller.core.groups.buffer import buffer_class
from starling.controller.core.plan import RunPlan

JOURNALED = {
    "rl": ("sft", "rl"),
    "sft": ("sft", "rl"),
    "dpo": ("dpo", "rl"),
    "reward_model": ("reward_model", "rl"),
    "replay": ("sft", "replay"),
    "generate": ("sft", "generate"),
    "evaluate": ("sft", "evaluate"),
    "infer": ("sft", "infer"),
    "serve": ("sft", "serve"),
}
"""The objective and the activity of each kind in the journals and recordings of every version so far."""


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_journal_has_objective_and_activity_of_a_kind(kind: RunKind) -> None:
    fields = replace(SMALL, kind=kind).journaled()
    assert (fields["objective"], fields["activity"]) == JOURNALED[kind.name]
    assert set(fields) == {
        "seed", "objective", "num_supervised_steps", "examples_per_step", "prompts_per_step", "group_size",
        "begin_version", "begin_prompt", "is_taught", "activity",
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_recorded_plan_is_read_back(kind: RunKind) -> None:
    plan = replace(SMALL, kind=kind)
    read = RunPlan.from_fields(plan.to_fields())
    assert replace(read, kind=kind) == plan
    assert buffer_class(read.kind) is buffer_class(kind)
    assert [read.phase(step) for step in (0, 1)] == [plan.phase(step) for step in (0, 1)]


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="no kind of run with the objective 'ppo' and the activity 'rl'"):
        kind_of("ppo", "rl")


def test_recorded_plan_with_a_wrong_number_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected `int`"):
        RunPlan.from_fields({**SMALL.to_fields(), "group_size": "two"})
