"""Sizes of groups: what a rollout or a teacher sends beyond what the recipe allows is refused, and not stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from generated_results import Result, reason, valid
from msgspec.structs import replace
from transcript import Script, Stream

from starling.common.errors import WireError
from starling.common.ranges import MAX_TOKENS
from starling.common.wire import codec
from starling.common.wire import messages as wire
from starling.common.wire.tensors import (
    KEPT_COUNTS,
    KEPT_IDS,
    KEPT_TENSORS,
    LOSS_MASK,
    PROMPT_TENSORS,
    ROUTING_TENSORS,
    TEACHER_TENSORS,
)
from starling.controller.core.compaction import compact
from starling.controller.core.events import Received
from starling.controller.core.groups.arrival import received
from starling.controller.core.groups.validation.limits import MESSAGE_BYTES
from starling.controller.core.groups.validation.validation import MAX_TEXT_CHARACTERS, MAX_TOKEN_CHARACTERS
from starling.controller.core.machine import Controller
from starling.controller.core.records import CompletionsStored, JournalEntry, PartialCompletionsStored
from starling.controller.core.training.train_groups import step_problem
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


@pytest.mark.parametrize("field", ["text", "problem"])
def test_text_that_no_tokens_have_is_not_stored(field: str) -> None:
    """A group could have 16 MiB of it, whatever its tokens: the controller holds those of all groups of some steps."""
    script = Script()
    script.start_run()
    result = valid()
    result.change(1, **{field: "x" * (MAX_TEXT_CHARACTERS + 2 * MAX_TOKEN_CHARACTERS + 1)})
    result.send(script)
    assert "completion 1 has 2 tokens and 660" in reason(script)
    assert not is_stored(script)
    assert "rollout-0" in script.state.replicas.membership.members


@pytest.mark.parametrize("num_kept", [70, 71])
@pytest.mark.parametrize("is_partial", [False, True])
def test_kept_tokens_that_truncation_does_not_keep_are_not_stored(num_kept: int, is_partial: bool) -> None:
    """`num_kept` at each of four positions; with a top_k of 3 at most 70 are possible, because some may be equal."""
    script = Script(sampling=wire.Sampling(max_tokens=8, top_k=3, logprobs="truncated"))
    script.start_run()
    result = valid()
    result.put(4, np.full(4, num_kept, np.int32), KEPT_COUNTS)
    result.put(5, np.tile(np.arange(num_kept, dtype=np.int32), 4), KEPT_IDS)
    if is_partial:
        interrupted = wire.GroupInterrupted(
            lease="generate:t0:0",
            reason="it leaves",
            partial=(wire.PartialCompletionMeta(num_tokens=2),) * 2,
            tensors=tuple(result.tensors[1:]),
        )
        script.receive("rollout-0", interrupted, *result.buffers[1:])
    else:
        result.send(script)
    stored = [w for w in script.journal if isinstance(w.record, CompletionsStored | PartialCompletionsStored)]
    assert bool(stored) == (num_kept == 70)
    assert "rollout-0" in script.state.replicas.membership.members


def test_evaluation_of_more_completions_than_the_recipe_has_is_generated() -> None:
    """An operator may request any number: a rollout that answers as it was told was blamed for it, and evicted."""
    script = Script(num_steps=9)
    script.start_run()
    script.receive("operator-0", wire.RequestEvaluation(request="r", num_completions=3))
    script.generates("rollout-0", "generate:t0:0")
    script.generates("rollout-0", "generate:t1:0")
    leases = script.state.replicas.leases.of("rollout-0", "generate")
    [lease, *_] = [script.aliases.short(one) for one in leases if one.startswith("generate:e")]
    script.generates("rollout-0", lease, num=3)
    assert any(isinstance(w.record, CompletionsStored) and w.record.key.startswith("e") for w in script.journal)


def test_messages_are_bounded_by_the_largest_group_of_the_run() -> None:
    script = Script(max_model_len=64, teacher_top_k=3, num_teachers=1)
    state = script.controller.state
    assert state.message_bytes()["rollout"] > 1 << 32, "the images of the model are not known before it joins"
    script.start_run(limits=wire.ModelLimits(longest=64))
    most, num_tokens = state.message_bytes(), state.plan.group_size * 64
    group = long_prompt(64)
    for index, dtype in enumerate((np.int32, np.float32, np.int32), 1):
        group.put(index, np.zeros(num_tokens, dtype))
    group.put(4, np.zeros(num_tokens, np.uint8), LOSS_MASK)
    assert sum(map(len, group.buffers)) <= most["rollout"] - MESSAGE_BYTES <= 2 * sum(map(len, group.buffers))
    assert most["teacher"] == MESSAGE_BYTES + num_tokens * (4 + 3 * 8)


def test_kept_tokens_may_make_messages_larger() -> None:
    sampling = wire.Sampling(max_tokens=8, top_k=2, logprobs="truncated")
    script = Script(max_model_len=64, sampling=sampling)
    script.start_run(limits=wire.ModelLimits(longest=64))
    state = script.controller.state
    before = state.message_bytes()["rollout"]
    state.training.changes.add("sampling.top_k", 5.0, 2, "r")
    state.training.changes.add("sampling.top_k", 1.0, 3, "s")
    assert state.message_bytes()["rollout"] - before == 2 * 3 * 4 * state.plan.group_size * 64


def test_context_of_the_model_bounds_messages_where_the_recipe_does_not() -> None:
    script = Script()
    script.start_run(limits=wire.ModelLimits(longest=64))
    most = script.controller.state.message_bytes()
    assert most["rollout"] < 2 * MESSAGE_BYTES
    assert most["teacher"] > 1 << 32, "teacher.top_k is not known"


@pytest.mark.parametrize(
    ("group_size", "sampling", "has_teacher"),
    [
        (1, wire.Sampling(max_tokens=1), False),
        (8, wire.Sampling(max_tokens=1), True),
        (8, wire.Sampling(max_tokens=1, logprobs="truncated", routing="replayed"), True),
        (64, wire.Sampling(max_tokens=1, routing="replayed"), False),
        (4096, wire.Sampling(max_tokens=1, logprobs="truncated"), False),
    ],
)
def test_largest_step_fits_into_a_message(group_size: int, sampling: wire.Sampling, has_teacher: bool) -> None:
    """With all tensors that a group may have, and with the largest numbers in it."""

    def problem(prompts_per_step: int) -> str:
        return step_problem(prompts_per_step, group_size, sampling, has_teacher=has_teacher)

    found = problem(10**6)
    assert found.startswith(f"rl.prompts_per_step = 1000000 with rl.group_size = {group_size} does not fit")
    most = int(found.rpartition("set at most ")[2].split()[0])
    assert problem(most) == ""
    assert problem(most + 1)
    names = ["", "", "", "", LOSS_MASK, *PROMPT_TENSORS]
    names += [*(KEPT_TENSORS if sampling.logprobs == "truncated" else ()), *(TEACHER_TENSORS if has_teacher else ())]
    names += ROUTING_TENSORS if sampling.routing == "replayed" else ()
    tensors = tuple(wire.TensorMeta(dtype="float32", shape=(1 << 30, 9), nbytes=1 << 30, name=name) for name in names)
    trajectory = wire.ScoredTrajectory(
        num_tokens=MAX_TOKENS, oldest_version=1 << 31, reward=-1e15, status=wire.Status.TRUNCATED
    )
    group = wire.TrainGroup(
        prompt_id="train/1000/1000000", trajectories=(trajectory,) * group_size, tensors=tensors, temperature=0.7
    )
    step = wire.TrainStep(lease="train:1:1.1", step=1, num_steps=9, groups=(group,) * most)
    envelope = wire.Envelope(protocol=1, run="r", sender="controller", incarnation=1, seq=1)
    assert len(codec.pack(envelope, step, [b""] * (len(tensors) * most))) <= codec.MAX_BUFFERS + 2


def test_message_with_too_many_buffers_is_not_sent() -> None:
    """Its receiver would drop it, and the sender would send it again for ever."""
    envelope = wire.Envelope(protocol=1, run="r", sender="controller", incarnation=1, seq=1)
    with pytest.raises(WireError, match="a Sleep with 65537 buffers is over the limit of 65536; make the step smaller"):
        codec.pack(envelope, wire.Sleep(lease="sleep:0"), [b""] * 65537)
