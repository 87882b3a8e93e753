"""A real run of the smoke recipe that has to live through faults, and the verdict on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults import Target
from observation import Observation
from promises import Story, broken, disagreements
from surroundings import WallClock, disk
from system_runs import Command, started

import starling.cli
from starling.algo.staleness import num_slots
from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.attempt import Attempt

RECIPE = Path(starling.cli.__path__[0]) / "smoke.toml"
ENDLESS = 100_000
LEASE_S = 2.0
DISK_MB = 256
RUN_S = 60.0
"""Within this a run begins, and ends when it is told to."""
FLAGS = {
    "sft.num-steps": 10,
    "rl.num-steps": ENDLESS,
    "data.held-out": 8,
    "network.heartbeat-s": 0.3,
    "network.lease-s": LEASE_S,
    # Each process dies again and again here, and always for the first time.
    "launch.max-restarts": 1000,
    "launch.restart-window-s": 1.0,
}


@contextmanager
def ordeal(folder: Path) -> Iterator[Target]:
    """Start the run on a disk and by a clock of its own, wait until it is whole, and see that it leaves nothing."""
    clock = WallClock(folder)
    with disk(folder / "runs", DISK_MB) as small:
        flags = [part for key, value in FLAGS.items() for part in (f"--{key}", str(value))]
        with started(folder, "run", str(RECIPE), *flags, name="run", environment=clock.environment) as command:
            attempt = Attempt((folder / "runs/smoke/attempt-1").absolute())
            observation, recipe = Observation(attempt), load_recipe([RECIPE], flags)
            target = Target(command, observation, replicas_of(recipe), 1.5 * LEASE_S, clock, small)
            try:
                target.until_whole("the beginning of the run")
                yield target
            finally:
                observation.close()


def finish(target: Target) -> tuple[Story, list[str]]:
    """Have it evaluated and stopped by an operator. Returns what its journal says, and every promise that it broke."""
    command, attempt = target.command, target.observation.attempt
    said = [operator(command, "evaluate", str(attempt.folder))]
    evaluated = lambda: any(line["kind"] == "evaluation" for line in target.observation.metrics())  # noqa: E731
    command.until(evaluated, "the evaluation", RUN_S)
    said.append(operator(command, "stop", str(attempt.folder)))
    assert command.wait(RUN_S) == 0, command.story()
    recipe = load_recipe([attempt.recipe], [])
    story = target.observation.story(recipe.sft.num_steps)
    slots = num_slots(recipe.rl.prompts_per_step, recipe.rl.max_staleness)
    found = broken(story, complete=False, num_slots=slots)
    found += disagreements(story, target.observation.metrics())
    if set(story.evaluations_opened) != set(story.evaluations_closed):
        found.append(f"evaluations {story.evaluations_opened} were begun, and {story.evaluations_closed} finished")
    return story, found


def replicas_of(recipe: Recipe) -> frozenset[str]:
    """Return the names of the replicas that `starling run` starts."""
    numbers = {"policy": 1, "rollout": recipe.launch.num_rollouts, "reward": recipe.launch.num_rewards}
    return frozenset(f"{role}-{i}" for role, number in numbers.items() for i in range(number))


def operator(command: Command, *arguments: str) -> str:
    """Run an operator's command against the run, and return its answer."""
    with started(command.folder, *arguments, name=arguments[0]) as asked:
        assert asked.wait() == 0, asked.story()
    return asked.output
