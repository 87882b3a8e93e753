"""Traces of weight synchronisation for ui.perfetto.dev: weightsync/version-<n>.json for each publication."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from starling.common.files import open_own
from starling.weightsync.costs.timeline import chrome_trace, publication_timelines

log = structlog.get_logger(__name__)


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
            except OSError as error:  # mostly a full disk; a run does not fail for want of a trace
                if not self._is_lost:
                    log.warning("timeline_lost", file=str(path), reason=error.strerror)
                self._is_lost = True
