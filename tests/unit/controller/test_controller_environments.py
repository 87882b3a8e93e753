"""Trajectories of environments: their rewards, loss masks and failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from transcript import Script

from starling.common.wire import messages as wire
from starling.controller.core.training.metrics import step_metrics
from starling.controller.core.training.samples import to_row

MASK = np.array([1, 0, 1, 1], np.uint8)


def trajectory(**changes: Any) -> wire.TrajectoryMeta:
    fields = {"status": wire.Status.OK, "num_tokens": 2, "text": "y", "oldest_version": 0, "newest_version": 0}
    return wire.TrajectoryMeta(**{**fields, **changes})


def environment_result(
    lease: str, *trajectories: wire.TrajectoryMeta, mask: bool = True
) -> tuple[wire.GroupGenerated, list[bytes]]:
    """Return the result of a group played with an environment, and its buffers."""
    total = sum(one.num_tokens for one in trajectories)
    kinds = [("int32", 1), ("int32", total), ("float32", total), ("int32", total)]
    tensors = [wire.TensorMeta(dtype=kind, shape=(n,), nbytes=4 * n) for kind, n in kinds]
    buffers = [bytes(tensor.nbytes) for tensor in tensors]
    if mask:
        tensors.append(wire.TensorMeta(dtype="uint8", shape=(total,), nbytes=total, name="loss_mask"))
        buffers.append(MASK[:total].tobytes())
    return wire.GroupGenerated(lease=lease, trajectories=trajectories, tensors=tuple(tensors)), buffers


def receive_result(script: Script, lease: str, *trajectories: wire.TrajectoryMeta, mask: bool = True) -> list[str]:
    message, buffers = environment_result(lease, *trajectories, mask=mask)
    return script.receive("rollout-0", message, *buffers)


def test_score_command_has_reward_and_number_of_sampled_tokens() -> None:
    script = Script()
    script.start_run()
    receive_result(
        script, "generate:t0:0", trajectory(reward=0.5, num_masked=1), trajectory(status=wire.Status.TRUNCATED)
    )
    (score,) = [send.message for send in script.sent if isinstance(send.message, wire.ScoreGroup)]
    assert score.completions == (
        wire.CompletionText(text="y", status=wire.Status.OK, num_tokens=1, reward=0.5),
        wire.CompletionText(text="y", status=wire.Status.TRUNCATED, num_tokens=2),
    )


def test_loss_mask_reaches_the_policy() -> None:
    script = Script(prompts_per_step=1)
    script.start_run()
    receive_result(script, "generate:t0:0", trajectory(num_masked=1), trajectory())
    script.scores("score:t0:0")
    (train,) = [send for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert train.message.groups[0].tensors[-1].name == "loss_mask"
    assert train.buffers[-1] == MASK.tobytes()


def test_truncation_is_the_mean_over_sampled_tokens() -> None:
    script = Script(prompts_per_step=2)
    script.start_run()
    receive_result(
        script, "generate:t0:0", trajectory(num_masked=1, truncation_nats=0.1), trajectory(truncation_nats=0.4)
    )
    receive_result(script, "generate:t1:0", trajectory(), trajectory(), mask=False)
    script.scores("score:t0:0")
    script.scores("score:t1:0")
    assert step_metrics(script.state.buffer, 1)["sampling/truncation_nats"] == pytest.approx(0.9 / 3)


def kept(script: Script, lease: str) -> list[str]:
    """Deliver a group with the kept tokens of its tokens, all of id 0."""
    message, buffers = environment_result(lease, trajectory(num_masked=1), trajectory())
    arrays = {"kept_counts": MASK.astype(np.int32), "kept_ids": np.zeros(3, np.int32)}
    tensors = tuple(
        wire.TensorMeta(dtype="int32", shape=one.shape, nbytes=one.nbytes, name=name) for name, one in arrays.items()
    )
    message = replace(message, tensors=(*message.tensors, *tensors))
    return script.receive("rollout-0", message, *buffers, *(one.tobytes() for one in arrays.values()))


RECORDED = wire.Sampling(max_tokens=8, top_p=0.8, top_k=3, logprobs="truncated")


def test_kept_tokens_reach_the_policy_and_no_teacher() -> None:
    script = Script(prompts_per_step=1, num_teachers=1, sampling=RECORDED)
    script.start_run()
    kept(script, "generate:t0:0")
    (asked,) = [send for send in script.sent if isinstance(send.message, wire.ScoreTokens)]
    assert len(asked.buffers) == 2
    script.scores("score:t0:0")
    script.scores_tokens("teach:t0:0", num_tokens=4)
    (train,) = [send for send in script.sent if isinstance(send.message, wire.TrainStep)]
    names = [tensor.name for tensor in train.message.groups[0].tensors[4:]]
    assert names == ["loss_mask", "kept_counts", "kept_ids", "teacher_logprobs"]


def test_result_without_the_kept_tokens_that_were_asked_for_is_a_failed_try() -> None:
    script = Script(sampling=RECORDED)
    script.start_run()
    lines = receive_result(script, "generate:t0:0", trajectory(num_masked=1), trajectory())
    group = script.state.buffer.get(0)
    assert group is not None
    assert group.tries == 1
    assert any("waiting" in line for line in lines), lines


def test_teacher_gets_no_loss_mask() -> None:
    script = Script(prompts_per_step=1, num_teachers=1)
    script.start_run()
    receive_result(script, "generate:t0:0", trajectory(num_masked=1), trajectory())
    script.scores("score:t0:0")
    script.scores_tokens("teach:t0:0", num_tokens=4)
    (train,) = [send for send in script.sent if isinstance(send.message, wire.TrainStep)]
    assert [tensor.name for tensor in train.message.groups[0].tensors[4:]] == ["loss_mask", "teacher_logprobs"]


def test_group_with_an_environment_error_is_retried_then_discarded() -> None:
    script = Script(max_tries=1)
    script.start_run()
    broken = trajectory(
        status=wire.Status.ENV_ERROR, num_tokens=0, problem="the environment raised KeyError: 'map'", num_turns=0
    )
    assert receive_result(script, "generate:t0:0", trajectory(), broken) == [
        "rollout-0 <- release generate:t0:0",
        "(waiting train0)",
        "rollout-0 <- generate:t0:1 train0 >= v0",
    ], "it is not scored"
    assert "(discarded train0)" in receive_result(script, "generate:t0:1", broken, broken)
    (note,) = [command for command in script.commands if getattr(command, "kind", "") == "discarded"]
    assert note.fields["status"] == "env_error"
    assert note.fields["reason"] == (
        "2 of its completions failed, completion 0 by env_error: the environment raised KeyError: 'map'"
    )
    assert script.state.buffer.num_env_errors == 2


def test_step_metrics_have_environment_metrics() -> None:
    script = Script(prompts_per_step=1)
    script.start_run()
    first = trajectory(metrics={"calls": 3.0, "won": 1.0}, num_turns=4, num_masked=1)
    receive_result(script, "generate:t0:0", first, trajectory(metrics={"calls": 1.0}, num_turns=2))
    script.scores("score:t0:0")
    metrics = step_metrics(script.state.buffer, 1)
    assert (metrics["env/calls"], metrics["env/won"], metrics["turns_mean"]) == (2.0, 1.0, 3.0)
    assert (metrics["completion_tokens_mean"], metrics["completion_tokens_max"]) == (1.5, 2)
    (group,) = script.state.buffer.frozen_groups(1)
    assert to_row(group, 0)["env/calls"] == 3.0
    assert to_row(group, 0)["num_turns"] == 4


@pytest.mark.parametrize("status", [wire.Status.ENV_ERROR, wire.Status.INFRA_LOST])
def test_only_environments_are_counted(status: wire.Status) -> None:
    script = Script()
    script.start_run()
    receive_result(script, "generate:t0:0", trajectory(), trajectory(status=status, problem="gone"))
    assert script.state.buffer.num_env_errors == (status is wire.Status.ENV_ERROR)
