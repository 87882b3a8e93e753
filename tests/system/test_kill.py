"""Killed and suspended processes: the run continues where it can, and otherwise fails and names the process."""

from __future__ import annotations

import resource
from functools import partial
from pathlib import Path

import pytest
from system_runs import (
    Command,
    attempt,
    checkpoints,
    make_workdir,
    metrics,
    num_steps,
    run,
    run_concurrently,
    sentence,
    trained,
)

pytestmark = pytest.mark.system

ENDLESS = 100_000
ENDLESS_SFT = {"run": {"kind": "sft"}, "evaluation": {}, "sft": {"num_steps": ENDLESS}}


NO_RESTARTS = {"launch": {"num_rollouts": 1, "max_restarts": 0}}


def assert_fails_and_names(command: Command, name: str, line: str, restarts: str = "") -> None:
    """Assert that the run fails, names the killed process, and shows the last lines of its log."""
    assert command.wait() == 1, command.transcript()
    assert sentence(command) == f"{name} was killed by SIGKILL{restarts}; its last lines:"
    shown = [text for text in command.errors.splitlines() if text.startswith("  | ")]
    assert any(line in text for text in shown), command.transcript()
    assert command.errors.splitlines()[-1].endswith(f"logs/{name}.log")


def policy_killed(folder: Path) -> None:
    with run(make_workdir(folder, **ENDLESS_SFT, **NO_RESTARTS)) as command:
        command.wait_until(lambda: num_steps(folder) >= 2, "two steps")
        command.process_titled("policy-0").kill()
        assert_fails_and_names(command, "policy-0", "ready")


def reward_killed(folder: Path) -> None:
    with run(make_workdir(folder, **NO_RESTARTS)) as command:
        command.wait_for_output("replica=reward-0")
        command.process_titled("reward-0").kill()
        assert_fails_and_names(command, "reward-0", "ready")


def controller_killed(folder: Path) -> None:
    with run(make_workdir(folder, **NO_RESTARTS)) as command:
        command.wait_for_output("replica=reward-0")
        command.process_titled("controller").kill()
        assert_fails_and_names(command, "controller", "joined")


def only_rollout_killed_repeatedly(folder: Path) -> None:
    with run(make_workdir(folder, launch={"max_restarts": 2}, rl={"num_steps": ENDLESS})) as command:
        for restarts in range(3):
            joined = f"join {restarts + 1} of rollout-0"
            command.wait_until(lambda n=restarts: len(lines_about(folder, "joined", "rollout-0")) > n, joined)
            command.process_titled("rollout-0").kill()
        assert_fails_and_names(command, "rollout-0", "ready", " after 2 restarts")


def supervisor_killed(folder: Path) -> None:
    """Without the supervisor the processes still end, and leave nothing."""
    with run(make_workdir(folder, rl={"num_steps": ENDLESS}), fresh=True) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        assert len(command.processes()) >= 7, "supervisor, four services, two scoring workers"
        command.process.kill()
        assert command.wait() == -9


def one_of_two_rollouts_killed(folder: Path) -> None:
    launch = {"num_rollouts": 2, "max_restarts": 0}
    with run(make_workdir(folder, launch=launch, rl={"num_steps": 15})) as command:
        command.wait_until(lambda: len(trained(folder)) >= 8, "two steps of reinforcement")
        command.process_titled("rollout-1").kill()
        assert command.wait() == 0, command.transcript()
    assert "rollout-1 was killed by SIGKILL; the others take over its work" in command.output
    assert "rollout-1" in [line["replica"] for line in metrics(folder, "left")]
    assert_complete(folder, num_steps=15)


def each_role_killed_once(folder: Path) -> None:
    """Every role is restarted, the controller included, and the run completes as usual."""
    with run(make_workdir(folder, rl={"num_steps": 150})) as command:
        command.wait_until(lambda: trained(folder), "a step of reinforcement")
        for name in ("policy-0", "controller", "rollout-0", "reward-0"):
            made, process = num_steps(folder), command.process_titled(name)
            process.kill()
            command.wait_for_output(f"{name} was killed by SIGKILL; restarting it in 0.5 s (1 of 3 times)")
            command.wait_until(lambda made=made: num_steps(folder) >= made + 5, f"five steps after the death of {name}")
            assert command.process_titled(name).pid != process.pid
        assert command.wait() == 0, command.transcript()
    assert len(metrics(folder, "evaluation")) == 1
    assert_complete(folder, num_steps=150)


def controller_killed_between_compactions(folder: Path) -> None:
    """The journal is compacted repeatedly, so each restart reads a compacted state and the records since."""
    changes = {"compact_records": 40, "save_every": 5, "save_rest_s": 0.0}
    with run(make_workdir(folder, controller=changes, rl={"num_steps": 120})) as command:
        for number in range(1, 4):
            made, found = num_steps(folder), num_compactions(folder)
            command.wait_until(lambda found=found: num_compactions(folder) > found, "a compaction")
            command.wait_until(lambda made=made: num_steps(folder) >= made + 5, "five more steps")
            command.process_titled("controller").kill()
            command.wait_for_output(f"controller was killed by SIGKILL; restarting it in {2.0**number / 4:g} s")
        assert command.wait() == 0, command.transcript()
    assert len(metrics(folder, "evaluation")) == 1
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, 124))
    assert_complete(folder, num_steps=120)


def num_compactions(folder: Path) -> int:
    """Return how often the controller has logged a compaction of its journal."""
    log = attempt(folder) / "logs" / "controller.log"
    return log.read_text().count("compacted") if log.exists() else 0


def journal_write_fails(folder: Path) -> None:
    """Writes fail as on a broken disk: the controller is restarted, and the run continues."""
    with run(make_workdir(folder, rl={"num_steps": 60})) as command:
        command.wait_until(lambda: len(trained(folder)) >= 8, "two steps of reinforcement learning")
        controller, made = command.process_titled("controller").pid, num_steps(folder)
        resource.prlimit(controller, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        command.wait_for_output("controller exited with code 75; restarting it in 0.5 s (1 of 3 times)")
        command.wait_until(lambda: num_steps(folder) >= made + 5, "five more steps")
        assert command.wait() == 0, command.transcript()
    assert "journal.sqlite cannot be written: disk I/O error; check its disk" in command.output
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, 64))
    assert_complete(folder, num_steps=60)


def assert_complete(folder: Path, num_steps: int) -> None:
    """Assert that a run of the tiny recipe trained every prompt once and left its checkpoint and its plot."""
    assert len(trained(folder)) == num_steps * 4
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert checkpoints(folder) == [f"step-{num_steps + 3}"]
    assert (attempt(folder) / "reward.png").stat().st_size > 1000


def rollout_suspended(folder: Path) -> None:
    """Suspended for longer than its lease: its groups go to the other rollout; then it rejoins and works again."""
    network = {"lease_s": 2.0, "heartbeat_s": 0.2}
    with run(make_workdir(folder, launch={"num_rollouts": 2}, rl={"num_steps": ENDLESS}, network=network)) as command:
        command.wait_until(lambda: len(trained(folder)) >= 8, "two steps of reinforcement")
        rollout = command.process_titled("rollout-1")
        left, joined = (len(lines_about(folder, kind, "rollout-1")) for kind in ("left", "joined"))
        rollout.suspend()
        command.wait_until(lambda: len(lines_about(folder, "left", "rollout-1")) > left, "the end of its lease")
        rollout.resume()
        command.wait_until(lambda: len(lines_about(folder, "joined", "rollout-1")) > joined, "its return")
        version = num_steps(folder)
        command.wait_until(
            lambda: any(line["version"] > version for line in lines_about(folder, "adopted", "rollout-1")),
            "its next adoption",
        )
        command.interrupt()
        assert command.wait() == 0, command.transcript()
    assert "silent" in lines_about(folder, "left", "rollout-1")[0]["reason"]
    assert set(trained(folder).values()) == {1}, "a prompt was trained twice"
    assert len(trained(folder)) == 4 * (num_steps(folder) - 3)
    assert all(line["attested"] for line in metrics(folder, "adopted"))
    assert checkpoints(folder) == [f"step-{num_steps(folder)}"]


def lines_about(folder: Path, kind: str, replica: str) -> list[dict[str, object]]:
    """Return the metrics lines of one kind about one replica."""
    return [line for line in metrics(folder, kind) if line["replica"] == replica]


def test_run_continues_without_one_rollout(tmp_path: Path) -> None:
    scenarios = [rollout_suspended, one_of_two_rollouts_killed]
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios), max_workers=2)


def test_killed_services_are_restarted(tmp_path: Path) -> None:
    each_role_killed_once(tmp_path)


@pytest.mark.campaign
def test_controller_restarts_from_a_compacted_journal(tmp_path: Path) -> None:
    controller_killed_between_compactions(tmp_path)


def test_controller_restarts_after_an_io_error(tmp_path: Path) -> None:
    journal_write_fails(tmp_path)


@pytest.mark.campaign
def test_run_fails_when_restarts_are_exhausted(tmp_path: Path) -> None:
    scenarios = [supervisor_killed, only_rollout_killed_repeatedly, policy_killed]
    run_concurrently(*(partial(scenario, tmp_path / scenario.__name__) for scenario in scenarios))


@pytest.mark.campaign
def test_run_fails_when_no_other_service_may_be_restarted(tmp_path: Path) -> None:
    run_concurrently(partial(reward_killed, tmp_path / "reward"), partial(controller_killed, tmp_path / "controller"))
