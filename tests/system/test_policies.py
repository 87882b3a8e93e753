"""Several policies in a run: they make each step together, and join, die, hang and return meanwhile."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from system_runs import (
    attempt,
    checkpoints,
    make_workdir,
    metrics,
    num_steps,
    run,
    run_concurrently,
    trained,
)

pytestmark = pytest.mark.system

NUM_SFT = 3
LONG = {"num_steps": 100_000}
RUN_S = 300.0
"""Deadline of a run, on a busy machine with fewer processors than the run has processes."""


def shared_run(folder: Path, **changes: Any) -> None:
    launch = {"num_policies": 2, "num_rollouts": 1} | changes.pop("launch", {})
    with run(make_workdir(folder, launch=launch, **changes)) as command:
        assert command.wait(RUN_S) == 0, command.transcript()


def single_run(folder: Path) -> None:
    with run(make_workdir(folder, launch={"num_rollouts": 1})) as command:
        assert command.wait(RUN_S) == 0, command.transcript()


def assert_whole(folder: Path) -> None:
    """Assert that each step was made once, of groups that were trained once, and that all adopted weights are right."""
    num_rl = num_steps(folder) - NUM_SFT
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, NUM_SFT + num_rl + 1))
    assert len(trained(folder)) == num_rl * 4
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder) == [f"step-{NUM_SFT + num_rl}"]
    assert all(line["attested"] for line in metrics(folder, "adopted"))


def test_steps_of_two_policies_are_those_of_one(tmp_path: Path) -> None:
    """Supervised steps, which have no samples, have the same losses."""
    scenarios = (partial(shared_run, tmp_path / "shared"), partial(single_run, tmp_path / "single"))
    run_concurrently(*scenarios, max_workers=2)
    assert num_steps(tmp_path / "shared") == NUM_SFT + 6
    assert_whole(tmp_path / "shared")
    expected, found = (metrics(tmp_path / name, "step")[:NUM_SFT] for name in ("single", "shared"))
    for one, other in zip(expected, found, strict=True):
        for key in ("loss", "grad_norm", "num_tokens", "update_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-4)
    assert all(line["batch_digest"] for line in metrics(tmp_path / "shared", "step")[NUM_SFT:])
    log = (attempt(tmp_path / "shared") / "logs" / "policy-1.log").read_text()
    assert "ready" in log


def policies_that_adopted(folder: Path) -> list[str]:
    return [line["replica"] for line in metrics(folder, "adopted") if line["replica"].startswith("policy-")]


def check_deaths(folder: Path, parallel: dict[str, Any]) -> None:
    """Kill each policy in turn; the run goes on, and the one that returns copies the state of the other."""
    changes: dict[str, Any] = {
        "launch": {"num_policies": 2, "num_rollouts": 1, "max_restarts": 9},
        "policy": {"parallel": parallel},
        "controller": {"save_every": 20, "save_rest_s": 0.0},
    }
    with run(make_workdir(folder, rl=LONG, **changes)) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        for number, name in enumerate(("policy-1", "policy-0", "policy-1"), start=1):
            command.process_titled(name).kill()
            command.wait_until(
                lambda number=number: len(policies_that_adopted(folder)) >= number, f"the return of {name}"
            )
            made = num_steps(folder)
            command.wait_until(lambda made=made: num_steps(folder) >= made + 3, f"steps after the return of {name}")
        command.interrupt()
        assert command.wait(RUN_S) == 0, command.transcript()
    assert_whole(folder)
    assert policies_that_adopted(folder)[:3] == ["policy-1", "policy-0", "policy-1"]


@pytest.mark.campaign
def test_policies_that_die_return_with_the_state_of_the_other(tmp_path: Path) -> None:
    check_deaths(tmp_path, {})


@pytest.mark.campaign
def test_policies_of_two_ranks_die_and_return(tmp_path: Path) -> None:
    check_deaths(tmp_path, {"tp": 2})


@pytest.mark.campaign
def test_policy_that_hangs_is_left_behind(tmp_path: Path) -> None:
    """One that sends heartbeats and computes nothing is evicted; when it continues, it takes part again."""
    policy = {"publish_timeout_s": 2.0, "parallel": {"replica_timeout_s": 5.0}}
    changes: dict[str, Any] = {"policy": policy, "network": {"lease_s": 10.0}}
    launch = {"num_policies": 2, "num_rollouts": 1}
    with run(make_workdir(tmp_path, rl=LONG, launch=launch, **changes)) as command:
        command.wait_until(lambda: trained(tmp_path), "a step of reinforcement")
        hanging = command.process_titled("policy-1")
        hanging.send_signal(signal.SIGSTOP)
        made = num_steps(tmp_path)
        command.wait_until(lambda: num_steps(tmp_path) >= made + 5, "steps without it")
        hanging.send_signal(signal.SIGCONT)
        command.wait_until(lambda: "policy-1" in policies_that_adopted(tmp_path), "its return")
        command.interrupt()
        assert command.wait(RUN_S) == 0, command.transcript()
    assert_whole(tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("changes", [{"parallel": {"tp": 2}}, {"num_policies": 2}], ids=["a mesh", "two policies"])
def test_colocated_policies_and_rollouts_take_turns(changes: dict[str, Any], tmp_path: Path) -> None:
    launch = {"colocate": True, "num_policies": changes.get("num_policies", 1), "num_rollouts": 1}
    policy = {"parallel": changes.get("parallel", {})}
    with run(make_workdir(tmp_path, launch=launch, policy=policy)) as command:
        assert command.wait(RUN_S) == 0, command.transcript()
    assert num_steps(tmp_path) == NUM_SFT + 6
    assert_whole(tmp_path)
