"""Report on the time of weight synchronisation in a run: its parts, the bottleneck and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from starling.cli.console import Console
from starling.cli.run.attempt import Attempt, damaged_lines, iter_metrics
from starling.cli.terminal import print_json
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.weightsync.costs.timeline import (
    PART_MEANINGS,
    PART_REMEDIES,
    TimeSplit,
    chrome_trace,
    publication_timelines,
    time_split,
)

MAX_PAIRS_SHOWN: Final = 20
UNKNOWN: Final = "unknown"
_NUMBERS: Final = ("plan", "sent", "expected", "measured")


def print_sync_report(folder: Path, last: int, as_json: bool) -> None:
    """Print where the time of the newest publications of one attempt went. Raises ConfigError when it has none."""
    if last < 0:
        raise ConfigError(f"--last {last} is not a number of publications; give one from 0 on, 0 for all")
    attempt = Attempt.find(folder)
    with damaged_lines(attempt.metrics, "of a publication or an adoption"):
        split = time_split(publication_timelines(iter_metrics(attempt.metrics, "published", "adopted"), last))
    if split is None:
        raise ConfigError(
            f"no replica has adopted a version in {attempt.folder}; the first is published after the supervised steps: "
            "try again then, or give another run"
        )
    if as_json:
        print_json(json.dumps(msgspec.to_builtins(split)))  # as ASCII: names may have characters that cannot be encoded
    else:
        _show(split, attempt, Console())


def print_trace(folder: Path, version: int) -> None:
    """Print the trace of the newest publication of a version. Raises ConfigError when there is none."""
    attempt = Attempt.find(folder)
    with damaged_lines(attempt.metrics, "of a publication or an adoption"):
        lines = iter_metrics(attempt.metrics, "published", "adopted")
        measured = publication_timelines(line for line in lines if line["version"] == version)
    if not measured:
        raise ConfigError(
            f"version {version} was not published in {attempt.folder}; its lines `published` in metrics.jsonl have the "
            "versions that were"
        )
    print_json(json.dumps(chrome_trace(measured[0])))  # as ASCII, as above


def _show(split: TimeSplit, attempt: Attempt, console: Console) -> None:
    table = Table(
        title=f"{counted(split.num_adoptions, 'adoption')} of {counted(split.num_publications, 'version')}; means",
        title_justify="left",
    )
    for heading in ("part", "ms", "share", "meaning"):
        table.add_column(heading, justify="right" if heading in ("ms", "share") else "left")
    for name, seconds in split.parts.items():
        share = seconds / split.total_s if split.total_s else 0.0
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{share:.0%}", PART_MEANINGS[name])
    table.add_row(
        "wall clock", f"{split.total_s * 1e3:.2f}", "", "from the publication to the adoption", end_section=True
    )
    table.add_row("publish", f"{split.publish_s * 1e3:.2f}", "", "training waited, once a version")
    table.add_row("offer", f"{split.offer_s * 1e3:.2f}", "", "digests of the snapshot, while training continues")
    console.print(table)
    lanes = f" over {', '.join(split.lanes)}" if split.lanes else ""
    console.print(f"{split.rate_bytes_per_s / 1e9:.2f} GB/s while reading{lanes}; {split.num_unproven} not proven")
    if split.sent_share < 1:
        console.print(f"{split.sent_share:.1%} of the weights were sent: the rest had not changed")
    _show_pairs(split, console)
    console.print(f"bottleneck: {split.bottleneck} - {PART_REMEDIES[split.bottleneck]}")
    console.print(
        f"timelines of the newest publications: open {attempt.folder / 'weightsync'}/version-*.json in "
        "ui.perfetto.dev; of any other: --trace VERSION"
    )


def _show_pairs(split: TimeSplit, console: Console) -> None:
    """Show the largest pairs of ranks: how they were connected, and what was expected beside what was measured."""
    if not split.pairs:
        return
    table = Table(title="pairs of ranks; mean MB and ms", title_justify="left")
    for heading in ("from", "to", "link", "by", *_NUMBERS):
        table.add_column(heading, justify="right" if heading in _NUMBERS else "left", overflow="fold")
    for pair in split.pairs[:MAX_PAIRS_SHOWN]:
        table.add_row(
            f"{pair.source}:{pair.source_rank}",
            f"{pair.replica}:{pair.rank}",
            pair.link,
            pair.transport,
            _scaled(pair.num_bytes, 1e-6),
            _scaled(pair.sent_bytes, 1e-6),
            _scaled(pair.expected_s, 1e3),
            _scaled(pair.read_s, 1e3),
        )
    console.print(table)
    hidden = len(split.pairs) - MAX_PAIRS_SHOWN
    if hidden > 0:
        console.print(f"... and {counted(hidden, 'pair')} more: --json prints all")
    console.print(
        f"read of a whole pull: expected {_scaled(split.expected_read_s, 1e3)} ms for one replica alone, measured "
        f"{_scaled(split.parts['read'], 1e3)} ms"
    )


def _scaled(value: float | None, factor: float) -> str:
    return UNKNOWN if value is None else f"{value * factor:.2f}"
