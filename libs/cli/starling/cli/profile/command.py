"""`starling profile`: profile processes of a run while it goes on, and merge what they recorded into one trace."""

from __future__ import annotations

import re
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import App, Group, Parameter

from starling.cli.command_line import define
from starling.cli.operate.command import NO_CONNECTION, Connection, Flags, NoAnswerError, open_client
from starling.cli.terminal import print_json
from starling.common.errors import ConfigError, StarlingError
from starling.common.observe.profiling.limits import FOLDER
from starling.common.observe.terminal import printable

if TYPE_CHECKING:
    from starling.common.net.operator import OperatorClient
    from starling.common.wire.messages import OperatorReply, RequestProfile

POLL_S: Final = 1.0
PATIENCE_S: Final = 180.0
"""How much longer than the time limit of the profile its end may take; the controller gives up before."""
TARGET: Final = re.compile(r"(policy|rollout|reward|teacher)[/-](\d{1,9})")
WHAT: Final = Group("What to record", sort_key=7)


@dataclass(frozen=True)
class Recording:
    """What to record, and for how long."""

    steps: Annotated[int, Parameter(help="Optimizer steps of a policy.")] = 3
    seconds: Annotated[float, Parameter(help="Time of other processes.")] = 10.0
    groups: Annotated[int, Parameter(help="Groups that others answer, in place of --seconds.")] = 0
    limit: Annotated[float, Parameter(metavar="SECONDS", help="Time after which every process ends.")] = 300.0
    ranks: Annotated[str, Parameter(metavar="RANKS", help="Ranks of a policy that torch records: 0,3 or all.")] = "0"
    memory: Annotated[bool, Parameter(help="Allocations, too; on a GPU a snapshot of its memory.")] = False
    flames: Annotated[bool, Parameter(help="Flame graphs of Python, by py-spy.")] = False


RecordingFlags = Annotated[Recording, Parameter(name="*", group=WHAT)]
DEFAULTS: Final = Recording()


def profile(
    *words: Annotated[str, Parameter(name="[RUN_FOLDER] TARGET", help="policy/0, rollout/1, reward/0 or controller.")],
    recording: RecordingFlags = DEFAULTS,
    merge: Annotated[
        Path | None, Parameter(metavar="FOLDER", help="Only merge the files in this folder, RUN/profiles/ID.")
    ] = None,
    connection: Flags = NO_CONNECTION,
) -> int:
    """Profile processes of a run, and merge what they recorded."""
    if merge is not None:
        if words:
            raise ConfigError(f"--merge {merge} merges files that are there; leave {' '.join(words)} out")
        return _merge(merge, connection)
    folder, targets = _parse(words)
    with open_client(folder, connection) as client:
        reply = _record(client, _request(targets, recording), connection)
    if not reply.ok:
        print(f"starling: {printable(reply.text)}", file=sys.stderr)
        return 1
    return _show(folder, reply.data, connection)


def _parse(words: tuple[str, ...]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the folder of the run, if one is given, and the names of the processes."""
    names = [_target(word) for word in words]
    folder = Path(words[0]) if words and names[0] is None else None
    rest = names[1:] if folder is not None else names
    if None in rest:
        word = words[names.index(None, 1 if folder is not None else 0)]
        raise ConfigError(
            f"{word} is no process of a run; write policy/0, rollout/1, reward/0, teacher/0 or controller"
        )
    if not rest:
        raise ConfigError("no process is named; write for example starling profile policy/0 rollout/0 --steps 3")
    return folder, tuple(dict.fromkeys(name for name in rest if name is not None))


def _target(word: str) -> str | None:
    found = TARGET.fullmatch(word)
    return "controller" if word == "controller" else f"{found[1]}-{int(found[2])}" if found else None


def _request(targets: tuple[str, ...], recording: Recording) -> RequestProfile:
    from starling.common.observe.profiling.limits import order_problem
    from starling.common.wire.messages import Profile, RequestProfile

    order = {
        "num_steps": recording.steps,
        "seconds": recording.seconds,
        "num_groups": recording.groups,
        "limit_s": recording.limit,
        "ranks": _ranks(recording.ranks),
        "memory": recording.memory,
        "flames": recording.flames,
    }
    name = uuid.uuid4().hex
    if problem := order_problem(Profile(profile=name, **order)):  # type: ignore[arg-type]
        raise ConfigError(problem)
    return RequestProfile(request=name, targets=targets, **order)  # type: ignore[arg-type]


def _ranks(text: str) -> tuple[int, ...]:
    if text == "all":
        return ()
    numbers = text.split(",")
    if not all(number.isascii() and number.isdecimal() and len(number) < 7 for number in numbers):
        raise ConfigError(f"--ranks {text} are no ranks; write for example 0,3 or all")
    return tuple(sorted({int(number) for number in numbers}))


def _record(client: OperatorClient, request: RequestProfile, connection: Connection) -> OperatorReply:
    """Start the profile and wait for its end. Returns the last answer.

    Raises:
        NoAnswerError: it takes longer than its time limit allows.
    """
    deadline = time.monotonic() + request.limit_s + PATIENCE_S
    reply = client.ask(request, connection.timeout)
    if reply.ok and not connection.json:
        print(f"{printable(reply.text)}: at most {request.limit_s:g} s", flush=True)
    while reply.ok and reply.data.get("active"):
        if time.monotonic() > deadline:
            raise NoAnswerError(f"profile {request.request} has not ended in time; see RUN/profiles/{request.request}")
        time.sleep(POLL_S)
        reply = client.ask(request, connection.timeout)
    return reply


def _show(folder: Path | None, data: dict[str, Any], connection: Connection) -> int:
    """Print what the processes recorded, and merge the files that are on this host. Returns the exit code."""
    name = str(data.get("profile", ""))
    targets: dict[str, dict[str, Any]] = data.get("targets", {})
    trace = _merged(folder, name, connection)
    if connection.json:
        print_json(_encoded({**data, "trace": trace}))
    else:
        for target, report in targets.items():
            print(printable(f"{target}: {report['text']}"))
            for file in report["files"]:
                print(printable(f"  {report['folder']}/{file}"))
        print(printable(trace))
    return 0 if targets and all(report["state"] == "ended" for report in targets.values()) else 1


def _merged(folder: Path | None, name: str, connection: Connection) -> str:
    """Return what was merged, or why nothing was."""
    from starling.cli.profile.merge import merge
    from starling.cli.run.attempt import Attempt

    if connection.controller:
        return "nothing is merged: copy the files of all hosts into one folder, and give it with --merge"
    try:
        return merge(Attempt.find(folder).folder / FOLDER / name).text()
    except StarlingError as error:
        return f"nothing is merged: {error}"


def _merge(folder: Path, connection: Connection) -> int:
    from starling.cli.profile.merge import merge

    merged = merge(folder)
    if connection.json:
        print_json(_encoded({"trace": str(merged.path), "processes": merged.processes, "hosts": merged.hosts}))
    else:
        print(printable(merged.text()))
    return 0


def _encoded(data: dict[str, Any]) -> str:
    import msgspec

    return msgspec.json.encode(data).decode()


command: App = define(
    "profile",
    profile,
    "[RUN_FOLDER] TARGET ... [OPTIONS]\n       starling profile --merge FOLDER",
    "The files are in RUN/profiles/ID; open trace.json in ui.perfetto.dev or chrome://tracing.",
    "Examples:\n  starling profile policy/0 --steps 3\n  starling profile runs/quickstart policy/0 rollout/0",
)
