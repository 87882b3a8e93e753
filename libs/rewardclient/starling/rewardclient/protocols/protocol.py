"""Interface of the protocols: what is sent to a reward service, and what its replies mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol

from starling.common.errors import ConfigError
from starling.rewardclient.errors import AnswerInvalidError
from starling.rewardclient.rewards import Rewards
from starling.rewardclient.samples import RewardSample
from starling.rewardclient.settings import Endpoint, shown

MAX_ID_CHARACTERS: Final = 200
MAX_DETAIL_CHARACTERS: Final = 500
MAX_PROBLEM_CHARACTERS: Final = 1000


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request."""

    method: Literal["GET", "POST", "DELETE"]
    url: str
    headers: Mapping[str, str]
    content: bytes = b""
    wait_s: float = 0.0
    """How long the service is asked to wait before it answers, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request that a service has accepted; with it the rewards can be fetched, also by another process."""

    id: str
    fetch_url: str
    """The endpoint that has accepted it."""
    groups: tuple[int, ...]
    """Number of each sample's group."""
    replica: str = ""
    """Name of the replica that has accepted it, for a proxy before several; empty if there is none."""


class Accepted(NamedTuple):
    """What the reply to a request for rewards says."""

    id: str
    replica: str = ""


class RewardProtocol(Protocol):
    """One protocol. All methods are pure; those that read replies raise AnswerInvalidError."""

    accepted: frozenset[int]
    """Statuses of a reply to samples that were accepted."""
    ready: frozenset[int]
    """Statuses of a reply with a result."""
    not_ready: frozenset[int]
    """Statuses of a reply that says that there is no result yet."""
    lost: frozenset[int]
    """Statuses of a reply that says that the request is not known."""

    def form_of(self, sample: RewardSample) -> Hashable:
        """Return the form of a sample; those of one request have one. Raises ConfigError if it cannot be sent."""

    def size_of(self, sample: RewardSample) -> int:
        """Return about how many bytes of a request a sample takes."""

    def enqueue(self, endpoint: Endpoint, samples: Sequence[RewardSample]) -> HttpRequest:
        """Return the request for the rewards of samples."""

    def read_accepted(self, data: bytes) -> Accepted:
        """Read the reply."""

    def parts_of(self, ticket: Ticket) -> tuple[str, ...]:
        """Return the names of the parts in which the result has to be fetched."""

    def poll(self, endpoint: Endpoint, ticket: Ticket, part: str, wait_s: float) -> HttpRequest:
        """Return the question for a part of the result, if the service is asked to wait for `wait_s`."""

    def remove(self, endpoint: Endpoint, ticket: Ticket) -> HttpRequest | None:
        """Return the request that stops the scoring, and forgets the result; None if the protocol has none."""

    def read_result(self, ticket: Ticket, parts: Sequence[bytes]) -> Rewards:
        """Read the parts of the result."""


def authorization(endpoint: Endpoint) -> dict[str, str]:
    """Return the headers of every request."""
    return {"authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}


def read_json(data: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object that a service sent. Raises AnswerInvalidError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise AnswerInvalidError(
            f"{what} is not a JSON object but {plain(data[:100])!r}; is the URL that of a reward service?"
        )
    return found


def read_text(found: Mapping[str, Any], key: str, what: str) -> str:
    """Return a name that a service sent, which can be part of a URL or a header. Raises AnswerInvalidError."""
    value = found.get(key)
    if not (isinstance(value, str) and value.isascii() and value.isprintable() and 0 < len(value) <= MAX_ID_CHARACTERS):
        raise AnswerInvalidError(f"{what} has no usable {key!r}; is the URL that of a reward service?")
    return value


def read_numbers(value: Any, num: int) -> tuple[float | None, ...] | None:
    """Return a list of `num` numbers that a service sent, with None for what is none or not finite; else None."""
    if not isinstance(value, list) or len(value) != num:
        return None
    return tuple(_finite(one) for one in value)


def refusal(request: HttpRequest, status: int, data: bytes, *, is_final: bool = True) -> str:
    """Return the sentence on a request that was refused, for good or for now."""
    why = _detail(data) or "the service gives no reason"
    remedy = _REMEDIES.get(status, "") if is_final else ""
    return f"{request.method} {shown(request.url)} was refused with status {status}: {why}{remedy}"


def plain(text: bytes | str, limit: int = MAX_DETAIL_CHARACTERS) -> str:
    """Return a text of a service for an error: of one line, printable, and not longer than `limit`."""
    decoded = text[: 4 * limit].decode("utf-8", "replace") if isinstance(text, bytes) else text[: 4 * limit]
    return "".join(one if one.isprintable() else " " for one in decoded).strip()[:limit]


def encoded(encode: Callable[[], bytes]) -> bytes:
    """Return what `encode` returns. Raises ConfigError where samples cannot be encoded."""
    try:
        return encode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"a sample cannot be written as JSON: {error}; its fields must be texts and numbers"
        ) from None


_REMEDIES: Final = {
    401: "; set REMOTE_REWARD_TOKEN to the token of the service",
    403: "; set REMOTE_REWARD_TOKEN to a token that may do this",
    404: "; is the URL that of a reward service?",
    413: "; lower max_request_mb, name smaller groups, or raise the limit of the service",
    429: ", and it does not say when to try again",
}


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) < float("inf") else None


def _detail(data: bytes) -> str:
    """Return the reason in the body of a refusal, in the forms that services have."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return plain(data)
    value = (found.get("detail") or found.get("message") or found.get("error")) if isinstance(found, dict) else found
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        value = "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in value[:3])
    return plain(value if isinstance(value, str) else json.dumps(value))
