"""A real run of the smoke recipe under injected faults, and the check of its guarantees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import Target
from guarantees import JournalHistory, contradictions, expected_digests, other_batches, read_history, violations
from host_faults import WallClock
from observation import Observation
from small_disk import disk
from system_runs import Command, starling_command

import starling.cli
from starling.algo.staleness import num_slots
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.attempt import Attempt

RECIPE = Path(starling.cli.__path__[0]) / "run" / "smoke.toml"
ENDLESS = 100_000
LEASE_S = 2.0
COMPACT_RECORDS = 100
"""Four steps or so."""
DISK_MB = 256
RUN_S = 60.0
"""Deadline for the start of the run, and for its end after `starling stop`."""
FLAGS = {
    "sft.num-steps": 10,
    "rl.num-steps": ENDLESS,
    "data.held-out": 8,
    "network.heartbeat-s": 0.3,
    "network.lease-s": LEASE_S,
    "controller.compact-records": COMPACT_RECORDS,
    # Each process is killed many times; the window forgets the earlier times.
    "launch.max-restarts": 1000,
    "launch.restart-window-s": 1.0,
}


@contextmanager
def chaos_run(folder: Path) -> Iterator[Target]:
    """Start the run on a disk and with a clock of its own, and wait until all replicas are members.

    `starling_command` asserts that no process is left.
    """
    clock = WallClock(folder)
    with disk(folder / "runs", DISK_MB) as run_disk:
        flags = [part for key, value in FLAGS.items() for part in (f"--{key}", str(value))]
        attempt, recipe = Attempt((folder / "runs/smoke/attempt-1").absolute()), load_recipe([RECIPE], flags)
        observation = Observation(attempt, folder / "archive.sqlite")
        environment = clock.environment | observation.journal.environment
        with starling_command(folder, "run", str(RECIPE), *flags, name="run", environment=environment) as command:
            target = Target(command, observation, replicas_of(recipe), 1.5 * LEASE_S, clock, run_disk, COMPACT_RECORDS)
            try:
                command.wait_until(observation.journal.has_begun, "the journal", RUN_S)
                target.wait_until_complete("the start of the run")
                yield target
            finally:
                observation.close()


def finish(target: Target) -> tuple[JournalHistory, list[str]]:
    """Evaluate and stop the run with operator commands; return its history and a sentence per violated guarantee."""
    command, attempt = target.command, target.observation.attempt
    outputs = [operator(command, "evaluate", str(attempt.folder))]
    evaluated = lambda: any(line["kind"] == "evaluation" for line in target.observation.metrics())  # noqa: E731
    command.wait_until(evaluated, "the evaluation", RUN_S)
    outputs.append(operator(command, "stop", str(attempt.folder)))
    assert command.wait(RUN_S) == 0, command.transcript()
    recipe = load_recipe([attempt.recipe], [])
    lines, entries = target.observation.metrics(), list(target.observation.journal.entries())
    history = read_history((entry.record for entry in entries), recipe.sft.num_steps)
    slots = num_slots(recipe.rl.prompts_per_step, recipe.rl.max_staleness)
    found = violations(history, complete=False, num_slots=slots)
    found += contradictions(history, lines) + other_batches(expected_digests(entries), lines)
    if set(history.evaluations_opened) != set(history.evaluations_closed):
        found.append(f"evaluations {history.evaluations_opened} were opened, and {history.evaluations_closed} finished")
    return history, found


def replicas_of(recipe: Recipe) -> frozenset[str]:
    """Return the names of the replicas that `starling run` starts."""
    numbers = {"policy": 1, "rollout": recipe.launch.num_rollouts, "reward": recipe.launch.num_rewards}
    return frozenset(f"{role}-{i}" for role, number in numbers.items() for i in range(number))


def operator(command: Command, *arguments: str) -> str:
    """Run an operator command, and return its output."""
    with starling_command(command.folder, *arguments, name=arguments[0]) as operator_command:
        assert operator_command.wait() == 0, operator_command.transcript()
    return operator_command.output
