"""Policies that make steps together: they read the same groups, and never sum gradients of different batches."""

from __future__ import annotations

from typing import Any

import pytest
from transcript import Script, encoded_layout

from starling.common.wire import messages as wire

POLICIES = ("policy-0", "policy-1")
LIMITS = wire.ModelLimits(vocabulary_size=100, longest=64)
MEDIA = wire.MediaInputs(image_token_id=90, video_token_id=91, patch_values=12, merge_size=2, num_positions=3)


def join(script: Script, name: str, limits: wire.ModelLimits | None = LIMITS, version: int = 0) -> list[str]:
    """Let a policy join whose model reads groups of these limits; return the lines."""
    hello = wire.Hello(
        role="policy", host="h", pid=1, version=version, has_layout=True, serves=True, peer="h:1", limits=limits
    )
    return script.receive(name, hello, encoded_layout(name))


def two_policies_in_a_step(**changes: Any) -> Script:
    """Return a run whose two policies make step 1 of two groups."""
    script = Script(max_tries=3, **changes)
    for name in POLICIES:
        join(script, name)
    script.joins("reward-0", slots=8)
    script.joins("rollout-0")
    script.joins("rollout-1")
    script.publishes(0)
    script.adopts("rollout-0", 0, 0)
    script.adopts("rollout-1", 0, 1)
    script.complete_groups("generate:t0:0", "generate:t1:0")
    return script


def steps(script: Script) -> dict[str, wire.TrainStep]:
    """Return the step that each policy is to make."""
    return {
        name: lease.send.message
        for name in POLICIES
        for lease in script.state.replicas.leases.all_of(name)
        if lease.send is not None and isinstance(lease.send.message, wire.TrainStep)
    }


def reject_first_group(script: Script, name: str) -> None:
    """Let a policy reject the first group of its step, which is then generated again."""
    step = steps(script)[name]
    [ordinal] = [g.ordinal for g in script.state.buffer.frozen_groups(1) if g.prompt.id == step.groups[0].prompt_id]
    script.receive(
        name,
        wire.LeaseFailed(
            lease=step.lease,
            status=wire.Status.INFRA_LOST,
            reason="a token is too large",
            fatal=True,
            version=0,
            rejected=(step.groups[0].prompt_id,),
        ),
    )
    script.complete_groups(f"generate:t{ordinal}:1")


def trained(step: wire.TrainStep, digest: int) -> wire.StepTrained:
    return wire.StepTrained(lease=step.lease, step=step.step, metrics={}, batch_digest=digest)


def test_step_without_a_rejected_group_is_made_in_other_process_groups() -> None:
    """One that still computes the first batch would otherwise add its gradients to those of the second one."""
    script = two_policies_in_a_step()
    first = steps(script)
    assert len({step.group for step in first.values()}) == 1
    reject_first_group(script, "policy-0")
    again = steps(script)
    assert sorted(again) == [*POLICIES]
    assert len({step.group for step in again.values()}) == 1
    assert again["policy-0"].group not in {step.group for step in first.values()}
    assert not script.state.lifecycle.failure


@pytest.mark.parametrize(
    "other",
    [
        wire.ModelLimits(vocabulary_size=100, longest=2),
        wire.ModelLimits(vocabulary_size=101, longest=64),
        wire.ModelLimits(vocabulary_size=100, longest=64, media=MEDIA),
        None,
    ],
)
def test_policy_whose_model_reads_other_groups_is_refused(other: wire.ModelLimits | None) -> None:
    script = Script(num_policies=2)
    assert "policy-0 <- welcome" in join(script, "policy-0")
    lines = join(script, "policy-1", other)
    assert lines[-1] == (
        "policy-1 <- refused: policy-1 has a model that reads other groups than that of policy-0, whose steps it would "
        "share (vocabulary, length or images); start it with the same model folder"
    )
    assert script.state.training.limits == LIMITS


def test_policy_whose_predecessor_has_left_may_read_other_groups() -> None:
    script = Script()
    join(script, "policy-0")
    script.leaves("policy-0")
    other = wire.ModelLimits(vocabulary_size=100, longest=2)
    join(script, "policy-0", other)
    assert script.state.training.limits == other


def test_policy_that_reports_other_groups_after_the_commit_ends_the_run() -> None:
    script = two_policies_in_a_step()
    step = steps(script)
    script.receive("policy-0", trained(step["policy-0"], 7))
    script.heartbeats("policy-1", version=1)
    assert script.state.version == 1
    script.receive("policy-1", trained(step["policy-1"], 8))
    assert script.state.lifecycle.failure == (
        "policy-0 and policy-1 trained different groups in step 1: they run different code"
    )


def test_policy_that_reports_the_same_groups_after_the_commit_is_believed() -> None:
    script = two_policies_in_a_step()
    step = steps(script)
    script.receive("policy-0", trained(step["policy-0"], 7))
    script.heartbeats("policy-1", version=1)
    script.receive("policy-1", trained(step["policy-1"], 7))
    assert not script.state.lifecycle.failure


def test_policy_that_made_the_step_of_a_former_dispatch_from_other_groups_ends_the_run() -> None:
    script = two_policies_in_a_step()
    first = steps(script)
    reject_first_group(script, "policy-0")
    again = steps(script)
    script.receive("policy-1", trained(first["policy-1"], 8))
    script.receive("policy-0", trained(again["policy-0"], 7))
    assert script.state.lifecycle.failure == (
        "policy-0 and policy-1 trained different groups in step 1: they run different code"
    )
