"""Rollouts on a network of their own, which is cut for longer than their lease."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from guarantees import contradictions, expected_digests, other_batches, read_history, violations
from host_faults import network
from observation import Observation
from system_runs import END_S, Command, make_workdir, starling_command

from starling.cli.run.attempt import Attempt

pytestmark = [pytest.mark.system, pytest.mark.campaign]

LEASE_S = 2.0
PROMPTS_PER_STEP = 4
SFT_STEPS, ENDLESS = 3, 100_000
REPLICAS = {"policy-0": "near", "reward-0": "near", "rollout-0": "near", "rollout-1": "far"}


def make_run_folder(folder: Path) -> Path:
    """Create the model, the keys, and a recipe whose controller listens on the cable."""
    for arguments in (
        ("scratch", "tiny.toml", "model"),
        ("keys", "make", "run/keys", *REPLICAS, "observer-0", "operator-0"),
    ):
        with starling_command(make_workdir(folder), *arguments, name=arguments[0]) as command:
            assert command.wait() == 0, command.transcript()
    changes = {
        "run": {"id": "cut-in-two"},
        "model": {},
        "rl": {"num_steps": ENDLESS},
        "network": {"host": "10.213.0.1", "heartbeat_s": 0.3, "lease_s": LEASE_S},
        "controller": {"num_rollouts": 2},
        "policy": {"init": "random", "transport": "tcp"},
    }
    make_workdir(folder, **changes)
    text = (folder / "tiny.toml").read_text()
    (folder / "tiny.toml").write_text(text.replace("[model]", '[model]\npath = "model"'))
    return folder


def test_partitioned_rollouts_are_evicted_and_rejoin(tmp_path: Path) -> None:
    folder, config = make_run_folder(tmp_path), ["--config", "tiny.toml", "--dir", "run"]
    attempt = Attempt(folder / "run")
    observation = Observation(attempt, folder / "archive.sqlite")
    with network() as cable, ExitStack() as stack:
        places = {"near": cable.command_prefix(cable.near), "far": cable.command_prefix(cable.far)}

        def start(role: str, *more: str, name: str, place: str) -> Command:
            environment = observation.journal.environment if role == "controller" else None
            return stack.enter_context(
                starling_command(folder, role, *config, *more, name=name, prefix=places[place], environment=environment)
            )

        controller = start("controller", name="controller", place="near")
        controller.wait_until(attempt.address.exists, "its address")
        address = json.loads(attempt.address.read_text())["address"]
        services = []
        for name, place in REPLICAS.items():
            host = ("--network.host", "10.213.0.2") if place == "far" else ()
            more = ("--name", name, "--controller", address, *host)
            services.append(start(name.partition("-")[0], *more, name=name, place=place))

        def wait_for_line(
            kind: str, description: str, matches: Callable[[dict[str, object]], bool], num: int = 1
        ) -> None:
            matching_lines = lambda: [line for line in observation.metrics() if line["kind"] == kind and matches(line)]  # noqa: E731
            controller.wait_until(lambda: len(matching_lines()) >= num, description, END_S)

        controller.wait_until(observation.journal.has_begun, "the journal", END_S)
        about_rollout_1 = lambda line: line["replica"] == "rollout-1"  # noqa: E731
        wait_for_line(
            "adopted", "a version of reinforcement", lambda line: about_rollout_1(line) and line["version"] > SFT_STEPS
        )
        cable.cut()
        wait_for_line("left", "the end of its lease", about_rollout_1)
        version = max(line["step"] for line in observation.metrics() if line["kind"] == "step")
        wait_for_line("step", "steps without it", lambda line: line["step"] > version + 5)
        cable.restore()
        wait_for_line("joined", "its return", about_rollout_1, num=2)
        version = max(line["step"] for line in observation.metrics() if line["kind"] == "step")
        wait_for_line("adopted", "its next version", lambda line: about_rollout_1(line) and line["version"] > version)
        controller.interrupt()
        assert controller.wait() == 0, controller.transcript()
        assert [service.wait() for service in services] == [0] * len(services)
    lines, entries = observation.metrics(), list(observation.journal.entries())
    history = read_history((entry.record for entry in entries), SFT_STEPS)
    found = violations(history, complete=False, num_slots=2 * PROMPTS_PER_STEP)
    found += contradictions(history, lines) + other_batches(expected_digests(entries), lines)
    assert not found, "\n".join(found)
    assert len(history.committed) > SFT_STEPS
