"""Teachers: every group of a step has teacher log-probabilities before it is trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from transcript import TEACHER_TENSORS, Script

from starling.common.wire import messages as wire
from starling.controller.core.groups.group import GroupState
from starling.controller.core.plan import RunPlan


def script(**changes: object) -> Script:
    run = Script(**{"num_teachers": 1, "prompts_per_step": 1, **changes})
    run.start_run()
    return run


def dispatched_step(run: Script) -> tuple[wire.TrainStep, tuple[bytes, ...]]:
    """Return the last dispatched step, with its buffers."""
    [send] = [send for send in run.sent if isinstance(send.message, wire.TrainStep)]
    assert isinstance(send.message, wire.TrainStep)
    return send.message, tuple(bytes(buffer) for buffer in send.buffers)


@pytest.mark.parametrize("order", itertools.permutations(["score", "teach"]))
def test_group_is_trained_with_teacher_logprobs(order: tuple[str, str]) -> None:
    run = script()
    run.generates("rollout-0", "generate:t0:0")
    does: dict[str, Callable[[], list[str]]] = {
        "score": lambda: run.scores("score:t0:0"),
        "teach": lambda: run.scores_tokens("teach:t0:0", k=2),
    }
    first, second = order
    assert not any("train" in line for line in does[first]())
    assert run.state.buffer.count(GroupState.GENERATED) == 1
    assert "policy-0 <- train:1:0 train0" in does[second]()
    command, buffers = dispatched_step(run)
    [group] = command.groups
    assert [tensor.name for tensor in group.tensors] == ["", "", "", "", *TEACHER_TENSORS]
    assert [tensor.nbytes for tensor in group.tensors] == [len(buffer) for buffer in buffers]
    assert [buffer[:1] for buffer in buffers[4:]] == [b"\1", b"\2", b"\3"]
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 0.0]


def test_teacher_gets_only_token_ids_and_temperature() -> None:
    run = script(sampling=wire.Sampling(max_tokens=4, temperature=0.5))
    run.generates("rollout-0", "generate:t0:0")
    [send] = [send for send in run.sent if isinstance(send.message, wire.ScoreTokens)]
    assert isinstance(send.message, wire.ScoreTokens)
    assert (send.message.prompt_id, send.message.lengths, send.message.temperature) == ("train0", (1, 1), 0.5)
    assert [tensor.dtype for tensor in send.message.tensors] == ["int32", "int32"]
    assert [len(buffer) for buffer in send.buffers] == [4, 8]


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ({"num_tokens": 3}, "its teacher sent teacher_logprobs (3,), and it has 2 tokens"),
        ({"names": ("logits",)}, "its teacher sent logits (2,), and it has 2 tokens"),
        ({"names": ()}, "its teacher sent nothing, and it has 2 tokens"),
    ],
)
def test_invalid_teacher_logprobs_discard_the_completions(names: dict[str, int], reason: str) -> None:
    run = script(max_tries=0)
    run.generates("rollout-0", "generate:t0:0")
    run.scores_tokens("teach:t0:0", **names)  # type: ignore[arg-type]
    assert run.state.buffer.last_discarded == f"prompt train0: {reason}"
    assert "reward-0 <- release score:t0:0" in run.sent_lines(), "its rewards are no longer needed"


@pytest.mark.parametrize(("top_k", "k"), [(0, 2), (2, 0), (2, 1), (2, 3)])
def test_teacher_that_sends_another_number_of_likeliest_tokens_is_refused(top_k: int, k: int) -> None:
    run = script(max_tries=0, teacher_top_k=top_k)
    run.generates("rollout-0", "generate:t0:0")
    run.scores_tokens("teach:t0:0", k=k)
    assert run.state.buffer.count(GroupState.GENERATED) == 0, "a policy cannot train a step of several numbers"
    assert "teacher.top_k is" in run.state.buffer.last_discarded


def sends_teacher_tensors(run: Script, logprobs: list[float], top_ids: list[int]) -> None:
    """The teacher answers for the two tokens of the first group, with one likeliest token at each."""
    arrays = (np.array(logprobs, np.float32), np.array([top_ids], np.int32).T, np.zeros((2, 1), np.float32))
    metas = [
        wire.TensorMeta(dtype=array.dtype.name, shape=array.shape, nbytes=array.nbytes, name=name)
        for name, array in zip(TEACHER_TENSORS, arrays, strict=True)
    ]
    message = wire.TokensScored(lease="teach:t0:0", tensors=tuple(metas))
    run.receive("teacher-0", message, *[array.tobytes() for array in arrays])


@pytest.mark.filterwarnings("ignore:overflow encountered in dot")
@pytest.mark.parametrize(
    ("logprobs", "top_ids", "reason"),
    [
        ([0.0, -3.4e38], [0, 0], "are usable"),
        ([0.0, 3.4e38], [0, 0], "are usable"),
        ([0.0, 0.0], [0, 100], "it has token id 100, and the model has 100 token ids"),
        ([0.0, 0.0], [0, -1], "it has a negative token id"),
    ],
)
def test_teacher_is_asked_for_what_the_policy_can_train(logprobs: list[float], top_ids: list[int], reason: str) -> None:
    run = Script(num_teachers=1, prompts_per_step=1, max_tries=0)
    run.start_run(limits=wire.ModelLimits(vocabulary_size=100))
    run.generates("rollout-0", "generate:t0:0")
    sends_teacher_tensors(run, logprobs, top_ids)
    assert reason in run.state.buffer.last_discarded


def test_prompt_with_images_cannot_be_scored_by_a_teacher() -> None:
    run = script()
    group = run.state.buffer.get(0)
    assert group is not None
    group.prompt = msgspec.structs.replace(group.prompt, media=(wire.Media(kind="image", uri="a.png"),))
    tensor = wire.TensorMeta(dtype="int32", shape=(2,), nbytes=8)
    meta = wire.TrajectoryMeta(status=wire.Status.OK, num_tokens=1, text="y", oldest_version=0, newest_version=0)
    grid = wire.TensorMeta(dtype="int64", shape=(1, 3), nbytes=24, name="image_grid_thw")
    run.receive(
        "rollout-0",
        wire.GroupGenerated(lease="generate:t0:0", trajectories=(meta,) * 2, tensors=(*(tensor,) * 4, grid)),
        *(bytes(8),) * 4,
        bytes(24),
    )
    assert (
        run.state.buffer.last_discarded
        == "prompt train0: its prompt has more than tokens, and a teacher reads nothing else"
    )


def test_filtered_group_is_revoked_from_its_teacher() -> None:
    run = script(dynamic_sampling=True)
    run.generates("rollout-0", "generate:t0:0")
    assert "teacher-0 <- release teach:t0:0" in run.scores("score:t0:0", 1.0, 1.0)
    assert run.scores_tokens("teach:t0:0") == ["teacher-0 <- release teach:t0:0"], "the late result is ignored"
    assert not run.state.replicas.leases.has("teach")


def test_evaluation_needs_no_teacher() -> None:
    run = Script(num_teachers=1, evaluate_at_start=True)
    run.start_run(slots=8)
    for ordinal in (0, 1):
        run.generates("rollout-0", f"generate:e{ordinal}:0", num=1)
        assert not any("teach:e" in line for line in run.sent_lines())
        run.scores(f"score:e{ordinal}:0", 1.0)
    assert run.state.evaluations.evaluated == {"start": 0}


def test_run_without_scorers_trains_rewards_of_zero() -> None:
    run = script(num_rewards=0)
    run.generates("rollout-0", "generate:t0:0")
    run.scores_tokens("teach:t0:0")
    command, _ = dispatched_step(run)
    assert [trajectory.reward for trajectory in command.groups[0].trajectories] == [0.0, 0.0]


def test_run_waits_for_its_teachers_and_fails_without() -> None:
    run = Script(num_teachers=2, start_s=5.0)
    run.start_run()
    run.leaves("teacher-1")
    assert run.controller.waiting_for.startswith("the groups of step 1"), (
        "one teacher is enough once the run has started"
    )
    run.leaves("teacher-0")
    assert run.controller.waiting_for == "needs 1 teacher replica, has 0"
    run.advance_time(1)
    for name in ("policy-0", "reward-0", "rollout-0"):
        run.heartbeats(name, version=0)
    lines = run.advance_time(6)
    assert any("the run needs 1 teacher replica, has 0, for 5 s" in line for line in lines)


def test_fully_frozen_run_needs_no_teacher() -> None:
    run = script(num_steps=1)
    run.generates("rollout-0", "generate:t0:0")
    run.scores("score:t0:0")
    run.scores_tokens("teach:t0:0")
    run.leaves("teacher-0")
    assert run.controller.waiting_for == "the policy to train step 1"


def test_run_resumed_with_another_number_of_likeliest_tokens_generates_its_groups_again() -> None:
    run = script(teacher_top_k=2, prompts_per_step=2)
    run.generates("rollout-0", "generate:t0:0")
    run.scores("score:t0:0")
    run.scores_tokens("teach:t0:0", k=2)
    run.generates("rollout-0", "generate:t1:0")
    assert "policy" not in str(run.scores_tokens("teach:t1:0", k=2))
    run.plan = replace(run.plan, teacher_top_k=1)
    run.restart()
    run.advance_time(1)
    assert [(group.state, group.tries) for group in run.state.buffer.live()] == [(GroupState.WAITING, 0)] * 2
    run.plan = replace(run.plan, teacher_top_k=2)
    run.restart()
    assert {group.state for group in run.state.buffer.live()} == {GroupState.WAITING}, "the journal has it"


def test_step_frozen_before_a_resume_with_another_number_of_likeliest_tokens_is_reopened() -> None:
    run = script(teacher_top_k=2)
    run.generates("rollout-0", "generate:t0:0")
    run.scores("score:t0:0")
    assert "policy-0 <- train:1:0 train0" in run.scores_tokens("teach:t0:0", k=2)
    run.plan = replace(run.plan, teacher_top_k=0)
    run.restart()
    run.advance_time(1)
    assert run.state.buffer.num_frozen_steps == 0
    assert [group.state for group in run.state.buffer.live()] == [GroupState.WAITING]


def test_plan_with_teachers() -> None:
    plan = RunPlan(seed=0, sampling=wire.Sampling(max_tokens=1), eval_sampling=wire.Sampling(max_tokens=1))
    assert not plan.has_teachers
    assert plan.timeouts.of("teach") == plan.timeouts.teach_s
