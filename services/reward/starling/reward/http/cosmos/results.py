"""Results in the form in which clients of Cosmos-RL pull them: one document for each type of reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from starling.reward.core.requests import RequestResult
from starling.reward.http.stores.store import FinishedRequest

MAX_ERROR_CHARACTERS: Final = 1000


def render(finished: FinishedRequest, type: str, label: str, input_info: dict[str, Any]) -> bytes:
    """Return the document of one type, as JSON.

    Args:
        finished: the request with its result.
        type: the name by which the client asked for the scorer.
        label: of the scorer.
        input_info: what `enqueue` found out about the media.
    """
    result = finished.result
    if label not in result.scores:  # it was not scored at all, or by other scorers than there are now
        return render_failure(type, input_info, problems_of(result) or f"scorer {label!r} gave no scores.")
    failures = {index: text for index, text in enumerate(result.failures.get(label, ())) if text}
    num = len(result.statuses)
    document = {
        "scores": None if len(failures) == num else _nested(_columns(result, type, label)),
        "input_info": input_info,
        "duration": f"{max(0.0, finished.duration_s - result.decode_s):.2f}",
        "decoded_duration": f"{result.decode_s:.2f}",
        "type": type,
    }
    if failures:
        document["error"] = _sentence(failures, num)
    return msgspec.json.encode(document)


def problems_of(result: RequestResult) -> str:
    """Return why samples of a result have no reward, each reason once; empty if there is none."""
    return " ".join(dict.fromkeys(problem for one in result.problems for problem in one))


def render_failure(type: str, input_info: dict[str, Any], error: str) -> bytes:
    """Return the document of a type that will have no scores, as JSON."""
    return msgspec.json.encode(
        {
            "scores": None,
            "input_info": input_info,
            "duration": "0.00",
            "decoded_duration": "0.00",
            "type": type,
            "error": error[:MAX_ERROR_CHARACTERS],
        }
    )


def _columns(result: RequestResult, type: str, label: str) -> dict[str, tuple[float | None, ...]]:
    """Return a scorer's scores by their keys; one without keys has the name of the type."""
    prefix = f"{label}/"
    found = {name.removeprefix(prefix): row for name, row in result.scores.items() if name.startswith(prefix)}
    return found or {type: result.scores[label]}


def _nested(columns: dict[str, tuple[float | None, ...]]) -> dict[str, Any]:
    """Return scores with those of keys such as ``group/colors`` in a table, unless a score has the name of that."""
    found: dict[str, Any] = {}
    for key, values in columns.items():
        table, _, name = key.rpartition("/")
        if table and table not in columns:
            found.setdefault(table, {})[name] = values
        else:
            found[key] = values
    return found


def _sentence(failed: Mapping[int, str], num: int) -> str:
    """Return what failed: the reason, if all samples have one, else those of the first samples."""
    if len(set(failed.values())) == 1 and len(failed) == num:
        return next(iter(failed.values()))[:MAX_ERROR_CHARACTERS]
    return " ".join(f"sample {index}: {text}" for index, text in failed.items())[:MAX_ERROR_CHARACTERS]
