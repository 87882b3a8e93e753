"""`samples.jsonl`: sample completions with their rewards, one per line, in bounded space."""

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
    """Appends to `samples.jsonl`, and rotates it to `samples.old.jsonl` when it has half of the space."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Append to the files in `folder`, which together hold about `max_bytes` at most."""
        self._path, self._old, self._max_bytes = folder / SAMPLES, folder / OLD_SAMPLES, max_bytes
        self._lines = AppendFile(self._path)
        self._size = 0
        with suppress(FileNotFoundError):
            self._size = self._path.stat().st_size

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the rows of `step`, each with the step."""
        if self._size > self._max_bytes // 2:
            self._lines.close()
            with suppress(OSError):  # a file that cannot be moved keeps growing
                os.replace(self._path, self._old)
            self._lines, self._size = AppendFile(self._path), 0
        for row in rows:
            line = json.dumps({"step": step, **row}, ensure_ascii=False)
            self._lines.write(line)
            self._size += len(line.encode()) + 1

    @property
    def problem(self) -> str:
        """Why lines wait, in one sentence; empty when none does."""
        return self._lines.problem

    def flush(self) -> None:
        """Write the lines that wait for space on the disk."""
        self._lines.flush()

    def close(self) -> None:
        """Write the waiting lines as far as possible, and close the file."""
        self._lines.close()
