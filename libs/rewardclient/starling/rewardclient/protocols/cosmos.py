"""Protocol of `/api/reward/enqueue` and `/api/reward/pull`.

A request is a line of JSON and a `.npy` file with the media of all samples. Each scorer, which the protocol calls a
reward type, has a result of its own, asked for with a form. "Not ready" and "unknown" are one reply, of status 400.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlencode

import numpy as np

from starling.common.errors import ConfigError
from starling.rewardclient.combine import FunctionScores, RewardRule, combine
from starling.rewardclient.errors import AnswerInvalidError
from starling.rewardclient.media import Array, Media, npy_bytes
from starling.rewardclient.protocols.protocol import (
    MAX_PROBLEM_CHARACTERS,
    Accepted,
    HttpRequest,
    Ticket,
    authorization,
    encoded,
    plain,
    read_json,
    read_numbers,
    read_text,
)
from starling.rewardclient.rewards import Rewards
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.settings import Endpoint

REPLICA_HEADER: Final = "x-lepton-replica-target"
OWN_FIELDS: Final = ("prompts", "reward_fn", "video_infos", "media_type")
PER_SAMPLE: Final = ("geneval_tags", "geneval_includes")
"""Metadata of samples that have a field in the request, with one element for each sample."""
FIELDS_BYTES: Final = 100
PIXEL_CHANNELS: Final = 3
"""Services take what has so many channels for pixels, whatever the media type says."""


class CosmosProtocol:
    """`/api/reward`.

    Args:
        rule: which scorers are asked for, and how rewards follow from their scores.
        extras: further fields of each request.
        use_replica: ask the replica that accepted a request for its result.

    Raises:
        ConfigError: the extras have fields of the protocol.
    """

    accepted = frozenset({200})
    ready = frozenset({200})
    not_ready = frozenset({400})
    lost = frozenset[int]()

    def __init__(self, rule: RewardRule, extras: Mapping[str, Any], *, use_replica: bool) -> None:
        if own := [name for name in OWN_FIELDS if name in extras]:
            raise ConfigError(f"the extras have the field {own[0]!r}, which the client writes itself; leave it out")
        self._rule, self._extras, self._use_replica = rule, dict(extras), use_replica

    def form_of(self, sample: RewardSample) -> Hashable:
        if sample.media is None:
            raise ConfigError("/api/reward scores pixels and latents, and a sample has none; send texts to /v1/rewards")
        return _media_type(sample.media), sample.media.dtype, sample.media.data.shape

    def size_of(self, sample: RewardSample) -> int:
        media = 0 if sample.media is None else sample.media.data.nbytes
        return FIELDS_BYTES + len(sample.prompt) + media

    def enqueue(self, endpoint: Endpoint, samples: Sequence[RewardSample]) -> HttpRequest:
        media = [sample.media for sample in samples if sample.media is not None]
        fields = {
            **self._extras,
            **{
                name: [sample.metadata.get(name) for sample in samples]
                for name in PER_SAMPLE
                if any(name in sample.metadata for sample in samples)
            },
            "prompts": [sample.prompt for sample in samples],
            # The service leaves out what has no positive weight, and uses weights for nothing else.
            "reward_fn": {function.name: abs(function.weight) for function in self._rule.used},
            "video_infos": [{"video_fps": one.fps} for one in media],
            "media_type": _media_type(media[0]),
        }
        line = encoded(lambda: json.dumps(fields, allow_nan=False).encode())
        content = b"".join((line, b"\n", npy_bytes(_batch(media))))
        headers = {"content-type": "application/octet-stream", **authorization(endpoint)}
        return HttpRequest("POST", endpoint.enqueue_url, headers, content)

    def read_accepted(self, data: bytes) -> Accepted:
        found = read_json(data, "the reply to samples")
        has_replica = found.get("replica_id") is not None
        replica = read_text(found, "replica_id", "the reply to samples") if has_replica else ""
        return Accepted(read_text(found, "uuid", "the reply to samples"), replica)

    def parts_of(self, ticket: Ticket) -> tuple[str, ...]:
        return tuple(function.name for function in self._rule.used)

    def poll(self, endpoint: Endpoint, ticket: Ticket, part: str, wait_s: float) -> HttpRequest:
        headers = {"content-type": "application/x-www-form-urlencoded", **authorization(endpoint)}
        if ticket.replica and self._use_replica:
            headers[REPLICA_HEADER] = ticket.replica
        content = urlencode({"uuid": ticket.id, "type": part}).encode("ascii")
        return HttpRequest("POST", endpoint.fetch_url, headers, content)

    def remove(self, endpoint: Endpoint, ticket: Ticket) -> HttpRequest | None:
        return None

    def read_result(self, ticket: Ticket, parts: Sequence[bytes]) -> Rewards:
        num = len(ticket.groups)
        names = self.parts_of(ticket)
        scores = {name: _scores(part, name, ticket.id, num) for name, part in zip(names, parts, strict=True)}
        combined = combine(self._rule, scores, num)
        return Rewards(
            rewards=combined.rewards,
            statuses=combined.statuses,
            problems=combined.problems,
            scores={
                name if key == name else f"{name}/{key}": column
                for name, found in scores.items()
                for key, column in found.columns.items()
            },
            groups=ticket.groups,
        )


def _media_type(media: Media) -> str:
    if media.kind == "latents":
        if media.data.shape[0] == PIXEL_CHANNELS:
            raise ConfigError(
                f"latents have {PIXEL_CHANNELS} channels, which /api/reward takes for pixels; use /v1/rewards"
            )
        return "latent"
    return "image" if len(media.data) == 1 else "video"


def _batch(media: Sequence[Media]) -> Array:
    """Return the media of a request as one array: images [B, H, W, C], others [B, C, T, H, W]."""
    stacked = np.stack([one.data for one in media])
    match _media_type(media[0]):
        case "image":
            return stacked[:, 0]
        case "video":
            return stacked.transpose(0, 4, 1, 2, 3)
        case _:
            return stacked


def _scores(data: bytes, name: str, id: str, num: int) -> FunctionScores:
    """Read the result of one scorer: its scores by key, or the reason why there are none."""
    found = read_json(data, f"the result of {name!r} for request {id}")
    scores, error = found.get("scores"), found.get("error")
    problem = plain(str(error), MAX_PROBLEM_CHARACTERS) if error else ""
    if scores is None:
        return FunctionScores({}, problem or "the service gives no reason")
    if not isinstance(scores, dict):
        raise AnswerInvalidError(f"the result of {name!r} for request {id} has scores that are no JSON object")
    columns = {key: read_numbers(value, num) for key, value in scores.items()}
    # Some scorers also return texts, or tables by category: neither can be a reward.
    return FunctionScores({key: column for key, column in columns.items() if column is not None}, problem)
