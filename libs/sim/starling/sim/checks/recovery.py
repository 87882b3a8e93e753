"""Comparison of two restored states of a controller: from the whole journal, and from the compacted one.

The comparison reads every attribute of the state, so that one that is added later cannot be forgotten in a compaction.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

from msgspec.structs import replace

from starling.controller.core.groups.group import Group, Groups, GroupState, is_unscored, lacks_teacher
from starling.controller.core.plan import RunPlan
from starling.controller.core.state import ControllerState, Outbox, RunPrompts
from starling.weightsync.plan.planner import PlanCache

HEAPS: Final = ("_waiting", "_longest", "_to_score", "_to_teacher")
"""Indexes of groups, which may have stale entries: they are compared by the entries that count."""
CONTENTS: Final = (
    "trajectories",
    "tensors",
    "buffers",
    "rewards",
    "components",
    "evaluation_scores",
    "generated_by",
    "temperature",
    "problem",
    "tries",
)
"""Of a group whose step was committed: nothing reads them again, and the journal may have deleted them."""
UNCOMPARED: Final = ("leases", "had_quorum")
"""Leases are not restored, and `difference` compares the other one itself."""
ORDERED: Final = ("_of_prompts", "roots", "_gone")
"""Dictionaries whose order matters."""


def difference(whole: ControllerState, compacted: ControllerState) -> str:
    """Return where two states differ, in words; nothing when they are equal."""
    if whole.replicas.had_quorum and not compacted.replicas.had_quorum:
        return "replicas.had_quorum: True, and False"
    return _difference("state", _plain(whole, whole.version), _plain(compacted, compacted.version))


def _difference(path: str, one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in one or key not in other:
                return f"{path}.{key} is only in one of them"
            if found := _difference(f"{path}.{key}", one[key], other[key]):
                return found
        return ""
    return "" if one == other else f"{path}: {one!r:.300}, and {other!r:.300}"


def _plain(value: Any, version: int) -> Any:
    """Return a value of the state as dictionaries, lists and values that can be compared."""
    match value:
        case RunPlan() | RunPrompts() | Outbox() | PlanCache():
            return None
        case Groups():
            fields = {name: _plain(field, version) for name, field in vars(value).items() if name not in HEAPS}
            return fields | _due(value)
        case Group():
            gone = value.state is GroupState.FROZEN and value.step <= version
            names = [name for name in Group.__struct_fields__ if not (gone and name in CONTENTS)]
            fields = {name: _plain(getattr(value, name), version) for name in names}
            if value.purpose == "evaluate":  # the journal deletes the texts of an evaluation when they are scored
                fields["trajectories"] = [replace(trajectory, text="") for trajectory in value.trajectories]
            if not value.trajectories and value.partial is None:  # it is chosen anew with the next dispatch
                fields.pop("temperature", None)
            return fields
        case dict():
            return {key: _plain(field, version) for key, field in value.items()}
        case list() | tuple() | deque():
            return [_plain(field, version) for field in value]
    attributes = getattr(type(value), "__slots__", None) or getattr(value, "__dict__", None)
    if attributes is None or not type(value).__module__.startswith("starling.controller.core"):
        return value
    plain = {name: _plain(getattr(value, name), version) for name in attributes if name not in UNCOMPARED}
    return plain | {f"order of {name}": list(getattr(value, name)) for name in ORDERED if name in plain}


def _due(groups: Groups) -> dict[str, list[int]]:
    """Return the groups that each index returns, one after the other."""
    live = sorted(groups.live(), key=lambda group: group.ordinal)
    indexes = {name: getattr(groups, name) for name in HEAPS}
    waiting = {group.ordinal for group in live if group.state is GroupState.WAITING}
    return {
        "_waiting": sorted(waiting & set(indexes["_waiting"])),
        "_longest": sorted({entry for entry in indexes["_longest"] if entry[2] in waiting}),
        "_to_score": [group.ordinal for group in live if is_unscored(group) and group.ordinal in indexes["_to_score"]],
        "_to_teacher": [
            group.ordinal for group in live if lacks_teacher(group) and group.ordinal in indexes["_to_teacher"]
        ],
    }
