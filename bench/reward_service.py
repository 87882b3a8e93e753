"""A reward service as a process of its own, for benchmarks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

START_S: Final = 120.0
"""Limit of a start, and of an end, in seconds."""


@contextmanager
def service(folder: Path, recipe: str) -> Iterator[tuple[psutil.Process, int]]:
    """Run a reward service with a recipe; yield its process and its port."""
    (folder / "rewards.toml").write_text(recipe)
    command = [sys.executable, "-m", "starling.reward.shell.main", "--config", str(folder / "rewards.toml")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--dir", str(folder)], stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        end = time.monotonic() + START_S
        while (found := re.search(r"base_url=http://[^ ]*:(\d+)", (folder / "log").read_text())) is None:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.05)
        yield psutil.Process(process.pid), int(found[1])
    finally:
        process.terminate()
        process.wait(START_S)
