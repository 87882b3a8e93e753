"""`starling` commands as a user starts them: real processes, watched from outside, each found again by a mark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from starling.common.net.telemetry import TelemetrySubscriber

RECIPES = Path(__file__).with_name("recipes")
MARK = "STARTED_BY_TEST"
WORDS = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
END_S = 90.0
"""Within this every command ends, on a busy machine."""


def workplace(folder: Path, **changes: dict[str, Any]) -> Path:
    """Make a folder with the tiny recipe and its prompts; `changes` replace keys of the recipe's sections.

    A section that is given as an empty table is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = tomllib.loads((RECIPES / "tiny.toml").read_text())
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if keys else {}
    (folder / "tiny.toml").write_text(tomli_w.dumps(recipe))
    write_prompts(folder, WORDS)
    return folder


def write_prompts(folder: Path, words: list[str]) -> None:
    """Write the dataset of the recipe."""
    rows = [{"question": word, "answer": word[::-1]} for word in words]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Command:
    """One `starling` command, in a folder, with its output in files there."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        name: str = "command",
        within: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it behind the words `within`, such as ``ip netns exec NAME``, and with more of an `environment`."""
        self.folder, self.mark, self.name = folder, uuid.uuid4().hex, name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        # Without SPT_NOENV the titles of the processes overwrite the place where their environment is read.
        own = {MARK: self.mark, "SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "starling.cli.main", *arguments],
                cwd=folder,
                env={**os.environ, **own, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def wait(self, timeout_s: float = END_S) -> int:
        """Return the exit code."""
        self.until(lambda: self.process.poll() is not None, "the end", timeout_s)
        assert self.process.returncode is not None
        return self.process.returncode

    def until(self, happened: Callable[[], Any], what: str, timeout_s: float = END_S) -> None:
        """Wait until `happened`, at most `timeout_s`, and no longer than the command runs."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:g} s\n{self.story()}"
            ended = self.process.poll() is not None
            assert not ended or happened(), f"it ended before {what}\n{self.story()}"
            time.sleep(0.02)

    def until_said(self, *texts: str, timeout_s: float = END_S) -> None:
        """Wait for texts in the output."""
        self.until(lambda: all(text in self.output for text in texts), f"saying {texts}", timeout_s)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def family(self) -> list[psutil.Process]:
        """Return every living process that this command started, at whatever remove, and itself."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def titled(self, title: str) -> psutil.Process:
        """Return the process of the family that calls itself ``starling: <title>``."""
        found = [process for process in self.family() if _command_line(process)[:1] == [f"starling: {title}"]]
        assert len(found) == 1, f"{len(found)} processes are called {title}\n{self.story()}"
        return found[0]

    def story(self) -> str:
        """Return all that it said."""
        return f"--- {self.name}, code {self.process.poll()}\n{self.output[-4000:]}\n--- errors\n{self.errors[-3000:]}"

    def kill(self) -> None:
        """Kill all of it at once, as when the power fails."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # gone already with one that was killed before it
                process.kill()

    def put_down(self) -> None:
        """Kill what is left, after a test that failed."""
        self.kill()
        self.process.wait(END_S)


@contextmanager
def started(
    folder: Path,
    *arguments: str,
    name: str = "command",
    within: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Command]:
    """Start a command, and see that it leaves nothing behind: no process, no file in /dev/shm."""
    before = shared_memory()
    command = Command(folder, *arguments, name=name, within=within, environment=environment)
    try:
        yield command
        command.wait()
        awaited(lambda: not command.family(), "its processes to be gone", command)
        awaited(lambda: not _without_owner(shared_memory() - before), "its shared memory to be gone", command)
    finally:
        command.put_down()


@contextmanager
def run(folder: Path, *flags: str) -> Iterator[Command]:
    """`starling run` of the recipe in `folder`."""
    with started(folder, "run", "tiny.toml", *flags, name="run") as command:
        yield command


def awaited(happened: Callable[[], bool], what: str, command: Command, timeout_s: float = END_S) -> None:
    """Wait for something that follows from the end of a command."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}: {command.family()}\n{command.story()}"
        time.sleep(0.05)


def _command_line(process: psutil.Process) -> list[str]:
    """Return the arguments of a process, none of one that has ended meanwhile."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def shared_memory() -> set[str]:
    """Return the files of /dev/shm, without the semaphores of Python and joblib: nobody's can be told by name."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "sem.loky-"))}


def _without_owner(names: set[str]) -> set[str]:
    """Return those of `names` that no living process has mapped: others on this machine may use /dev/shm too."""
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:
            continue
        names = {name for name in names if f"/dev/shm/{name}" not in text}
    return names


def attempt(folder: Path) -> Path:
    """Return the folder of the only attempt."""
    return folder / "runs" / "tiny" / "attempt-1"


def metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the lines of a kind in metrics.jsonl, as far as they are written."""
    path = attempt(folder) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in (json.loads(text) for text in lines if text.endswith("\n")) if line["kind"] == kind]


@contextmanager
def watching(folder: Path) -> Iterator[Callable[[], dict[str, int]]]:
    """Listen to a run's telemetry, as a second screen would. The function counts the groups in each state."""
    addresses = json.loads((attempt(folder) / "controller.json").read_text())
    watch = TelemetrySubscriber(addresses["telemetry"], attempt(folder) / "keys" / "observer-0.json")
    try:
        yield lambda: snapshot.groups if (snapshot := watch.latest(0.3)) is not None else {}
    finally:
        watch.close()


def num_steps(folder: Path) -> int:
    """Return how many steps are made."""
    return len(metrics(folder, "step"))


def trained(folder: Path) -> Counter[str]:
    """Return how often each prompt was trained by reinforcement."""
    return Counter(prompt for line in metrics(folder, "trained") for prompt in line["prompts"])


def checkpoints(folder: Path) -> list[str]:
    """Return the steps of which there is a whole checkpoint."""
    found = attempt(folder).glob("checkpoints/*/model.safetensors")
    return sorted(path.parent.name for path in found)


def sentence(command: Command) -> str:
    """Return the one sentence on stderr. It is no traceback, and nothing but the place of a log follows it."""
    lines = command.errors.splitlines()
    assert lines, f"nothing on stderr\n{command.story()}"
    assert lines[0].startswith("starling: "), command.story()
    assert all(line.startswith(("  its log: ", "  | ")) for line in lines[1:]), command.story()
    assert "Traceback" not in command.errors, command.story()
    return lines[0].removeprefix("starling: ")


def together(*scenarios: Callable[[], None], at_once: int = 3) -> None:
    """Run scenarios that do not disturb each other at the same time, and raise what failed in any of them."""
    with ThreadPoolExecutor(at_once) as threads:
        futures = [threads.submit(scenario) for scenario in scenarios]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise BaseExceptionGroup("scenarios failed", errors)
