"""`starling` commands as a user starts them: real processes, found by a mark in their environment."""

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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from forked_command import ForkedCommand

from starling.cli.model.scratch import make_model_folder
from starling.cli.recipe.schema import load_recipe
from starling.common.net.telemetry import TelemetrySubscriber

RECIPES = Path(__file__).with_name("recipes")
MARK = "STARTED_BY_TEST"
WORDS = [f"{a}{b}{c}" for a in "abcd" for b in "efgh" for c in "ijkl"]
END_S = 240.0
"""Deadline for any command, on a busy machine."""


def make_workdir(folder: Path, **changes: dict[str, Any]) -> Path:
    """Create a working directory with the tiny recipe and its prompts; `changes` override keys of its sections.

    An empty table removes a section.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = tomllib.loads((RECIPES / "tiny.toml").read_text())
    for section, keys in changes.items():
        recipe[section] = {**recipe.get(section, {}), **keys} if keys else {}
    (folder / "tiny.toml").write_text(tomli_w.dumps(recipe))
    write_prompts(folder, WORDS)
    return folder


def make_varied_model(place: Path) -> Path:
    """Create the recipe's model in the new folder `place`, with large weights, so that its answers differ."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = load_recipe([make_workdir(place) / "tiny.toml"], []).model.scratch
    assert settings is not None
    folder = place / "model"
    make_model_folder(settings, folder)
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.3
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write_prompts(folder: Path, words: list[str]) -> None:
    """Write the dataset of the recipe."""
    rows = [{"question": word, "answer": word[::-1]} for word in words]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Command:
    """A `starling` command running in a folder, with its output in files of that folder."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        name: str = "command",
        prefix: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        """Start it after the words of `prefix`, such as ``ip netns exec NAME``, with more `environment` variables.

        Without either, it is forked from a server that has done the imports, unless it has to be `fresh`.
        """
        self.folder, self.mark, self.name = folder, uuid.uuid4().hex, name
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        # SPT_NOENV: setproctitle must not overwrite the memory from which /proc shows the environment.
        own = {MARK: self.mark, "SPT_NOENV": "1", "OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **own, **(environment or {})}
        words = ["-m", "starling.cli.main", *arguments]
        self.process: ForkedCommand | subprocess.Popen[bytes]
        with self._out.open("w") as out, self._err.open("w") as err:
            if not (fresh or prefix or environment):
                self.process = ForkedCommand(words, folder, variables, MARK, self._out, self._err)
                return
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *words],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_heed_hangup,
            )

    @property
    def output(self) -> str:
        return self._out.read_text()

    @property
    def errors(self) -> str:
        return self._err.read_text()

    def wait(self, timeout_s: float = END_S) -> int:
        """Return the exit code."""
        self.wait_until(lambda: self.process.poll() is not None, "exit", timeout_s)
        assert self.process.returncode is not None
        return self.process.returncode

    def wait_until(self, condition: Callable[[], Any], description: str, timeout_s: float = END_S) -> None:
        """Wait until `condition` holds, for at most `timeout_s`, and no longer than the command runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"no {description} within {timeout_s:g} s\n{self.transcript()}"
            ended = self.process.poll() is not None
            assert not ended or condition(), f"the command ended before {description}\n{self.transcript()}"
            time.sleep(0.02)

    def wait_for_output(self, *texts: str, timeout_s: float = END_S) -> None:
        """Wait until all `texts` are in the output."""
        self.wait_until(lambda: all(text in self.output for text in texts), f"output {texts}", timeout_s)

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def signal_terminal(self, number: int) -> None:
        """Send a signal to all processes of its terminal, as the terminal does; the command has to be a fresh one."""
        os.killpg(self.process.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes among this command and all its descendants."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def process_titled(self, title: str) -> psutil.Process:
        """Return the process of this command whose title is ``starling: <title>``."""
        found = [process for process in self.processes() if _command_line(process)[:1] == [f"starling: {title}"]]
        assert len(found) == 1, f"{len(found)} processes have the title {title}\n{self.transcript()}"
        return found[0]

    def transcript(self) -> str:
        """Return its exit code and the ends of its stdout and stderr, for error messages."""
        return f"--- {self.name}, code {self.process.poll()}\n{self.output[-4000:]}\n--- errors\n{self.errors[-3000:]}"

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure does."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # it has ended with a process killed before it
                process.kill()

    def kill_leftovers(self) -> None:
        """Kill all remaining processes; there are some only after a failed test."""
        self.kill()
        self.process.wait(END_S)


@contextmanager
def starling_command(
    folder: Path,
    *arguments: str,
    name: str = "command",
    prefix: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
) -> Iterator[Command]:
    """Start a command; assert at its end that it leaves no process and no file in /dev/shm."""
    before = shared_memory()
    command = Command(folder, *arguments, name=name, prefix=prefix, environment=environment, fresh=fresh)
    try:
        yield command
        command.wait()
        wait_until(lambda: not command.processes(), "the end of its processes", command)
        wait_until(lambda: not _without_owner(shared_memory() - before), "the removal of its shared memory", command)
    finally:
        command.kill_leftovers()


@contextmanager
def rollouts_on_other_hosts(folder: Path, num: int, *arguments: str) -> Iterator[None]:
    """Start rollouts in `folder`, each with another name of its host; they are stopped at the end. Needs root."""
    with ExitStack() as stack:
        for number in range(num):
            command = ["rollout", *arguments, "--name", f"rollout-{number}"]
            named = f'hostname host-{number} && exec "$@"'
            there = ["unshare", "--uts", "sh", "-c", named, "sh", sys.executable, "-m", "starling.cli.main", *command]
            log = stack.enter_context((folder / f"rollout-{number}.log").open("wb"))
            process = subprocess.Popen(there, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
        yield


@contextmanager
def run(folder: Path, *flags: str, fresh: bool = False) -> Iterator[Command]:
    """`starling run` of the recipe in `folder`."""
    with starling_command(folder, "run", "tiny.toml", *flags, name="run", fresh=fresh) as command:
        yield command


def wait_until(condition: Callable[[], bool], description: str, command: Command, timeout_s: float = END_S) -> None:
    """Wait until a `condition` holds that follows from the end of `command`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, (
            f"waited {timeout_s:g} s for {description}: {command.processes()}\n" + command.transcript()
        )
        time.sleep(0.05)


def _heed_hangup() -> None:
    """Undo what `nohup` did to the tests: their children would ignore SIGHUP, too."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _command_line(process: psutil.Process) -> list[str]:
    """Return the arguments of a process, or an empty list when it has ended."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def shared_memory() -> set[str]:
    """Return the files of /dev/shm except semaphores of Python and joblib, whose names do not tell their owner, and
    folders of other tests."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.mp-", "sem.loky-", "power-cuts-"))}


def _without_owner(names: set[str]) -> set[str]:
    """Return the `names` that no living process has mapped; other programs may use /dev/shm too."""
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
    """Return the complete lines of one kind in metrics.jsonl."""
    path = attempt(folder) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [line for line in (json.loads(text) for text in lines if text.endswith("\n")) if line["kind"] == kind]


@contextmanager
def group_counts(folder: Path) -> Iterator[Callable[[], dict[str, int]]]:
    """Subscribe to a run's telemetry; yields a function that returns the number of groups in each state."""
    addresses = json.loads((attempt(folder) / "controller.json").read_text())
    watch = TelemetrySubscriber(addresses["telemetry"], attempt(folder) / "keys" / "observer-0.json")
    try:
        yield lambda: snapshot.groups if (snapshot := watch.latest(0.3)) is not None else {}
    finally:
        watch.close()


def num_steps(folder: Path) -> int:
    """Return the number of completed steps."""
    return len(metrics(folder, "step"))


def trained(folder: Path) -> Counter[str]:
    """Return how often each prompt was trained on by reinforcement learning."""
    return Counter(prompt for line in metrics(folder, "trained") for prompt in line["prompts"])


def checkpoints(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints."""
    found = attempt(folder).glob("checkpoints/*/model.safetensors")
    return sorted(path.parent.name for path in found)


def sentence(command: Command) -> str:
    """Return the only sentence on stderr; assert that no traceback and at most an excerpt of a log follows."""
    lines = command.errors.splitlines()
    assert lines, f"nothing on stderr\n{command.transcript()}"
    assert lines[0].startswith("starling: "), command.transcript()
    assert all(line.startswith(("  its log: ", "  | ")) for line in lines[1:]), command.transcript()
    assert "Traceback" not in command.errors, command.transcript()
    return lines[0].removeprefix("starling: ")


def run_concurrently(*scenarios: Callable[[], None], max_workers: int = 3) -> None:
    """Run independent scenarios in threads, and raise the errors of all that failed."""
    with ThreadPoolExecutor(max_workers) as threads:
        futures = [threads.submit(scenario) for scenario in scenarios]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise BaseExceptionGroup("scenarios failed", errors)
