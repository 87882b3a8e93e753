"""`starling sync-report`, `record` and `replay`: a run inspected from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from starling.cli.command_line import define

RunFolder = Annotated[Path, Parameter(help="runs/NAME/attempt-N, or runs/NAME for its newest attempt.")]


def sync_report(
    folder: RunFolder,
    /,
    *,
    last: Annotated[int, Parameter(help="Only the newest publications; 0 for all.")] = 0,
    json: Annotated[bool, Parameter(help="Print one JSON object instead.")] = False,
    trace: Annotated[
        int | None,
        Parameter(metavar="VERSION", help="Print the trace of one publication instead, for ui.perfetto.dev."),
    ] = None,
) -> int:
    """Show where the time of weight synchronisation went, and the bottleneck."""
    from starling.cli.report.weight_sync import print_sync_report, print_trace

    if trace is not None:
        print_trace(folder, trace)
    else:
        print_sync_report(folder, last, json)
    return 0


def record(
    folder: RunFolder,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(metavar="FILE", help="The file to write; by default crash-report.zip in that folder.")
    ] = None,
) -> int:
    """Collect a controller's recording, settings and end of log into one file: a crash report."""
    from starling.cli.report.replay import record_run

    record_run(folder, out)
    return 0


def replay(
    source: Annotated[
        Path, Parameter(help="An events-N.rec, a file that `starling record` wrote, or the folder of a run.")
    ],
    /,
    *,
    incarnation: Annotated[int | None, Parameter(help="Which start of the controller; by default the last.")] = None,
    until: Annotated[int | None, Parameter(help="Number of events to replay; by default all.")] = None,
    json: Annotated[bool, Parameter(help="Print one JSON object instead.")] = False,
) -> int:
    """Rebuild a controller's state from its recording, and print it."""
    from starling.cli.report.replay import print_replay

    print_replay(source, incarnation, until, json)
    return 0


sync_report_command = define(
    "sync-report",
    sync_report,
    "RUN_FOLDER [OPTIONS]",
    "Examples:\n  starling sync-report runs/mine --last 10\n"
    "  starling sync-report runs/mine --trace 1200 > version-1200.json",
)
record_command = define("record", record, "RUN_FOLDER [--out FILE]", "Example:\n  starling record runs/mine")
replay_command = define(
    "replay", replay, "FILE_OR_FOLDER [OPTIONS]", "Example:\n  starling replay crash-report.zip --until 1000"
)
