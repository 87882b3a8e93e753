"""A project of deploy/compose: its containers, their logs, and what its run has recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from docker_host import DockerHost, eventually, run
from docker_images import ROOT, VERSION

FOLDER: Final = ROOT / "deploy/compose"
COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
Lines = list[dict[str, Any]]


class Project:
    """A project with the services of compose.yaml, and what a test changes of them."""

    def __init__(self, host: DockerHost, name: str, folder: Path, **variables: str) -> None:
        """Use the name for containers and volumes, `folder` for the run's keys and configuration, and variables."""
        self.host = host
        self.name = f"starling-test-{name}"
        self.run = folder / name
        self.recipes = folder / "recipes"
        self._changes = folder / f"{name}.json"
        named = {"COMPOSE_PROJECT_NAME": self.name, "RUN": str(self.run), "RECIPES": str(self.recipes)}
        self._environment = {**host.environment, "VERSION": VERSION, **named, **variables}
        self.change({})

    def change(self, changes: dict[str, Any]) -> None:
        """Give it another override file; it holds for services that are started from now on."""
        self._changes.write_text(json.dumps({"services": {}, **changes}))

    def compose(self, *arguments: str | Path, check: bool = True) -> str:
        """Run `docker compose`, and return its output."""
        files = ("--file", FOLDER / "compose.yaml", "--file", self._changes)
        return run("docker", "compose", *files, *arguments, environment=self._environment, folder=FOLDER, check=check)

    def prepare(self) -> None:
        """Make its keys, its configuration and its model, after what was left of a test that was killed."""
        self.remove()
        self.compose("run", "--rm", "prepare")

    def log(self, service: str) -> str:
        """Return the log of all containers of a service, without colours."""
        return COLOUR.sub("", self.compose("logs", "--no-log-prefix", service, check=False))

    def containers(self, service: str) -> list[str]:
        """Return the running containers of a service."""
        return self.compose("ps", "--quiet", service).split()

    def states(self) -> dict[str, tuple[str, int]]:
        """Return the state and the exit code of each container."""
        lines = self.compose("ps", "--all", "--format", "{{.Name}} {{.State}} {{.ExitCode}}").splitlines()
        return {name: (state, int(code)) for name, state, code in map(str.split, lines)}

    def lines(self, kind: str, after: float = 0.0) -> Lines:
        """Return the lines of metrics.jsonl of a kind that were written after a time."""
        path = self.host.volume(f"{self.name}_journal") / "metrics.jsonl"
        if not path.exists():
            return []
        whole = (line for line in path.read_bytes().split(b"\n")[:-1])
        found = (json.loads(line) for line in whole)
        return [line for line in found if line["kind"] == kind and line["time"] > after]

    def step(self) -> int:
        """Return the newest step."""
        return max((line["step"] for line in self.lines("step")), default=0)

    def waits(self, what: str, is_true: Callable[[], bool]) -> None:
        """Wait until it is true; fail with what the containers say."""
        eventually(is_true, what, self.diagnosis)

    def advances(self, num_steps: int = 3) -> int:
        """Wait for some further steps; return the newest."""
        first = self.step()
        self.waits(f"step {first + num_steps}", lambda: self.step() >= first + num_steps)
        return self.step()

    def says(self, service: str, text: str) -> str:
        """Wait until the log of a service has a line that matches; return it."""
        pattern = re.compile(text)

        def found() -> list[str]:
            return [line for line in self.log(service).splitlines() if pattern.search(line)]

        self.waits(f"{service} says {text!r}", lambda: bool(found()))
        return found()[0]

    def diagnosis(self) -> str:
        """Return the states of the containers and the last lines of each."""
        return "\n".join(
            (self.compose("ps", "--all", check=False), self.compose("logs", "--tail=40", "--timestamps", check=False))
        )

    def remove(self) -> None:
        """Remove its containers, networks and volumes."""
        self.compose("--profile", "*", "down", "--volumes", "--timeout=1", "--remove-orphans", check=False)


def memory_mib(container: str, host: DockerHost) -> tuple[float, float]:
    """Return the PSS of a container's processes, and what its control group is charged, both in MiB."""
    top = host.docker("top", container, "-o", "pid").split()[1:]
    rollups = [host.inside("cat", f"/proc/{pid}/smaps_rollup", check=False) for pid in top]
    pss_kib = sum(int(found[1]) for text in rollups if (found := re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)))
    charged = host.docker("stats", "--no-stream", "--format", "{{.MemUsage}}", container).split()[0]
    number, unit = re.fullmatch(r"([\d.]+)([A-Za-z]+)", charged).groups()  # type: ignore[union-attr]
    return pss_kib / 1024, float(number) * {"KiB": 1 / 1024, "MiB": 1, "GiB": 1024}[unit]


def owned_by_service(size: str) -> dict[str, Any]:
    """Return a volume in memory of a size, for the user of the services."""
    options = f"size={size},uid=10001,gid=10001,mode=750"
    return {"driver": "local", "driver_opts": {"type": "tmpfs", "device": "tmpfs", "o": options}}
