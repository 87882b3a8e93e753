"""`starling reward bench`: latency and throughput of a running reward service, as a trainer's client sees them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from starling.common.counts import counted
from starling.common.errors import ConfigError, StarlingError
from starling.rewardclient.client import AsyncRewardClient
from starling.rewardclient.combine import RewardFunction, RewardRule
from starling.rewardclient.environment import PREFIXES, endpoints_from_environment, settings_from_environment
from starling.rewardclient.errors import RewardsMissingError
from starling.rewardclient.media import Media, latents, pixels
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.settings import ClientSettings

SHAPES: Final = {"image": (64, 64), "video": (13, 64, 64), "latents": (16, 4, 8, 8)}
"""By default."""
AXES: Final = {"image": "H,W", "video": "T,H,W", "latents": "C,T,H,W"}
MAX_NUMBER: Final = 1_000_000
MAX_VALUES: Final = 1 << 28
"""Of a sample's media."""
QUANTILES: Final = (0.5, 0.9, 0.99)
REWARDED: Final = ("ok", "truncated")
"""Statuses of samples with a reward."""


@dataclass
class _Measured:
    """What the clients have seen."""

    seconds: list[float] = field(default_factory=list)
    """Of each request, from the call to the last of its rewards."""
    statuses: Counter[str] = field(default_factory=Counter)
    """Samples by their status."""
    problem: str = ""
    """The first one."""


def bench(argv: Sequence[str]) -> None:
    """Send requests to a service, and print how long they take.

    Raises:
        ConfigError: a flag is wrong, or no service is named.
        StarlingError: a sample has no reward.
    """
    arguments = _parse(argv)
    sample = RewardSample(
        completion=arguments.completion,
        prompt=arguments.prompt,
        reference=arguments.reference,
        metadata=_metadata(arguments.metadata),
        media=_media(arguments.media, arguments.shape),
    )
    settings = _settings(arguments)
    measured, total_s = asyncio.run(_measure(settings, [sample] * arguments.batch, arguments))
    figures = _figures(measured, arguments, total_s)
    print(json.dumps(figures) if arguments.json else _table(figures), flush=True)
    num_failed = sum(number for status, number in measured.statuses.items() if status not in REWARDED)
    if num_failed:
        raise StarlingError(f"{counted(num_failed, 'sample')} have no reward: {measured.problem}")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="starling reward bench", description="Measure latency and throughput of a running reward service."
    )
    parser.add_argument(
        "--url", help="of /v1/rewards or /api/reward/enqueue; without it, the environment's REMOTE_REWARD_ENQUEUE_URL"
    )
    parser.add_argument("--clients", type=int, default=8, help="requests at a time (8)")
    parser.add_argument("--requests", type=int, default=100, help="of all clients together (100)")
    parser.add_argument("--batch", type=int, default=16, help="samples of a request (16)")
    parser.add_argument("--media", choices=("text", *SHAPES), default="text", help="what the scorers read (text)")
    parser.add_argument("--shape", default="", help=f"of the media: {', '.join(map(' '.join, AXES.items()))}")
    parser.add_argument(
        "--scorer", action="append", default=[], help="label of a scorer; may be repeated; /api/reward needs it"
    )
    parser.add_argument("--completion", default="the answer is 42", help="the text of each sample")
    parser.add_argument("--reference", default="42", help="its reference")
    parser.add_argument("--prompt", default="What is 6 times 7?", help="its prompt")
    parser.add_argument("--metadata", default="{}", help="metadata of its prompt, a JSON object")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds until a request has failed (600)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args(list(argv))
    for name in ("clients", "requests", "batch"):
        value = getattr(arguments, name)
        if not 1 <= value <= MAX_NUMBER:
            raise ConfigError(f"--{name} is {value}; give a number from 1 to {MAX_NUMBER}")
    return arguments


def _metadata(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--metadata is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError('--metadata must be a JSON object, such as \'{"task": "math"}\'')
    return found


def _media(kind: str, text: str) -> Media | None:
    """Return random media of a shape. Raises ConfigError."""
    if kind == "text":
        if text:
            raise ConfigError("--shape is for --media image, video or latents")
        return None
    try:
        shape = tuple(map(int, text.split(","))) if text else SHAPES[kind]
    except ValueError:
        shape = ()
    if len(shape) != len(SHAPES[kind]) or min(shape) < 1 or int(np.prod(shape, dtype=object)) > MAX_VALUES:
        raise ConfigError(f"--shape is {text!r}; give {AXES[kind]} with at most {MAX_VALUES} values")
    rng = np.random.default_rng(0)
    if kind == "latents":
        return latents(rng.standard_normal(shape, np.float32).astype(np.float16))
    return pixels(rng.integers(0, 256, (*shape, 3), np.uint8))


def _settings(arguments: argparse.Namespace) -> ClientSettings:
    variables = dict(os.environ)
    if arguments.url:
        for prefix in PREFIXES:
            variables |= {f"{prefix}ENQUEUE_URL": arguments.url, f"{prefix}FETCH_URL": ""}
    if not arguments.scorer and any(one.protocol == "cosmos" for one in endpoints_from_environment(variables)):
        raise ConfigError("/api/reward scores by the scorers that a request names; give --scorer LABEL")
    return settings_from_environment(
        variables,
        rule=RewardRule(functions=tuple(RewardFunction(name=name) for name in arguments.scorer)),
        timeout_s=arguments.timeout,
        max_request_samples=arguments.batch,
        max_uploads=arguments.clients,
        max_polls=arguments.clients,
    )


async def _measure(
    settings: ClientSettings, samples: Sequence[RewardSample], arguments: argparse.Namespace
) -> tuple[_Measured, float]:
    """Return what the clients saw, and the seconds of all requests together."""
    measured, left = _Measured(), iter(range(arguments.requests))
    async with AsyncRewardClient(settings) as client:

        async def run() -> None:
            for _ in left:
                await _request(client, samples, measured)

        begun = time.perf_counter()
        await asyncio.gather(*(run() for _ in range(min(arguments.clients, arguments.requests))))
        return measured, time.perf_counter() - begun


async def _request(client: AsyncRewardClient, samples: Sequence[RewardSample], measured: _Measured) -> None:
    begun = time.perf_counter()
    try:
        rewards = await client.score(samples)
    except RewardsMissingError as error:
        if not measured.seconds:  # nothing works: the other requests would only wait, too
            raise
        measured.statuses["no answer"] += len(samples)
        measured.problem = measured.problem or str(error)
        return
    measured.seconds.append(time.perf_counter() - begun)
    measured.statuses.update(rewards.statuses)
    failed = (one for row, one in zip(rewards.rewards, rewards.problems, strict=True) if row is None)
    measured.problem = measured.problem or " ".join(next(failed, ()))


def _figures(measured: _Measured, arguments: argparse.Namespace, total_s: float) -> dict[str, Any]:
    num_scored = sum(measured.statuses[status] for status in REWARDED)
    quantiles = np.quantile(measured.seconds, QUANTILES).round(4).tolist() if measured.seconds else [None] * 3
    return {
        "samples": sum(measured.statuses.values()),
        "rewards_per_s": round(num_scored / total_s, 1),
        "seconds": round(total_s, 3),
        **{f"request_p{round(100 * share)}_s": value for share, value in zip(QUANTILES, quantiles, strict=True)},
        "clients": arguments.clients,
        "samples_of_a_request": arguments.batch,
        "media": arguments.media,
        "statuses": dict(measured.statuses),
    }


def _table(figures: dict[str, Any]) -> str:
    width = max(map(len, figures))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in figures.items())
