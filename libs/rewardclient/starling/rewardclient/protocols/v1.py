"""Starling's own protocol: JSON at `/v1/rewards`, where the service waits and removes on demand."""

from __future__ import annotations

import base64
from collections.abc import Hashable, Sequence
from typing import Any, Final
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from starling.rewardclient.combine import FunctionScores, RewardRule, combine
from starling.rewardclient.errors import AnswerInvalidError
from starling.rewardclient.media import BFLOAT16, Media, npy_bytes
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
from starling.rewardclient.rewards import OK, REWARD_ERROR, TRUNCATED, Rewards
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.settings import Endpoint

FIELDS_BYTES: Final = 200
"""What the names of a sample's fields take."""
MAX_STATUS_CHARACTERS: Final = 50


class V1Protocol:
    """`/v1/rewards`.

    Args:
        rule: how rewards follow from scores; without functions, the rewards are the service's.
    """

    accepted = frozenset({200, 202})
    ready = frozenset({200})
    not_ready = frozenset({202})
    lost = frozenset({404})

    def __init__(self, rule: RewardRule) -> None:
        self._rule = rule

    def form_of(self, sample: RewardSample) -> Hashable:
        return ()  # each sample has its own media

    def size_of(self, sample: RewardSample) -> int:
        texts = len(sample.completion) + len(sample.prompt) + len(sample.reference)
        media = 0 if sample.media is None else sample.media.data.nbytes * 4 // 3
        metadata = len(encoded(lambda: msgspec.json.encode(sample.metadata))) if sample.metadata else 0
        return FIELDS_BYTES + texts + media + metadata

    def enqueue(self, endpoint: Endpoint, samples: Sequence[RewardSample]) -> HttpRequest:
        content = encoded(lambda: msgspec.json.encode({"samples": [_sample(one) for one in samples], "wait_s": 0}))
        headers = {"content-type": "application/json", **authorization(endpoint)}
        return HttpRequest("POST", endpoint.enqueue_url, headers, content)

    def read_accepted(self, data: bytes) -> Accepted:
        return Accepted(read_text(read_json(data, "the reply to samples"), "id", "the reply to samples"))

    def parts_of(self, ticket: Ticket) -> tuple[str, ...]:
        return ("",)

    def poll(self, endpoint: Endpoint, ticket: Ticket, part: str, wait_s: float) -> HttpRequest:
        url = _url_of(endpoint, ticket, f"wait_s={wait_s:.3f}")
        return HttpRequest("GET", url, authorization(endpoint), wait_s=wait_s)

    def remove(self, endpoint: Endpoint, ticket: Ticket) -> HttpRequest | None:
        return HttpRequest("DELETE", _url_of(endpoint, ticket), authorization(endpoint))

    def read_result(self, ticket: Ticket, parts: Sequence[bytes]) -> Rewards:
        found = read_json(parts[0], f"the result of request {ticket.id}")
        num = len(ticket.groups)
        rewards = read_numbers(found.get("rewards"), num)
        statuses = _texts(found.get("statuses"), num)
        problems = _problems(found.get("problems"), num)
        scores = _columns(found.get("scores"), num)
        evaluation_scores = _columns(found.get("evaluation_scores", {}), num)
        if rewards is None or statuses is None or problems is None or scores is None or evaluation_scores is None:
            raise AnswerInvalidError(f"the result of request {ticket.id} does not have the fields of {num} samples")
        if self._rule.functions:
            combined = combine(self._rule, _by_scorer(scores), num)
            # Problems of scorers that do not count are kept.
            problems = tuple(
                tuple(dict.fromkeys((*own, *new))) for own, new in zip(problems, combined.problems, strict=True)
            )
            rewards = combined.rewards
        statuses = tuple(_status(own, reward) for own, reward in zip(statuses, rewards, strict=True))
        return Rewards(
            rewards=rewards,
            statuses=statuses,
            problems=problems,
            scores=scores,
            evaluation_scores=evaluation_scores,
            groups=ticket.groups,
        )


def _status(own: str, reward: float | None) -> str:
    """Return the status of a sample, given what the service says: a rule may do without scorers that failed there."""
    if reward is None:
        return REWARD_ERROR if own in (OK, TRUNCATED) else own
    return own if own == TRUNCATED else OK


def _sample(sample: RewardSample) -> dict[str, Any]:
    fields = {
        "prompt": sample.prompt,
        "reference": sample.reference,
        "metadata": dict(sample.metadata),
        "num_tokens": sample.num_tokens,
        "truncated": sample.truncated,
        "group": sample.group,
    }
    given: dict[str, Any] = {"completion": sample.completion} | {name: one for name, one in fields.items() if one}
    if sample.environment_reward is not None:
        given["environment_reward"] = sample.environment_reward
    if sample.media is not None:
        given["media"] = _media(sample.media)
    return given


def _media(media: Media) -> dict[str, Any]:
    array = media.data.view("V2") if media.dtype == BFLOAT16 else media.data
    return {"kind": media.kind, "npy": base64.b64encode(npy_bytes(array)).decode("ascii"), "fps": media.fps}


def _url_of(endpoint: Endpoint, ticket: Ticket, query: str = "") -> str:
    parts = urlsplit(endpoint.fetch_url)
    queries = "&".join(one for one in (parts.query, query) if one)
    return urlunsplit((parts.scheme, parts.netloc, f"{parts.path}/{quote(ticket.id, safe='')}", queries, ""))


def _texts(value: Any, num: int) -> tuple[str, ...] | None:
    if not isinstance(value, list) or len(value) != num or not all(isinstance(one, str) for one in value):
        return None
    return tuple(plain(one, MAX_STATUS_CHARACTERS) for one in value)


def _problems(value: Any, num: int) -> tuple[tuple[str, ...], ...] | None:
    if not isinstance(value, list) or len(value) != num or not all(isinstance(one, list) for one in value):
        return None
    return tuple(tuple(plain(text, MAX_PROBLEM_CHARACTERS) for text in one if isinstance(text, str)) for one in value)


def _columns(value: Any, num: int) -> dict[str, tuple[float | None, ...]] | None:
    if not isinstance(value, dict):
        return None
    columns = {name: read_numbers(column, num) for name, column in value.items()}
    return (
        None if None in columns.values() else {name: column for name, column in columns.items() if column is not None}
    )


def _by_scorer(scores: dict[str, tuple[float | None, ...]]) -> dict[str, FunctionScores]:
    """Return the scores of each scorer by key: those called `label/key`, and its own under its label."""
    columns: dict[str, dict[str, tuple[float | None, ...]]] = {}
    for name, column in scores.items():
        label, _, key = name.partition("/")
        columns.setdefault(label, {})[key or label] = column
    return {label: FunctionScores(found) for label, found in columns.items()}
