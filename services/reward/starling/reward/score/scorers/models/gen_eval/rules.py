"""Rules of GenEval: from the objects that were found in an image to scores. Pure.

A prompt comes with what its image must include: objects of a class, how many, and for some their colour, or where they
are relative to those of an earlier requirement. An image is *correct* if it has at least these, and *strictly* correct
if it has just as many. Its *score* is the mean of how well each part of the requirements is met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

TAGS: Final = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
COLORS: Final = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS: Final = ("left of", "right of", "above", "below")
MAX_OBJECTS: Final = 16
"""Of a class that are looked at, the most certain ones."""
_THRESHOLDS: Final = {"counting": 0.9}
_THRESHOLD: Final = 0.3
_SHARE_OF_SIZE: Final = 0.1
"""Of the sum of two objects' sizes by which their centres must differ to be beside each other."""
_LEAST_PART: Final = 0.5
"""Of the distance along an axis, for a relation along it."""


class Found(NamedTuple):
    """An object in an image."""

    name: str
    """Its class."""
    confidence: float
    box: tuple[float, float, float, float]
    """Left, top, right, bottom, in pixels."""
    mask: Any = None
    """numpy's array of bool, [H, W]; None without one."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """Objects that an image must include."""

    name: str
    count: int
    color: str = ""
    relation: str = ""
    """To the objects of the requirement `target`."""
    target: int = 0


class Verdict(NamedTuple):
    """What follows for an image."""

    is_correct: bool
    is_strict: bool
    score: float


Colors = Callable[[str, Sequence[Found]], list[str]]
"""From a class and its objects to their colours."""


def requirements_of(include: Any) -> tuple[Requirement, ...]:
    """Return the requirements of a prompt, from its `include`. Raises ValueError when it is none."""
    found = list[Requirement]()
    if not isinstance(include, Sequence) or isinstance(include, str) or not include:
        raise ValueError(f"`geneval_includes` is {include!r:.200}, not a list of objects to include")
    for number, one in enumerate(include):
        try:
            relation, target = one.get("position") or ("", 0)
            requirement = Requirement(one["class"], one["count"], one.get("color") or "", relation, target)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"`geneval_includes` has {one!r:.200}, which is no object to include") from error
        valid = (
            isinstance(requirement.name, str)
            and type(requirement.count) is int
            and requirement.count > 0
            and requirement.color in ("", *COLORS)
            and requirement.relation in ("", *RELATIONS)
            and type(target) is int
            and (0 <= target < number or not relation)
        )
        if not valid:
            raise ValueError(f"`geneval_includes` has {one!r:.200}, which is no object to include")
        found.append(requirement)
    return tuple(found)


def certain_objects(objects: Sequence[Found], tag: str) -> dict[str, list[Found]]:
    """Return the objects that count, by class, the most certain first."""
    threshold = _THRESHOLDS.get(tag, _THRESHOLD)
    by_class: dict[str, list[Found]] = {}
    for one in sorted(objects, key=lambda one: -one.confidence):
        if one.confidence > threshold:
            by_class.setdefault(one.name, []).append(one)
    return {name: some[:MAX_OBJECTS] for name, some in by_class.items()}


def judge(requirements: Sequence[Requirement], objects: Mapping[str, Sequence[Found]], colors: Colors) -> Verdict:
    """Return the verdict on an image with these objects, by class."""
    is_correct = _is_correct(requirements, objects, colors)
    is_strict, score = _strictly(requirements, objects, colors)
    return Verdict(is_correct, is_strict, score)


def relations(one: Found, other: Found) -> set[str]:
    """Return where an object is relative to another; nothing if they overlap too much."""
    centres = [((box[0] + box[2]) / 2, (box[1] + box[3]) / 2) for box in (one.box, other.box)]
    sizes = [(abs(box[2] - box[0]), abs(box[3] - box[1])) for box in (one.box, other.box)]
    offsets = [a - b for a, b in zip(*centres, strict=True)]
    distance = math.hypot(*offsets)
    beyond = []
    for offset, size, other_size in zip(offsets, *sizes, strict=True):
        excess = max(abs(offset) - _SHARE_OF_SIZE * (size + other_size), 0.0)
        beyond.append(math.copysign(excess, offset))
    if not distance or all(abs(part) < 1e-3 for part in beyond):
        return set()
    x, y = (part / distance for part in beyond)
    along = {"left of": -x, "right of": x, "above": -y, "below": y}
    return {relation for relation, part in along.items() if part > _LEAST_PART}


def _is_correct(requirements: Sequence[Requirement], objects: Mapping[str, Sequence[Found]], colors: Colors) -> bool:
    """Return whether an image has at least what is required."""
    correct, groups = True, list[Sequence[Found] | None]()
    for one in requirements:
        found = list(objects.get(one.name, ()))[: one.count]
        matches = len(found) == one.count
        if matches and one.color:
            matches = colors(one.name, found).count(one.color) >= one.count
        if matches and one.relation:
            matches = _is_placed(found, one.relation, groups[one.target])
        groups.append(found if matches else None)
        correct = correct and matches
    return correct


def _strictly(
    requirements: Sequence[Requirement], objects: Mapping[str, Sequence[Found]], colors: Colors
) -> tuple[bool, float]:
    """Return whether an image has just what is required, and the mean of how well each part is met."""
    strict, groups, parts = True, list[Sequence[Found] | None](), list[float]()
    for one in requirements:
        found = objects.get(one.name, ())
        parts.append(1.0 - abs(one.count - len(found)) / one.count)
        matches = len(found) == one.count
        if not matches and (one.color or one.relation):
            parts.append(0.0)
        if matches and one.color:
            num = colors(one.name, found).count(one.color)
            parts.append(1.0 - abs(one.count - num) / one.count)
            matches = num == one.count
        if matches and one.relation:
            matches = _is_placed(found, one.relation, groups[one.target])
            parts.append(float(matches))
        groups.append(found if matches else None)
        strict = strict and matches
    return strict, math.fsum(parts) / len(parts)


def _is_placed(found: Sequence[Found], relation: str, targets: Sequence[Found] | None) -> bool:
    return targets is not None and all(relation in relations(one, target) for one in found for target in targets)
