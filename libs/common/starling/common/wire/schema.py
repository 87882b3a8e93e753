"""The schema of the wire, as data: recorded in `schema.json`, shown in `docs/reference/protocol.md`, compared by a
test.

``python -m starling.common.wire.schema`` prints the JSON schema; with ``--markdown`` the page.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from typing import Any, Final

import msgspec

from starling.common.wire import messages

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
    messages.TrainGroup,
    messages.HeldLease,
    messages.LeaseProgress,
    messages.Wait,
    messages.Alarm,
)

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
    """Say what in `present` would break a peer that speaks `recorded`; growth at the end is not a break."""
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
    lines = [PAGE_HEAD.format(version=messages.PROTOCOL_VERSION)]
    titles = {"up": "Up: replica to controller", "down": "Down: controller to replica"}
    for direction, union in DIRECTIONS.items():
        lines.append(f"## {titles[direction]}\n")
        lines += [_section(struct, f"`{struct.__struct_config__.tag}`") for struct in union.__args__]
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


def _section(struct: type[msgspec.Struct], title: str) -> str:
    doc = inspect.getdoc(struct) or ""
    rows = ["| field | type | default |", "|---|---|---|"]
    for field in _fields(struct):
        default = "required" if field["required"] else f"`{field['default']}`"
        rows.append(f"| `{field['name']}` | `{field['type'].replace('|', '∣')}` | {default} |")
    table = "\n".join(rows) + "\n" if len(rows) > 2 else "No fields.\n"
    return f"### {title}\n\n{doc}\n\n{table}"


def _fields(struct: type[msgspec.Struct]) -> list[dict[str, Any]]:
    rows = []
    for field in msgspec.structs.fields(struct):
        row: dict[str, Any] = {"name": field.name, "type": _type(field.type), "required": field.required}
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
