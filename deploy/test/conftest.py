"""What holds for all tests of deployments: packages first, nothing is left by a file, a summary at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import pytest

PACKAGES: Final = Path(__file__).parent / "packages.txt"
MARK: Final = "STARTED_BY_TEST_OF_DEPLOYMENTS"
"""Variable of the environment by which the processes are found that a file of tests has started."""
END_S: Final = 120.0
"""How long processes may take to end after the tests of a file, on a busy machine."""
OUTCOMES: Final = ("passed", "failed", "error", "skipped")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Install what lacks, as root; tests whose programs are not there say so, and are skipped."""
    chosen = [Path(argument.partition("::")[0]) for argument in session.config.args]
    missing = [name for name in _packages(chosen) if not _is_installed(name)]
    if not missing or session.config.option.collectonly:
        return
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        sys.stderr.write(f"not installed, since only root can: {', '.join(missing)}\n")
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "--quiet", "--yes", "--option=Acquire::Retries=3", "--option=DPkg::Lock::Timeout=600"]
    for command in ([*apt, "update"], [*apt, "install", "--no-install-recommends", *missing]):
        code = subprocess.run(command, env=environment, check=False, timeout=1800).returncode
        if code:
            sys.stderr.write(f"{' '.join(command)}: exit code {code}; tests that need what lacks are skipped\n")


def _packages(chosen: list[Path]) -> list[str]:
    """Return the Debian packages that the tests of the chosen files and folders install."""
    lines = (line.partition("#") for line in PACKAGES.read_text().splitlines())
    return [name.strip() for name, _, comment in lines if name.strip() and _is_needed(comment, chosen)]


def _is_needed(comment: str, chosen: list[Path]) -> bool:
    """Return whether a chosen file, or folder, needs the package, and the program after `unless` is not there."""
    tests, _, program = (part.strip() for part in comment.partition("; unless "))
    is_chosen = any(path.suffix != ".py" or path.stem in tests.split(", ") for path in chosen)
    return is_chosen and (not program or shutil.which(program) is None)


def _is_installed(package: str) -> bool:
    if shutil.which("dpkg-query") is None:
        return False
    query = ["dpkg-query", "--show", "--showformat=${db:Status-Status}", package]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout == "installed"


@pytest.fixture(scope="module", autouse=True)
def leaves_nothing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a file of tests that leaves processes, mounts, or files in /dev/shm; the processes are killed."""
    name, folder = Path(str(request.path)).stem, tmp_path_factory.getbasetemp()
    mounts, shared = _mounts(folder), _shared_files()
    os.environ[MARK] = name
    try:
        yield
    finally:
        del os.environ[MARK]
    left = _await_end(name)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    found = [f"the process {process.pid}" for process in left]
    found += [f"the mount {path}" for path in _mounts(folder) - mounts]
    found += [f"/dev/shm/{path}" for path in _shared_files() - shared if not _is_mapped(path)]
    assert not found, f"{name} left {', '.join(found)}"


def _await_end(name: str) -> list[psutil.Process]:
    """Wait until the processes that a file has started have ended. Returns those that have not."""
    deadline = time.monotonic() + END_S
    while (left := _started_by(name)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def _started_by(name: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _mounts(folder: Path) -> set[str]:
    """Return the mounts below a folder."""
    paths = {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()}
    return {path for path in paths if path.startswith(f"{folder}/")}


def _shared_files() -> set[str]:
    """Return the files of /dev/shm, except semaphores of Python, whose names do not tell their owner."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "sem.loky-", "power-cuts-"))}


def _is_mapped(name: str) -> bool:
    """Return whether a living process has mapped a file of /dev/shm: it is of another program."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each file: how many tests passed, and why others were skipped or failed."""
    counts: dict[str, Counter[str]] = {}
    seconds, reasons = Counter[str](), dict[str, dict[str, None]]()
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, ()):
            name = Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_deploy_")
            counts.setdefault(name, Counter())[outcome] += 1
            if isinstance(report.longrepr, tuple):
                reasons.setdefault(name, {})[report.longrepr[2].removeprefix("Skipped: ")] = None
            elif outcome != "passed":
                reasons.setdefault(name, {})[report.nodeid.partition("::")[2]] = None
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[Path(report.nodeid.partition("::")[0]).stem.removeprefix("test_deploy_")] += round(
                    report.duration
                )
    terminalreporter.section("deployments")
    for name, found in sorted(counts.items()):
        numbers = ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome])
        terminalreporter.write_line(f"{name}: {numbers} in {seconds[name]} s" + "".join(
            f"\n    {reason}" for reason in reasons.get(name, ())
        ))  # fmt: skip
