"""Traces of weight synchronisation for ui.perfetto.dev: weightsync/version-<n>.json for the newest publications.

A run of a week may publish a million times, so older traces are removed. Nothing is lost by that: a trace follows from
the lines of its publication in metrics.jsonl, of which `starling sync-report --trace` makes it again. That is why there
is neither an index nor a choice of slow ones, and why a resumed run needs no other state than the files themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any, Final

import structlog

from starling.common.files import open_own
from starling.weightsync.costs.timeline import chrome_trace, publication_timelines

log = structlog.get_logger(__name__)

MAX_TRACES: Final = 200
"""Files that stay, of the publications that were written last."""
_MAX_REMOVED: Final = 50
"""Files that are removed per written one: the folder of a run of an older version may have a million."""


class Timelines:
    """Collects the metrics lines of one publication, and writes its trace when the next one begins.

    It may be the only one of a run, and a replica may adopt it any number of times: its last adoption counts.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "weightsync"
        self._published: Mapping[str, Any] | None = None
        self._adopted: dict[str, Mapping[str, Any]] = {}
        """By replica."""
        self._is_lost = False
        """Whether the last trace could not be written."""
        self._files = _written_files(self._folder)

    def note(self, line: Mapping[str, Any]) -> None:
        """Add a line of the metrics."""
        if line["kind"] == "published":
            self.write()
            self._published, self._adopted = line, {}
        elif line["kind"] == "adopted" and self._published and line["version"] == self._published["version"]:
            self._adopted[line["replica"]] = line

    def write(self) -> None:
        """Write the trace of the current publication, as far as it is known."""
        if self._published is None:
            return
        for measured in publication_timelines([self._published, *self._adopted.values()]):
            path = self._folder / f"version-{measured.version:06d}.json"
            try:
                self._folder.mkdir(exist_ok=True)
                with os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
                    file.write(json.dumps(chrome_trace(measured)))
                self._is_lost = False
                self._keep_newest(path.name)
            except OSError as error:  # mostly a full disk; a run does not fail for want of a trace
                if not self._is_lost:
                    log.warning("timeline_lost", file=str(path), reason=error.strerror)
                self._is_lost = True

    def _keep_newest(self, written: str) -> None:
        """Remove the oldest files beyond `MAX_TRACES`. Raises OSError.

        The order is that of writing, not of versions: a run that resumes from an earlier state publishes some again.
        """
        self._files.pop(written, None)
        self._files[written] = None
        num_removed = min(len(self._files) - MAX_TRACES, _MAX_REMOVED)
        for name in list(islice(self._files, max(0, num_removed))):
            (self._folder / name).unlink(missing_ok=True)
            del self._files[name]


def _written_files(folder: Path) -> dict[str, None]:
    """Return the names of the traces in a folder, those that were written first in front."""
    written: list[tuple[int, str]] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False) and fnmatchcase(entry.name, "version-*.json"):
                    written.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
    except OSError:  # mostly there is none yet; another error is reported when a trace is written
        return {}
    return dict.fromkeys(name for _, name in sorted(written))
