"""Schema of the wire as data: recorded in `schema.json`, shown in `docs/reference/protocol.md`, compared by a test.

``python -m starling.common.wire.schema`` prints the JSON schema; with ``--markdown`` the page.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from typing import Any, Final, NamedTuple

import msgspec

from starling.common.wire import messages
from starling.common.wire.messages import (
    AdoptWeights,
    ChangeSetting,
    CheckpointSaved,
    Drain,
    DrainReplica,
    GenerateGroup,
    GroupGenerated,
    GroupInterrupted,
    GroupScored,
    Heartbeat,
    Hello,
    LeaseFailed,
    Leave,
    OperatorReply,
    Profile,
    PublishWeights,
    QueryRun,
    Refused,
    RelayOffered,
    ReleaseLeases,
    ReportFault,
    RequestCheckpoint,
    RequestEvaluation,
    RequestHello,
    RequestProfile,
    RequestSettings,
    RequestStop,
    RoleSettings,
    SaveCheckpoint,
    ScaleReplicas,
    ScoreGroup,
    ScoreTokens,
    Sleep,
    Slept,
    StepTrained,
    TokensScored,
    TrainStep,
    Wake,
    WeightsAdopted,
    WeightsPublished,
    Welcome,
    Woken,
)

DIRECTIONS: dict[str, types.UnionType] = {"up": messages.Up, "down": messages.Down}
NESTED = (
    messages.Envelope,
    messages.TensorMeta,
    messages.Prompt,
    messages.ChatMessage,
    messages.Media,
    messages.Sampling,
    messages.TrajectoryMeta,
    messages.CompletionText,
    messages.ScoredTrajectory,
    messages.ScorerScores,
    messages.TrainGroup,
    messages.HeldLease,
    messages.LeaseProgress,
    messages.ModelFile,
    messages.Wait,
    messages.Alarm,
    messages.ProfileReport,
)


class MessageFamily(NamedTuple):
    """Messages of one purpose, for the page of the protocol."""

    title: str
    text: str
    members: tuple[type[msgspec.Struct], ...]


FAMILIES: Final = (
    MessageFamily(
        "Weight sync",
        "The controller asks a replica to offer a version, and others to pull it. The weights themselves travel from "
        "replica to replica, by the plan in `adopt_weights`.",
        (PublishWeights, WeightsPublished, AdoptWeights, RelayOffered, WeightsAdopted),
    ),
    MessageFamily(
        "Rollout",
        "A prompt goes to a rollout; its completions come back, and are passed on to the rewards and, in distillation, "
        "to a teacher.",
        (GenerateGroup, GroupGenerated, GroupInterrupted, ScoreGroup, GroupScored, ScoreTokens, TokensScored),
    ),
    MessageFamily(
        "Evaluation",
        "An evaluation can be requested during a run. Its groups travel as those of training do, with "
        "`purpose` `evaluate`.",
        (RequestEvaluation,),
    ),
    MessageFamily(
        "Training",
        "Steps of the policy and its checkpoints.",
        (TrainStep, StepTrained, SaveCheckpoint, CheckpointSaved),
    ),
    MessageFamily(
        "Membership",
        "Replicas join, report their state in heartbeats, share devices in time, and leave.",
        (
            RequestSettings,
            RoleSettings,
            Hello,
            Welcome,
            RequestHello,
            Refused,
            Heartbeat,
            ReleaseLeases,
            LeaseFailed,
            Sleep,
            Slept,
            Wake,
            Woken,
            Drain,
            Leave,
            ReportFault,
        ),
    ),
    MessageFamily(
        "Operations",
        "Commands of an operator during a run.",
        (
            QueryRun,
            ChangeSetting,
            ScaleReplicas,
            DrainReplica,
            RequestCheckpoint,
            RequestStop,
            RequestProfile,
            Profile,
            OperatorReply,
        ),
    ),
)
"""All messages by family; a test checks that each message is in exactly one."""

_REPLICAS: Final = ("policy", "rollout", "reward", "teacher")
RECEIVERS: Final[dict[type[msgspec.Struct], tuple[str, ...]]] = {
    PublishWeights: ("policy", "rollout"),
    AdoptWeights: ("policy", "rollout"),
    GenerateGroup: ("rollout",),
    ScoreGroup: ("reward",),
    ScoreTokens: ("teacher",),
    TrainStep: ("policy",),
    SaveCheckpoint: ("policy",),
    Sleep: ("policy", "rollout"),
    Wake: ("policy", "rollout"),
    RoleSettings: _REPLICAS,
    Welcome: _REPLICAS,
    RequestHello: _REPLICAS,
    Refused: (*_REPLICAS, "operator"),
    ReleaseLeases: _REPLICAS,
    Drain: _REPLICAS,
    Profile: _REPLICAS,
    OperatorReply: ("operator",),
}
"""Roles that receive each message of the controller. `ALLOWED_MESSAGES` lists the senders of the others."""

_MODULES: Final = re.compile(r"starling\.common\.wire\.\w+\.|typing\.")


def schema() -> dict[str, Any]:
    """Return the protocol version, and for each struct its tag, fields, types and defaults."""
    out: dict[str, Any] = {"protocol": messages.PROTOCOL_VERSION}
    out["status"] = [str(status) for status in messages.Status]
    for direction, union in DIRECTIONS.items():
        out[direction] = {struct.__struct_config__.tag: _fields(struct) for struct in union.__args__}
    out["nested"] = {struct.__name__: _fields(struct) for struct in NESTED}
    return out


def breaking_changes(recorded: dict[str, Any], present: dict[str, Any]) -> list[str]:
    """Return the changes in `present` that break a peer which speaks `recorded`; growth at the end is not one."""
    problems = []
    for section in ("up", "down", "nested"):
        for name, fields in recorded[section].items():
            now = present[section].get(name)
            if now is None:
                problems.append(f"{section}.{name} is gone")
                continue
            if now[: len(fields)] != fields:
                problems.append(f"{section}.{name} changed a recorded field")
            problems += [
                f"{section}.{name}.{field['name']} is new and has no default"
                for field in now[len(fields) :]
                if field["required"]
            ]
    return problems


def markdown() -> str:
    """Return docs/reference/protocol.md."""
    lines = [PAGE_HEAD.format(version=messages.PROTOCOL_VERSION), *_overview()]
    for family in FAMILIES:
        lines.append(f"## {family.title}\n\n{family.text}\n")
        lines += [_section(struct, f"`{struct.__struct_config__.tag}`", _route(struct)) for struct in family.members]
    lines.append("## Structs inside messages\n")
    lines += [_section(struct, f"`{struct.__name__}`") for struct in NESTED]
    return "\n".join(lines)


PAGE_HEAD = """# The protocol, version {version}

Generated from `libs/common/starling/common/wire/` by `make docs`; do not edit.

Replicas hold one DEALER socket each; the controller holds the ROUTER. Both speak CURVE unless a recipe turns it off.
A message is `[envelope][message][buffer ...]`, the first two MessagePack maps, the rest raw bytes. A message names
its kind in the key `type`. Frames that are too large, do not decode, come from another run or speak another protocol
version are counted, logged once and dropped. Work is a *lease*: delivery is at least once, and the lease id makes it
idempotent. A replica keeps each result until the controller releases its lease.
"""


def _overview() -> list[str]:
    """Return a table of all messages: from whom, to whom."""
    rows = ["| family | message | class | from | to |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        for struct in family.members:
            tag = f"`{struct.__struct_config__.tag}`"
            sender, receiver = _ends(struct)
            rows.append(f"| {family.title} | {tag} | `{struct.__name__}` | {sender} | {receiver} |")
    return ["\n".join(rows) + "\n"]


def _ends(struct: type[msgspec.Struct]) -> tuple[str, str]:
    """Return the sender and the receiver of a message, in words."""
    if struct in RECEIVERS:
        return "controller", _roles(RECEIVERS[struct])
    return _roles(tuple(role for role, allowed in messages.ALLOWED_MESSAGES.items() if struct in allowed)), "controller"


def _roles(roles: tuple[str, ...]) -> str:
    return "every replica" if set(roles) == set(_REPLICAS) else ", ".join(roles)


def _route(struct: type[msgspec.Struct]) -> str:
    sender, receiver = _ends(struct)
    return f"`{struct.__name__}`, {sender} → {receiver}\n\n"


def _section(struct: type[msgspec.Struct], title: str, route: str = "") -> str:
    doc = inspect.getdoc(struct) or ""
    rows = ["| field | type | default |", "|---|---|---|"]
    for field in _fields(struct):
        default = "required" if field["required"] else f"`{field['default']}`"
        rows.append(f"| `{field['name']}` | `{field['type'].replace('|', '∣')}` | {default} |")
    table = "\n".join(rows) + "\n" if len(rows) > 2 else "No fields.\n"
    return f"### {title}\n\n{route}{doc}\n\n{table}"


def _fields(struct: type[msgspec.Struct]) -> list[dict[str, Any]]:
    """Return the fields of a struct by their names on the wire."""
    rows = []
    for field in msgspec.structs.fields(struct):
        row: dict[str, Any] = {"name": field.encode_name, "type": _type(field.type), "required": field.required}
        if not field.required:
            given = field.default is not msgspec.NODEFAULT
            row["default"] = field.default if given else field.default_factory()
        rows.append(row)
    return rows


def _type(annotation: Any) -> str:
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return _MODULES.sub("", str(annotation))


if __name__ == "__main__":
    text = markdown() if "--markdown" in sys.argv else msgspec.json.format(msgspec.json.encode(schema()), indent=1)
    sys.stdout.write(text if isinstance(text, str) else text.decode() + "\n")
