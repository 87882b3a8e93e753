"""Samples that are to be scored, their groups, and their division into requests."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starling.common.errors import ConfigError
from starling.rewardclient.media import Media


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardSample:
    """One completion to score: a text, pixels or latents."""

    completion: str = ""
    prompt: str = ""
    reference: str = ""
    """The right answer, for scorers that compare."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What scorers want to know of the prompt, as JSON can say it."""
    num_tokens: int = 0
    truncated: bool = False
    """Whether the length limit ended it."""
    environment_reward: float | None = None
    group: str = ""
    """Completions of one prompt have one name here, or none and the same prompt, reference and metadata."""
    media: Media | None = None


def group_indices(samples: Sequence[RewardSample]) -> tuple[int, ...]:
    """Return the number of each sample's group, counted from 0 in the order in which they occur.

    Raises:
        ConfigError: the metadata of a sample cannot be written as JSON.
    """
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(_group_key(sample), len(numbers)) for sample in samples)


def _group_key(sample: RewardSample) -> Hashable:
    if sample.group:
        return sample.group
    try:
        metadata = json.dumps(sample.metadata, sort_keys=True, default=dict) if sample.metadata else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the metadata of a sample cannot be written as JSON: {error}") from None
    return sample.prompt, sample.reference, metadata


def split(
    groups: Sequence[int], forms: Sequence[Hashable], sizes: Sequence[int], *, max_samples: int, max_bytes: int
) -> list[tuple[int, ...]]:
    """Divide samples into requests; return the indices of each one's samples.

    The samples of a request have one form, and those of a group with one form stay together, so that scorers can
    compare them. A request exceeds a limit only where it has a single group.

    Args:
        groups: number of each sample's group.
        forms: of each sample's media; samples of different forms cannot be in one request.
        sizes: bytes of each sample.
        max_samples: limit of a request.
        max_bytes: limit of a request.
    """
    units: dict[tuple[Hashable, int], list[int]] = {}
    for index, (group, form) in enumerate(zip(groups, forms, strict=True)):
        units.setdefault((form, group), []).append(index)
    requests: list[list[int]] = []
    open_requests: dict[Hashable, tuple[list[int], int]] = {}
    for (form, _), unit in units.items():
        num_bytes = sum(sizes[index] for index in unit)
        request, filled = open_requests.get(form, ([], 0))
        if not request or len(request) + len(unit) > max_samples or filled + num_bytes > max_bytes:
            request, filled = [], 0
            requests.append(request)
        request += unit
        open_requests[form] = request, filled + num_bytes
    return [tuple(request) for request in requests]
