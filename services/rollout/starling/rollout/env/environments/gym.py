"""The environment `gym`: a text environment with Gymnasium's interface, in a process of its own per episode.

reset(*, seed, options) -> text, or (text, info)
step(text) -> (text, reward, terminated, truncated, info)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from starling.common.ranges import MAX_METRICS
from starling.common.wire.messages import Prompt
from starling.rollout.env.base import Episode, EpisodeOutcome, EpisodeOver
from starling.rollout.env.registry import LoadedEnvironment
from starling.rollout.env.sandbox.sandbox import Sandbox, SandboxError, SandboxSession
from starling.rollout.settings import EnvironmentSettings

SEED = "seed"
"""Key of the seed in a prompt's metadata."""


class WorldError(SandboxError):
    """A result of `reset` or `step` that does not follow Gymnasium's interface."""


def make_gym(
    settings: EnvironmentSettings,
    environment: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float = 30.0,
    max_processes: int = 64,
    memory_mb: int = 4096,
    import_s: float = 60.0,
) -> LoadedEnvironment:
    """Create the environment.

    Args:
        settings: those of the environment, for the sandbox.
        environment: ``module:Class`` or ``path/to/file.py:Class``; each episode creates an object of it.
        arguments: keyword arguments of the class.
        timeout_s: limit of creating the object, and of each call.
        max_processes: limit on concurrent episodes in this replica; further ones wait.
        memory_mb: limit on the address space of each process, in MiB.
        import_s: limit on the time of the import.

    Raises:
        ConfigError: the class cannot be imported.
    """
    sandbox = Sandbox(
        [environment],
        what="Environment",
        memory_mb=memory_mb,
        max_processes=max_processes,
        import_s=import_s,
        level=settings.sandbox,
        needs=settings.needs,
    )
    play = partial(act, sandbox=sandbox, arguments=dict(arguments or {}), timeout_s=timeout_s)
    return LoadedEnvironment(play, close=sandbox.close)


async def act(episode: Episode, *, sandbox: Sandbox, arguments: dict[str, Any], timeout_s: float) -> EpisodeOutcome:
    """Play one episode; its reward is the sum over the steps."""
    total, metrics = 0.0, dict[str, float]()
    async with sandbox.session() as session:
        await session.make(0, arguments, timeout_s=timeout_s)
        _observe(episode, await _reset(session, episode.prompt, timeout_s))
        try:
            while True:
                reply = await episode.reply()
                text, reward, ended, info = _step_result(await session.invoke("step", reply.text, timeout_s=timeout_s))
                total += reward
                metrics |= {str(name): float(value) for name, value in info.items() if _is_number(value)}
                if len(metrics) > MAX_METRICS:
                    raise WorldError(
                        f"the steps have {len(metrics)} numbers in their info: return at most {MAX_METRICS}"
                    )
                if ended:
                    break
                _observe(episode, text)
        except EpisodeOver:  # the trajectory so far counts
            pass
    return EpisodeOutcome(reward=total, metrics=metrics)


def seed_of(prompt: Prompt) -> int:
    """Return the seed of a prompt, which all trajectories of its group share so that they begin alike."""
    given = prompt.metadata.get(SEED)
    if isinstance(given, int):
        return given
    return int.from_bytes(hashlib.sha256(prompt.id.encode()).digest()[:4], "big") >> 1


async def _reset(session: SandboxSession, prompt: Prompt, timeout_s: float) -> str:
    options = {**prompt.metadata, **({"reference": prompt.reference} if prompt.reference else {})}
    found = await session.invoke("reset", timeout_s=timeout_s, seed=seed_of(prompt), options=options)
    text = found[0] if isinstance(found, list) and len(found) == 2 else found
    if not isinstance(text, str):
        raise WorldError(f"reset() returned {str(found)[:80]!r}: return the text of the first observation")
    return text


def _step_result(found: Any) -> tuple[str, float, bool, Mapping[str, Any]]:
    match found:
        case [str(text), int() | float() as reward, bool(terminated), bool(truncated), dict(info)]:
            if math.isfinite(reward):
                return text, float(reward), terminated or truncated, info
    raise WorldError(
        f"step() returned {str(found)[:80]!r}: return (text, a finite reward, terminated, truncated, info)"
    )


def _observe(episode: Episode, text: str) -> None:
    if not text:
        return
    if episode.prompt.messages:
        episode.say({"role": "user", "content": text})
    else:
        episode.say_text(text)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
