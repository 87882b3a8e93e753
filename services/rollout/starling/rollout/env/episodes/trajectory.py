"""Trajectories of ended episodes, in the form in which they are sent and trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from starling.algo.routing import Experts
from starling.algo.truncation import NO_IDS, IntArray, KeptTokens
from starling.common.wire.codec import MAX_MESSAGE_BYTES
from starling.common.wire.messages import Status
from starling.rollout.engine.validation import kept_size_problem, routing_size_problem
from starling.rollout.env.episodes.turns import common_length

MAX_METRICS_BYTES: Final = MAX_MESSAGE_BYTES // 2
"""Of all metrics of a group: they travel with its texts in one message."""
METRIC_BYTES: Final = 16
"""What a metric takes on the wire besides its name."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One attempt: the tokens after the prompt, both sampled and added by the environment; arrays of shape [tokens].

    Tokens of the environment have a log-probability of 0 and the version of the token before, or of the first sampled
    token at the beginning.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    """1 for sampled tokens, 0 for others."""
    status: Status
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_turns: int = 1
    problem: str = ""
    kept: KeptTokens | None = None
    """As `Completion.kept`; no tokens where nothing was sampled."""
    truncation_nats: float | None = None
    """Mean of `Completion.truncation_nats` over the tokens for which it is known."""
    routing: Experts | None = None
    """As `Completion.routing`, also of the environment's tokens."""


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    """One ended episode."""

    context: list[int]
    """All tokens before the first sampled one."""
    token_ids: list[int]
    """From the first sampled token to the last one."""
    logprobs: list[float]
    versions: list[int]
    sampled: list[bool]
    status: Status
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    num_turns: int = 0
    problem: str = ""
    kept: list[IntArray] = field(default_factory=list)
    """The kept tokens of each of `token_ids`, none where it was not sampled; empty if they are not recorded."""
    truncation_nats: float | None = None
    routing: Experts | None = None
    """The experts of the tokens of `context` and `token_ids`; None if they are not recorded."""


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """All trajectories of one group, by index."""

    lease: str
    prompt_ids: npt.NDArray[np.int32]
    trajectories: tuple[Trajectory, ...]
    temperature: float
    """Divisor of the logits, of the request."""
    min_version: int
    """Oldest version that the request allows; stands in for the version of a trajectory without a sampled token."""
    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Tensors of the prompt's images and videos, by name."""
    prompt_routing: Experts | None = None
    """As `GroupResult.prompt_routing`."""


def group_trajectories(
    lease: str,
    prompt_ids: Sequence[int],
    episodes: Sequence[EndedEpisode],
    *,
    temperature: float,
    min_version: int,
    tensors: Mapping[str, npt.NDArray[Any]],
) -> PlayedGroup:
    """Combine the episodes of one group.

    Their prompt is the common beginning of their contexts: where an environment adds different text before the first
    reply, that text belongs to each trajectory.

    Args:
        lease: lease of the group.
        prompt_ids: the dataset's prompt, for a group in which nothing was sampled.
        episodes: at least one.
        temperature: temperature of the request.
        min_version: minimum version of the request.
        tensors: tensors of the prompt.
    """
    begun = [episode.context for episode in episodes if episode.token_ids]
    shared = begun[0][: common_length(begun)] if begun else list(prompt_ids)
    if begun and not shared:  # the engine and the trainer need a prompt of at least one token
        problem = (
            "the trajectories of the group begin with different tokens: give the dataset a prompt, or let the "
            "environment begin all of them alike"
        )
        episodes = [failed_episode(problem)] * len(episodes)
        shared = list(prompt_ids) or begun[0][:1]
    kept_bytes = sum(ids.nbytes for episode in episodes for ids in episode.kept)
    routing_bytes = sum(episode.routing.nbytes for episode in episodes if episode.routing is not None)
    problem = kept_size_problem(kept_bytes) or routing_size_problem(routing_bytes) or metrics_size_problem(episodes)
    if problem:
        episodes = [failed_episode(problem)] * len(episodes)
    return PlayedGroup(
        lease=lease,
        prompt_ids=np.array(shared, np.int32),
        trajectories=tuple(_trajectory(episode, len(shared)) for episode in episodes),
        temperature=temperature,
        min_version=min_version,
        tensors=tensors,
        prompt_routing=next((one.routing[: len(shared)] for one in episodes if one.routing is not None), None),
    )


def metrics_size_problem(episodes: Sequence[EndedEpisode]) -> str:
    """Return why the metrics of a group cannot be sent; empty if they can."""
    num_characters = sum(len(name) + METRIC_BYTES for episode in episodes for name in episode.metrics)
    if num_characters <= MAX_METRICS_BYTES // 4:  # a character has at most four bytes
        return ""
    return (
        f"the environment returned metrics of {num_characters} characters for a group, and {MAX_METRICS_BYTES // 4} "
        "can be sent: return fewer, or lower rl.group_size"
    )


def failed_episode(problem: str) -> EndedEpisode:
    """Return an episode without a token, of status `env_error`."""
    return EndedEpisode([], [], [], [], [], Status.ENV_ERROR, problem=problem)


def _trajectory(episode: EndedEpisode, num_shared: int) -> Trajectory:
    said = episode.context[num_shared:] if episode.token_ids else []
    sampled = np.array([False] * len(said) + episode.sampled, np.bool_)
    versions = [*episode.versions[:1] * len(said), *episode.versions]
    return Trajectory(
        token_ids=np.array([*said, *episode.token_ids], np.int32),
        logprobs=np.array([0.0] * len(said) + episode.logprobs, np.float32),
        versions=np.array(versions, np.int32),
        loss_mask=sampled.astype(np.uint8),
        status=episode.status,
        reward=episode.reward,
        metrics=episode.metrics,
        num_turns=episode.num_turns,
        problem=episode.problem,
        kept=KeptTokens.from_rows([NO_IDS] * len(said) + episode.kept) if episode.kept else None,
        truncation_nats=episode.truncation_nats,
        routing=None if episode.routing is None else episode.routing[num_shared:],
    )
