"""Runs that train nothing, whose weights a policy publishes as version 0."""

from __future__ import annotations

from typing import Any

import pytest
from transcript import Script

from starling.common.kinds import INFER
from starling.common.wire import messages as wire
from starling.controller.core.records import CheckpointLoaded
from starling.sim.replicas.weights import encoded_layout

DIGEST, OTHER = "0" * 32, "1" * 32


def answering(**changes: Any) -> Script:
    """Return a run that answers four prompts, one per file."""
    plan = {"kind": INFER, "num_prompts": 4, "num_steps": 4, "num_rewards": 0, "prompts_per_step": 1, "fans_out": True}
    return Script(**{**plan, "max_staleness": 3, **changes})


def joins_with(script: Script, name: str, digest: str) -> list[str]:
    role: Any = name.rpartition("-")[0]
    slots, version = (0, 0) if role == "policy" else (8, -1)
    hello = wire.Hello(
        role=role, host="h", pid=1, num_slots=slots, version=version, has_layout=True, serves=True, checkpoint=digest
    )
    return script.receive(name, hello, encoded_layout(name))


def test_rollouts_pull_version_0_before_they_answer() -> None:
    script = answering()
    script.joins("rollout-0", slots=8)
    assert "policy that publishes the weights of the model folder" in script.controller.waiting_for
    assert script.joins("policy-0")[-1] == "policy-0 <- publish:0:0"
    [command] = [s.message for s in script.commands_sent.values() if isinstance(s.message, wire.PublishWeights)]
    assert len(command.layouts) == 1, "the policy computes the layout root of the rollout that waits"
    assert "rollout-0 <- adopt:0:0" in script.publishes(0)
    assert not script.state.replicas.leases.has("generate")
    script.adopts("rollout-0", 0)
    assert script.state.replicas.leases.num("rollout-0", "generate") == 4


def test_rollout_that_joins_when_files_are_written_pulls_version_0_too() -> None:
    script = answering(save_every=1)
    script.joins("policy-0")
    script.joins("rollout-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.generates("rollout-0", "generate:t0:0")
    script.state.version = 2  # as if two files were written
    lines = script.joins("rollout-1", slots=8)
    assert "rollout-1 <- adopt:0:1" in lines
    assert not script.state.replicas.leases.has("save"), "there is no state to save"


def test_run_goes_on_without_the_policy_once_rollouts_hold_the_weights() -> None:
    script = answering()
    script.joins("policy-0")
    script.joins("rollout-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.leaves("policy-0")
    assert "policy" not in script.controller.waiting_for
    assert script.state.replicas.leases.num("rollout-0", "generate") == 4


def test_rollout_that_joins_when_the_policy_is_gone_pulls_from_another_rollout() -> None:
    script = answering()
    joins_with(script, "policy-0", DIGEST)
    joins_with(script, "rollout-0", "")
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.leaves("policy-0")
    assert "rollout-0 <- publish:0:1" in script.joins("rollout-1", slots=8)


def test_digest_of_the_policys_folder_is_journaled_and_holds_for_its_next_incarnation() -> None:
    script = answering()
    joins_with(script, "policy-0", DIGEST)
    [loaded] = [write.record for write in script.journal if isinstance(write.record, CheckpointLoaded)]
    assert (loaded.digest, loaded.name) == (DIGEST, "policy-0")
    script.restart()
    lines = joins_with(script, "policy-0", OTHER)
    assert any("policy-0 has loaded another checkpoint than this run began with" in line for line in lines)
    assert not script.state.replicas.membership.num("policy")


@pytest.mark.parametrize("reads", [False, True])
def test_rollout_that_joins_before_the_policy_does_not_decide_about_its_checkpoint(*, reads: bool) -> None:
    """One that lies would keep the policy out, also after the run is resumed."""
    script = answering(reads_checkpoint=reads)
    joins_with(script, "rollout-0", OTHER)
    if reads:
        script.reads_checkpoint("")
    joins_with(script, "policy-0", DIGEST)
    assert script.state.replicas.membership.num("policy") == 1
    assert script.state.weights.checkpoint == DIGEST


def test_policy_of_a_run_whose_rollouts_read_the_folder_is_refused() -> None:
    script = answering(fans_out=False)
    lines = script.joins("policy-0")
    assert any("its rollouts read their weights themselves; start no policy" in line for line in lines)


@pytest.mark.parametrize("version", [1, 7])
def test_policy_with_a_trained_version_is_refused(version: int) -> None:
    script = answering()
    script.state.version = 3
    assert any(f"the policy offers version {version}" in line for line in script.joins("policy-0", version=version))


def test_stop_ends_a_run_with_such_a_policy_without_a_checkpoint() -> None:
    script = answering()
    script.joins("policy-0")
    script.joins("rollout-0", slots=8)
    script.publishes(0)
    script.adopts("rollout-0", 0)
    script.request_stop()
    assert str(script.state.lifecycle.stage) == "draining"
    assert not script.state.replicas.leases.has("checkpoint")
