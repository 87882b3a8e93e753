"""Scores that reward workers of the user push, for types that no scorer of this service gives.

A request that asks for such a type waits for its push, until the time limit of requests. What is pushed is checked
like what a scorer returns. It is in the memory of the instance that accepted the request, and ends with it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from starling.reward.http.errors import HttpError

MAX_KEYS: Final = 64
MAX_KEY_CHARACTERS: Final = 100
MAX_TEXT_CHARACTERS: Final = 200
"""Of a score that is a text, as a judgement is."""
MAX_ERROR_CHARACTERS: Final = 1000
MAX_DURATION_CHARACTERS: Final = 20
MAX_BYTES: Final = 64 << 20
"""Of all that is kept."""
ENTRY_BYTES: Final = 1024
"""What a request takes besides its documents."""
RETRY_AFTER_S: Final = 1

_Column = list[float | str | None]


class PushedResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a reward worker says of one type. Other fields of its document are left out."""

    scores: dict[str, _Column | dict[str, _Column]] | None
    error: str = ""
    duration: str = ""
    decoded_duration: str = ""


@dataclass(slots=True)
class _Expected:
    num_samples: int
    missing: set[str]
    input_info: msgspec.Raw
    late_at: float
    """When what is missing has failed."""
    expires_at: float
    documents: dict[str, bytes] = field(default_factory=dict)
    """By type."""

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + len(bytes(self.input_info)) + sum(map(len, self.documents.values()))


class PushedScores:
    """Pushed scores of the requests that wait for them.

    Args:
        types: what workers may push.
        timeout_s: how long a request waits for a push, in seconds.
        ttl_s: how long scores are kept after that, in seconds.
        clock: monotonic seconds.
    """

    def __init__(
        self, types: Sequence[str], timeout_s: float, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.types = frozenset(types)
        self.timeout_s, self._ttl_s, self._clock = timeout_s, ttl_s, clock
        self._requests: dict[str, _Expected] = {}
        self.size_bytes = 0
        """What requests and documents take."""

    def expect(self, id: str, types: Sequence[str], num_samples: int, input_info: dict[str, Any]) -> None:
        """Wait for pushes of `types` to a request that is about to be accepted. Raises HttpError without room."""
        self._drop_expired()
        if types:
            late_at = self._clock() + self.timeout_s
            info = msgspec.Raw(msgspec.json.encode(input_info))
            entry = _Expected(num_samples, set(types), info, late_at, late_at + self._ttl_s)
            self._count(entry.size_bytes)
            self._requests[id] = entry

    def forget(self, id: str) -> None:
        """Wait no more for pushes to a request, if there is one of this id."""
        entry = self._requests.pop(id, None)
        if entry is not None:
            self.size_bytes -= entry.size_bytes

    def put(self, id: str, type: str, data: str) -> None:
        """Keep the document of a type; the first one counts.

        Raises:
            HttpError: no request waits for it, it is not valid, or there are too many.
        """
        self._drop_expired()
        entry = self._requests.get(id)
        if entry is None or not (type in entry.documents or (type in entry.missing and self._clock() < entry.late_at)):
            raise HttpError(
                404, f"no request {id!r} waits for a push of type {type!r}; reward.http.pushed_types names such types"
            )
        result = read_pushed(data, entry.num_samples)
        if type in entry.documents:
            return
        document = _document(result, type, entry.input_info)
        self._count(len(document))
        entry.missing.remove(type)
        entry.documents[type] = document

    def find(self, id: str, type: str) -> bytes | None:
        """Return the document of a type, also one that says it is late; None before, or if it is not waited for."""
        self._drop_expired()
        entry = self._requests.get(id)
        if entry is None:
            return None
        if type in entry.missing and self._clock() >= entry.late_at:
            late = PushedResult(None, f"no reward worker has pushed scores within {self.timeout_s:g} s.")
            return _document(late, type, entry.input_info)
        return entry.documents.get(type)

    def _drop_expired(self) -> None:
        now = self._clock()
        # All are kept for the same time, so they are in the order in which they expire.
        while self._requests:
            id, entry = next(iter(self._requests.items()))
            if entry.expires_at > now:
                return
            self.forget(id)

    def _count(self, num_bytes: int) -> None:
        if self.size_bytes + num_bytes > MAX_BYTES:
            raise HttpError(
                429,
                f"pushed scores, and requests that wait for them, take {self.size_bytes >> 20} MiB; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self.size_bytes += num_bytes


def read_pushed(data: str, num_samples: int) -> PushedResult:
    """Return what a worker has pushed. Raises HttpError for a document that is not valid, or of other samples."""
    try:
        result = msgspec.json.decode(data, type=PushedResult)
    except (ValueError, RecursionError) as error:  # msgspec's errors are such; it takes no NaN and no infinity
        raise HttpError(422, f"`scores` is no document of scores: {str(error)[:200]}") from None
    for key, column in _columns(result.scores or {}):
        if not 0 < len(key) <= MAX_KEY_CHARACTERS:
            raise HttpError(422, f"a score has a name of {len(key)} characters; give 1 to {MAX_KEY_CHARACTERS}")
        if len(column) != num_samples:
            raise HttpError(422, f"{key!r} has {len(column)} scores, and the request {num_samples} samples")
        if any(isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS for value in column):
            raise HttpError(422, f"{key!r} has a text of more than {MAX_TEXT_CHARACTERS} characters")
    if result.scores is None and not result.error:
        raise HttpError(422, "`scores` is null and there is no `error` to say why")
    if len(result.error) > MAX_ERROR_CHARACTERS:
        raise HttpError(422, f"`error` has more than {MAX_ERROR_CHARACTERS} characters")
    if max(len(result.duration), len(result.decoded_duration)) > MAX_DURATION_CHARACTERS:
        raise HttpError(422, f"a duration has more than {MAX_DURATION_CHARACTERS} characters")
    return result


def _columns(scores: Mapping[str, _Column | dict[str, _Column]]) -> list[tuple[str, _Column]]:
    """Return all scores by their keys, and the keys of tables with none. Raises HttpError when there are too many."""
    found: list[tuple[str, _Column]] = []
    for key, column in scores.items():
        if isinstance(column, list):
            found.append((key, column))
        else:
            found += column.items()
    num_keys = len(scores) + len(found)
    if num_keys > 2 * MAX_KEYS:
        raise HttpError(422, f"`scores` has more than {MAX_KEYS} names")
    if any(len(key) > MAX_KEY_CHARACTERS for key in scores):
        raise HttpError(422, f"a score has a name of more than {MAX_KEY_CHARACTERS} characters")
    return found


def _document(result: PushedResult, type: str, input_info: msgspec.Raw) -> bytes:
    document: dict[str, Any] = {
        "scores": result.scores,
        "input_info": input_info,
        "duration": result.duration or "0.00",
        "decoded_duration": result.decoded_duration or "0.00",
        "type": type,
    }
    if result.error:
        document["error"] = result.error
    return msgspec.json.encode(document)
