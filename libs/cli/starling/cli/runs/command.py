"""`starling runs`, `compare` and `report`: commands on the folders of runs, which may run or be over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from starling.cli.command_line import define


def runs(
    folder: Annotated[Path, Parameter(help="The folder with the runs, or that of one run.")] = Path("runs"),
    /,
    *,
    json: Annotated[bool, Parameter(help="Print a JSON array instead.")] = False,
) -> int:
    """List the runs of a folder: state, version reached, last reward and evaluation, start, duration, recipe."""
    from starling.cli.runs.listing import list_runs

    list_runs(folder, json)
    return 0


def compare(
    *folders: Annotated[Path, Parameter(help="Folders of 2 to 8 runs, or of attempts.")],
    out: Annotated[
        Path | None, Parameter(name=("--out", "-o"), metavar="FILE", help="Also write the plots to this HTML file.")
    ] = None,
) -> int:
    """Show the settings in which runs differ and their last figures, and plot them beside each other."""
    from starling.cli.runs.compare import compare as compare_runs

    compare_runs(folders, out)
    return 0


def report(
    folder: Annotated[Path, Parameter(help="runs/NAME with all its attempts, or runs/NAME/attempt-N.")],
    /,
    *,
    out: Annotated[
        Path | None,
        Parameter(
            name=("--out", "-o"),
            metavar="FILE",
            help="The file to write; by default report.html in the folder of the newest attempt.",
        ),
    ] = None,
) -> int:
    """Write the report of a run as one HTML file, with plots, tables and sample completions."""
    from starling.cli.runs.report import write_report

    write_report(folder, out, print)
    return 0


runs_command = define("runs", runs, "[FOLDER] [OPTIONS]", "Example:\n  starling runs runs")
compare_command = define(
    "compare", compare, "RUN RUN ... [OPTIONS]", "Example:\n  starling compare runs/a runs/b -o comparison.html"
)
report_command = define("report", report, "RUN [OPTIONS]", "Example:\n  starling report runs/mine")
