"""Sizes of groups: what a rollout or a teacher sends beyond what the recipe allows is refused, and not stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from generated_results import Result, reason, valid
from msgspec.structs import replace
from transcript import Script, Stream

from starling.common.wire import messages as wire
from starling.common.wire.tensors import LOSS_MASK
from starling.controller.core.compaction import compact
from starling.controller.core.events import Received
from starling.controller.core.groups.arrival import received
from starling.controller.core.machine import Controller
from starling.controller.core.records import CompletionsStored, JournalEntry
from starling.sim.replicas.weights import encoded_layout


def masked(num: int, sampled: int = 0) -> Result:
    """Return a group whose first completion has `num` tokens of an environment, and `sampled` of the model."""
    result = valid()
    total = num + sampled
    result.change(0, num_tokens=total, num_masked=num)
    for index in (1, 3):
        result.put(index, np.zeros(total + 2, np.int32))
    result.put(2, np.zeros(total + 2, np.float32))
    result.put(4, np.array([0] * num + [1] * (sampled + 2), np.uint8), LOSS_MASK)
    return result


def long_prompt(num: int) -> Result:
    """Return a group with a prompt of `num` tokens, and one token of one completion."""
    result = valid()
    for index, dtype in enumerate((np.int32, np.int32, np.float32, np.int32)):
        result.put(index, np.zeros(1 if index else num, dtype))
    for index in range(2):
        result.change(index, num_tokens=1 - index)
    return result


def is_stored(script: Script) -> bool:
    """Say whether completions are in the journal."""
    return any(isinstance(write.record, CompletionsStored) for write in script.journal)


@pytest.mark.parametrize("result", [masked(1000), masked(1000, 1), long_prompt(1000)])
@pytest.mark.parametrize(
    ("plan", "model", "remedy"),
    [
        ({}, wire.ModelLimits(longest=64), "the model can attend to 64"),
        ({"max_model_len": 64}, None, "rollout.max_model_len allows 64"),
    ],
)
def test_group_longer_than_the_run_allows_is_not_stored(
    result: Result, plan: dict[str, Any], model: wire.ModelLimits | None, remedy: str
) -> None:
    script = Script(**plan)
    script.start_run(limits=model)
    result.send(script)
    assert remedy in reason(script)
    assert not is_stored(script)
    assert "rollout-0" in script.state.replicas.membership.members, "its own recipe may allow more"


@pytest.mark.parametrize("result", [masked(59), masked(50, 2), long_prompt(63)])
def test_group_as_long_as_the_run_allows_is_stored(result: Result) -> None:
    script = Script(max_model_len=64)
    script.start_run(limits=wire.ModelLimits(longest=62 if result.trajectories[0].num_masked else 64))
    result.send(script)
    assert is_stored(script)


def test_tensors_of_a_group_that_is_too_long_are_not_looked_at() -> None:
    script = Script(max_model_len=64)
    script.start_run()
    result = masked(1000)
    result.put(2, np.full(1002, np.nan, np.float32))
    message = wire.GroupGenerated(
        lease=script.aliases.long("generate:t0:0"),
        trajectories=tuple(result.trajectories),
        tensors=tuple(result.tensors),
    )
    event: Received = received(script.state, 0.0, "rollout-0", 1, message, tuple(result.buffers))
    assert event.problem is not None
    assert "rollout.max_model_len allows 64" in event.problem.reason


def test_tensors_of_more_completions_than_a_group_has_are_not_looked_at() -> None:
    script = Script(eval_completions=3)
    script.start_run()
    result = valid()
    result.trajectories *= 2
    for index, dtype in ((1, np.int32), (2, np.float32), (3, np.int32)):
        result.put(index, np.full(8, -1, dtype))
    message = wire.GroupGenerated(
        lease=script.aliases.long("generate:t0:0"),
        trajectories=tuple(result.trajectories),
        tensors=tuple(result.tensors),
    )
    event = received(script.state, 0.0, "rollout-0", 1, message, tuple(result.buffers))
    assert event.problem is not None
    assert event.problem.reason == "4 completions came, and a group has at most 3"


def test_limits_of_the_model_survive_a_restart_of_the_controller() -> None:
    script = Script()
    script.start_run(limits=wire.ModelLimits(longest=64))
    journal = [JournalEntry(write.record, write.payload) for write in script.journal]
    compacted = compact(script.state)
    assert compacted is not None
    for entries in (journal, [JournalEntry(compacted)]):
        controller = Controller(script.plan, Stream("train"), Stream("sft"), [], journal=entries, incarnation=2)
        assert controller.state.training.limits == wire.ModelLimits(longest=64)


def test_rollout_does_not_say_what_the_model_can_read() -> None:
    script = Script()
    script.start_run(limits=wire.ModelLimits(longest=64))
    hello = wire.Hello(
        role="rollout", host="h", pid=1, num_slots=1, has_layout=True, limits=wire.ModelLimits(longest=1 << 30)
    )
    script.receive("rollout-1", hello, encoded_layout("rollout-1"))
    journal = [JournalEntry(write.record, write.payload) for write in script.journal]
    controller = Controller(script.plan, Stream("train"), Stream("sft"), [], journal=journal, incarnation=2)
    assert controller.state.training.limits == script.state.training.limits == wire.ModelLimits(longest=64)


def test_images_beyond_the_limit_of_the_recipe_are_not_stored() -> None:
    script = Script(max_media_bytes=100)
    script.start_run()
    group = script.state.buffer.get(0)
    assert group is not None
    group.prompt = replace(group.prompt, media=(wire.Media(kind="image", uri="a.png"),))
    result = valid()
    result.put(4, np.zeros((4, 12), np.float32), "pixel_values")
    result.put(5, np.array([[1, 2, 2]], np.int64), "image_grid_thw")
    result.put(6, np.zeros((3, 3), np.int32), "position_ids")
    result.send(script)
    assert "rollout.max_media_bytes is 100" in reason(script)
    assert not is_stored(script)


@pytest.mark.parametrize(("k", "is_kept"), [(3, True), (4, False)])
def test_teacher_sends_no_more_likeliest_tokens_than_the_recipe_asks_for(k: int, is_kept: bool) -> None:
    script = Script(num_teachers=1, teacher_top_k=3)
    script.start_run()
    script.generates("rollout-0", "generate:t0:0")
    script.scores_tokens("teach:t0:0", k=k)
    assert is_kept or "teacher.top_k is 3" in reason(script)
    assert any(type(write.record).__name__ == "TeacherLogprobsStored" for write in script.journal) == is_kept
