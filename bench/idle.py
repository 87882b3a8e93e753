"""Memory and processor time of a controller that waits for the other services.

    python bench/idle.py [--quick]

A real controller is started with recipes/quickstart.toml, and no replica joins. Measured is what it takes once it
listens and has settled.

    idle_memory_mb    resident memory, shared libraries included
    idle_core_share   processor time over wall time: the share of one core
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from figure import machine, print_figure

ROOT: Final = Path(__file__).resolve().parent.parent
START_S: Final = 120.0
SETTLE_S: Final = 5.0
STOP_S: Final = 30.0


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start a controller, and return once it listens."""
    command = [sys.executable, "-m", "starling.controller.shell.main", "--config", "recipes/quickstart.toml"]
    flags = ["--dir", str(folder), "--run.id", "bench-idle", "--network.curve", "false", "--network.host", "127.0.0.1"]
    log = (folder / "log").open("wb")
    process = subprocess.Popen([*command, *flags], cwd=ROOT, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    end = time.monotonic() + START_S
    while not (folder / "controller.json").exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise SystemExit(f"the controller does not listen:\n{(folder / 'log').read_text()}")
        time.sleep(0.05)
    return process


def cpu_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the processor time that a process has taken, its threads included."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 seconds instead of a minute")
    seconds = 10.0 if parser.parse_args().quick else 60.0
    with tempfile.TemporaryDirectory() as name:
        process = start(Path(name))
        try:
            time.sleep(SETTLE_S)
            before, begun = cpu_seconds(process), time.monotonic()
            time.sleep(seconds)
            share = (cpu_seconds(process) - before) / (time.monotonic() - begun)
            memory = memory_mb(process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_S)
    detail = {"seconds": seconds, **machine()}
    print_figure("idle", "idle_memory_mb", memory, unit="MB", goal=120, better="lower", detail=detail)
    print_figure("idle", "idle_core_share", share, unit="share", goal=0.01, better="lower", detail=detail)


if __name__ == "__main__":
    main()
