"""Every round of weight synchronisation leaves a file that ui.perfetto.dev opens: weightsync/version-<n>.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from starling.weightsync.plan.timeline import chrome_trace, publication_timelines

log = structlog.get_logger(__name__)


class Timelines:
    """Collects the lines of one round, and writes it when the next one begins."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "weightsync"
        self._lines: list[Mapping[str, Any]] = []

    def note(self, line: Mapping[str, Any]) -> None:
        """Take in a line of the metrics."""
        if line["kind"] == "published":
            self.write()
            self._lines = [line]
        elif line["kind"] == "adopted" and self._lines:
            self._lines.append(line)

    def write(self) -> None:
        """Write the round that is under way, as far as it is known, and as there is room."""
        for measured in publication_timelines(self._lines):
            path = self._folder / f"version-{measured.version:06d}.json"
            try:
                self._folder.mkdir(exist_ok=True)
                path.write_text(json.dumps(chrome_trace(measured)))
            except OSError as error:  # a full disk, mostly: a picture less is no reason to stop
                log.warning("timeline_lost", file=str(path), reason=error.strerror)
