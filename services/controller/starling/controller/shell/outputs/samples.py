"""`samples.jsonl`: completions with their rewards, one per line, in bounded space."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from starling.controller.shell.outputs.append_file import AppendFile

SAMPLES: Final = "samples.jsonl"
OLD_SAMPLES: Final = "samples.old.jsonl"


class Samples:
    """Appends to the file until it has half of the space; then it takes the place of its predecessor."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Go on with the files in `folder`, which together hold `most_bytes` at most, give or take a step."""
        self._path, self._old, self._most_bytes = folder / SAMPLES, folder / OLD_SAMPLES, most_bytes
        self._lines = AppendFile(self._path)
        self._size = 0
        with suppress(FileNotFoundError):
            self._size = self._path.stat().st_size

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of `step`, each with its number."""
        if self._size > self._most_bytes // 2:
            self._lines.close()
            with suppress(OSError):  # a file that cannot be moved grows on, which harms less than to lose the run
                os.replace(self._path, self._old)
            self._lines, self._size = AppendFile(self._path), 0
        for row in rows:
            line = json.dumps({"step": step, **row}, ensure_ascii=False)
            self._lines.write(line)
            self._size += len(line.encode()) + 1

    def flush(self) -> None:
        """Write what waits for room on the disk."""
        self._lines.flush()

    def close(self) -> None:
        """Write what can be written, and let the file go."""
        self._lines.close()
