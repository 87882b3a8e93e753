"""Recordings of a controller: collected into a file, and replayed to the state after any event."""

from __future__ import annotations

import contextlib
import re
import zipfile
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from starling.cli.console import Console
from starling.cli.run.attempt import OWN_FILES, attempts_in
from starling.cli.terminal import print_json
from starling.common.errors import ConfigError
from starling.common.files import check_own
from starling.common.ids import LEASE_KINDS
from starling.common.wire.messages import Heartbeat, Hello, LeaseFailed, Leave
from starling.controller.core import events
from starling.controller.shell.recording.format import RecordingPath
from starling.controller.shell.recording.replay import ReplayedController, replay
from starling.controller.shell.status import MetricsHistory, snapshot

NAME: Final = re.compile(r"events-(\d+)\.rec")
LOG_BYTES: Final = 1 << 20
"""Size of the part of the controller's log in a report: its end."""
REPORT: Final = "crash-report.zip"


def record_run(path: Path, out: Path | None) -> None:
    """Write the recordings of a run's controller, its settings and the end of its log into one file.

    Raises:
        ConfigError: there is no recording, or the file cannot be written.
    """
    folder = _folder(path)
    out = out or folder / REPORT
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; give a file with --out")
    recordings = _recordings(folder)
    check_own(folder, OWN_FILES)  # what a link leads to does not belong into a report that is sent to others
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
            for number in sorted(recordings):
                name = f"events-{number}.rec"
                archive.write(folder / name, name)
            if (folder / "config.toml").is_file():
                archive.write(folder / "config.toml", "config.toml")
            archive.writestr("controller.log", _tail(folder / "logs" / "controller.log"))
        partial.rename(out)
    except OSError as error:
        with contextlib.suppress(OSError):  # the disk may be read-only
            partial.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {out}: {error.strerror}; give another file with --out") from None
    numbers = ", ".join(str(number) for number in sorted(recordings))
    print(
        f"wrote {out} ({out.stat().st_size / 1e3:,.0f} kB): incarnations {numbers} of the controller, with the prompts "
        f"and completions of the run; look into it with: starling replay {out}"
    )


def print_replay(source: Path, incarnation: int | None, until: int | None, as_json: bool) -> None:
    """Print the state of a recorded controller after `until` events. Raises ConfigError when there is no recording."""
    if until is not None and until < 0:
        raise ConfigError(f"--until {until} is not a number of events; give one from 0 on")
    replayed = replay(_find(source, incarnation), until)
    view = state_view(replayed)
    if as_json:
        print_json(msgspec.json.encode(view).decode())
    else:
        _show(view, Console())


def state_view(replayed: ReplayedController) -> dict[str, Any]:
    """Return the shown part of a replayed state, as JSON values."""
    state = replayed.controller.state
    seen = snapshot(state, MetricsHistory(0.0), replayed.now, 0)
    members = [
        {
            "name": one.name,
            "role": one.role,
            "version": one.version,
            "leases": sorted(state.replicas.leases.of(one.name, *LEASE_KINDS)),
        }
        for one in seen.replicas
    ]
    return {
        "run": replayed.header.run,
        "incarnation": replayed.header.incarnation,
        "num_events": replayed.num_events,
        "now": replayed.now,
        "ended": replayed.ended,
        "phase": seen.phase,
        "version": seen.version,
        "last_step": seen.last_step,
        "groups": seen.groups,
        "members": members,
        "waiting_for": seen.waiting_for,
        "last_events": [{"number": n, "now": event.now, "what": describe_event(event)} for n, event in replayed.last],
        "commands": [type(command).__name__ for command in replayed.commands],
    }


def describe_event(event: events.Event) -> str:
    """Return an event in words."""
    match event:
        case events.Received(sender=sender, message=message):
            return f"{sender} sent {_describe_message(message)}"
        case events.Ticked():
            return "time passed"
        case events.ReplicaDisconnected(peer=peer):
            return f"the connection of {peer} closed"
        case events.StopRequested(reason=reason):
            return f"a stop was requested: {reason}"
        case events.Fetched(step=step, records=records, problem=problem):
            if problem:
                return f"step {step} cannot be read: {problem}"
            return f"{len(records)} records of step {step} were read"
        case events.Stored(step=step):
            return f"the groups of step {step} are in a file"
        case events.CheckpointRead(digest=digest):
            return f"the digest of the checkpoint is {digest}" if digest else "the checkpoint cannot be read"
        case events.NotSent(peer=peer, lease=lease, reason=reason):
            return f"{lease} was not sent to {peer}: {reason}"
        case events.Profiled(report=report):
            return f"the controller's own profile: {report.state}"


def _describe_message(message: Any) -> str:
    tag = message.__struct_config__.tag
    match message:
        case Hello(role=role, version=version):
            return f"{tag}: a {role} with version {version}"
        case Heartbeat(version=version, leases=leases):
            held = ", ".join(f"{held.lease} {held.phase}" for held in leases) or "nothing"
            return f"{tag}: version {version}, holding {held}"
        case Leave(reason=reason):
            return f"{tag}: {reason}"
        case LeaseFailed(lease=lease, reason=reason):
            return f"{tag} {lease}: {reason}"
        case _:
            return f"{tag} {getattr(message, 'lease', None) or getattr(message, 'request', '')}".rstrip()


def _show(view: dict[str, Any], console: Console) -> None:
    where = f"run {view['run']}, incarnation {view['incarnation']} of the controller"
    console.print(f"{where}: after {view['num_events']} events, at {view['now']:.3f} s of its clock")
    if view["ended"] is None:
        console.print("more events follow")
    elif view["ended"]:
        console.print(f"the recording ends here: {view['ended']}")
    console.print(f"phase {view['phase']}, version {view['version']} of {view['last_step']}")
    groups = ", ".join(f"{num} {state}" for state, num in view["groups"].items() if num) or "none"
    console.print(f"groups: {groups}")
    console.print(f"waiting for: {view['waiting_for']}")
    table = Table(title="members" if view["members"] else "no members", title_justify="left")
    for heading in ("name", "role", "version", "leases"):
        table.add_column(heading, justify="right" if heading == "version" else "left")
    for member in view["members"]:
        leases = " ".join(member["leases"]) or "-"
        table.add_row(member["name"], member["role"], str(member["version"]), leases)
    console.print(table)
    for event in view["last_events"]:
        console.print(f"{event['number']:>8}  {event['now']:.3f} s  {event['what']}", soft_wrap=True)


def _find(path: Path, incarnation: int | None) -> RecordingPath:
    """Return the recording at `path`. Raises ConfigError."""
    if path.is_dir():
        place: RecordingPath = _folder(path)
    elif zipfile.is_zipfile(path):
        try:
            place = zipfile.Path(path)
        except (zipfile.BadZipFile, ValueError) as error:
            raise ConfigError(f"{path} is damaged: {error}; write it again with starling record") from None
    elif path.is_file():
        return path
    else:
        raise ConfigError(f"there is no {path}; give a recording, or the folder of a run")
    recordings = _recordings(place)
    chosen = max(recordings) if incarnation is None else incarnation
    if chosen not in recordings:
        raise ConfigError(
            f"{path} has no recording of incarnation {chosen}; it has {', '.join(map(str, sorted(recordings)))}"
        )
    return recordings[chosen]


def _recordings(place: RecordingPath) -> dict[int, RecordingPath]:
    """Return the recordings in a folder or an archive, by incarnation. Raises ConfigError when there is none."""
    found: dict[int, RecordingPath] = {}
    for file in place.iterdir():
        matched = NAME.fullmatch(file.name)
        if matched and file.is_file() and not _is_link(file):
            found[int(matched[1])] = file
    if not found:
        raise ConfigError(f"{place} has no recording (events-<n>.rec); turn recording on in the recipe of the run")
    return found


def _is_link(file: RecordingPath) -> bool:
    return isinstance(file, Path) and file.is_symlink()


def _folder(path: Path) -> Path:
    """Return `path` when it is the folder of an attempt, else the newest attempt in it. Raises ConfigError."""
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}; give the folder of a run, such as runs/quickstart")
    if any(NAME.fullmatch(file.name) for file in path.iterdir()):
        return path
    attempts = attempts_in(path)
    return max(attempts, key=lambda p: int(p.name.removeprefix("attempt-")), default=path)


def _tail(path: Path) -> bytes:
    """Return the last lines of a file, or nothing when there is no such file."""
    if not path.is_file():
        return b""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        tail = file.read()
    return tail if size <= LOG_BYTES else tail.partition(b"\n")[2]
