"""`starling smoke`: real processes, a tiny model, one rollout killed during the run, and the invariants checked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from starling.cli.recipe.schema import Recipe, load_recipe
from starling.cli.run.attempt import Attempt, read_metrics
from starling.cli.run.supervisor import Supervisor
from starling.common.counts import counted
from starling.common.errors import StarlingError

RECIPE = Path(__file__).with_name("smoke.toml")
KILL_AFTER_SHARE = 0.3
"""The rollout is killed when this share of the steps is done."""
WINDOW_SHARE = 0.25
"""Reward is compared between the first and the last quarter of the steps."""


class SmokeFailedError(StarlingError):
    """An invariant was violated."""


class SmokeSupervisor(Supervisor):
    """Kills one rollout when the run is well under way."""

    def __init__(self, recipe: Recipe, attempt: Attempt) -> None:
        """Prepare to kill once, after `KILL_AFTER_SHARE` of the steps."""
        super().__init__(recipe, attempt)
        self._kill_at = recipe.sft.num_steps + int(KILL_AFTER_SHARE * recipe.rl.num_steps)
        self.killed: str | None = None

    def on_poll(self) -> None:
        """Kill the rollout once enough steps are done."""
        if self.killed is not None:
            return
        steps = read_metrics(self.attempt.metrics, "step")
        if steps and steps[-1]["step"] >= self._kill_at:
            self.killed = self.kill_one("rollout")


def run_smoke(settings: Sequence[str]) -> None:
    """Run and check. Raises SmokeFailedError that names the violated invariant."""
    recipe = load_recipe([RECIPE], settings)
    attempt = Attempt.create(recipe)
    begin = time.monotonic()
    supervisor = SmokeSupervisor(recipe, attempt)
    supervisor.run()
    for invariant in check(recipe, read_metrics(attempt.metrics), supervisor.killed):
        print(f"ok: {invariant}")
    print(f"smoke passed in {time.monotonic() - begin:.0f} s; its files: {attempt.folder}")


def check(recipe: Recipe, lines: Sequence[dict[str, Any]], killed: str | None) -> list[str]:
    """Return what holds, one sentence each. Raises SmokeFailedError for the first invariant that does not."""
    checks: list[Callable[[], str]] = [
        lambda: _killed(lines, killed),
        lambda: _reward_rose(lines),
        lambda: _staleness_kept(recipe, lines),
        lambda: _all_attested(recipe, lines),
        lambda: _trained_once(recipe, lines),
    ]
    return [invariant() for invariant in checks]


def _of(lines: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def _killed(lines: Sequence[dict[str, Any]], killed: str | None) -> str:
    if killed is None or not any(line["replica"] == killed for line in _of(lines, "left")):
        raise SmokeFailedError("no rollout was killed during the run, so its recovery was not tested")
    left = next(line for line in _of(lines, "left") if line["replica"] == killed)
    return f"{killed} was killed during the run; others took over its {counted(left['num_leases'], 'group')}"


def _reward_rose(lines: Sequence[dict[str, Any]]) -> str:
    rewards = [line["reward_mean"] for line in _of(lines, "step") if "reward_mean" in line]
    window = max(1, int(len(rewards) * WINDOW_SHARE))
    first, last = (sum(part) / window for part in (rewards[:window], rewards[-window:]))
    if not last > first:
        raise SmokeFailedError(f"the reward did not rise: {first:.3f} in the first quarter, {last:.3f} in the last")
    return f"the reward rose from {first:.3f} to {last:.3f}"


def _staleness_kept(recipe: Recipe, lines: Sequence[dict[str, Any]]) -> str:
    stale = max(line["staleness_max"] for line in _of(lines, "step") if "staleness_max" in line)
    if stale > recipe.rl.max_staleness:
        raise SmokeFailedError(
            f"a token was {counted(int(stale), 'version')} old; the bound is {recipe.rl.max_staleness}"
        )
    return f"no token was older than {counted(int(stale), 'version')}; the bound is {recipe.rl.max_staleness}"


def _all_attested(recipe: Recipe, lines: Sequence[dict[str, Any]]) -> str:
    adopted = _of(lines, "adopted")
    bad = [line for line in adopted if not line["attested"]]
    if bad or len(adopted) < recipe.rl.num_steps:
        raise SmokeFailedError(f"of {len(adopted)} adoptions {len(bad)} were not proven by the publisher's digest")
    return f"all {len(adopted)} adoptions were proven by the publisher's digest, over {adopted[0]['transport']}"


def _trained_once(recipe: Recipe, lines: Sequence[dict[str, Any]]) -> str:
    trained = Counter(prompt for line in _of(lines, "trained") for prompt in line["prompts"])
    wanted = recipe.rl.num_steps * recipe.rl.prompts_per_step
    twice = [prompt for prompt, times in trained.items() if times > 1]
    if twice or len(trained) != wanted:
        raise SmokeFailedError(f"{len(trained)} of {wanted} prompts were trained, {len(twice)} of them more than once")
    return f"each of {wanted} prompts was trained exactly once"
