"""The launcher `slurm`: each replica is a job with a task on each of its nodes, submitted by sbatch, watched by squeue,
ended by scancel.

The jobs are not requeued: the supervisor places a lost replica again, under a new job. The folder of the run has to be
on a file system that all nodes see, as Slurm's users have it; the replica takes its key from there.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starling.cli.deploy.templates import SERVICE, template
from starling.cli.launch.commands import Done, RunningCommand, last_line, run
from starling.cli.launch.interface import CLOSE_S, EXIT_S, Ended, LaunchError, LaunchSite, Placement
from starling.cli.launch.joining import join_command, service_command
from starling.cli.launch.settings import SlurmSettings
from starling.common.files import write_whole

END_S: Final = 60
"""How long the nodes of a replica may go on after the first of them has ended."""
JOB_END_S: Final = 30
"""How long a job may be COMPLETING after its last process: the node's epilog runs, and Slurm's servers talk."""
LOOK_EVERY_S: Final = 2.0
"""How often squeue is asked. It asks the same server as all other users."""
FORMAT: Final = "JobID:|,State:|,exit_code:|,Reason:|"
ADDRESS: Final = "NODE_ADDRESS"
"""Variable of a job's script with the address of its node."""
WAITING: Final = frozenset({"PENDING", "RUNNING", "CONFIGURING", "SUSPENDED", "COMPLETING", "STOPPED", "SIGNALING"})
"""States of a job that has not ended. Others, also those that later versions add, are ends."""
LOST: Final = {
    "NODE_FAIL": "was lost with its node",
    "BOOT_FAIL": "was lost because its node did not start",
    "PREEMPTED": "was preempted by another job of Slurm",
    "TIMEOUT": "reached the time limit of its Slurm job",
    "DEADLINE": "reached the deadline of its Slurm job",
    "REVOKED": "was revoked by Slurm",
}
"""Ends that say nothing of the replica itself."""
_UNKNOWN: Final = "Invalid job id"


@dataclass(frozen=True)
class JobState:
    """One job as squeue shows it."""

    state: str
    code: int
    """Exit code of its script, or minus the signal that ended it."""
    reason: str

    def ended(self, name: str, job: str) -> Ended | None:
        """Return the end of the replica `name`, or None while its job waits or runs."""
        if self.state in WAITING:
            return None
        if self.state in LOST:
            return Ended(name, None, f"{LOST[self.state]} (job {job})")
        if self.state == "CANCELLED":
            return Ended(name, None, f"was cancelled in Slurm (job {job})")
        if self.state == "OUT_OF_MEMORY":
            return Ended(name, -9, f"was killed by Slurm: it used more memory than its job has (job {job})")
        code = self.code if self.state != "COMPLETED" else 0
        return Ended(
            name, code, f"exited with code {code} (job {job})" if code >= 0 else f"was killed by signal {-code}"
        )


def batch_words(placement: Placement, settings: SlurmSettings, log: str) -> list[str]:
    """Return the sbatch command for a replica; the script comes by its input."""
    words = ["sbatch", "--parsable", "--no-requeue", "--open-mode=append", f"--output={log}"]
    num = placement.num_nodes
    words += [f"--job-name=starling-{placement.name}", f"--nodes={num}", f"--ntasks={num}"]
    if num > 1:
        words.append("--ntasks-per-node=1")
    if placement.partition:
        words.append(f"--partition={placement.partition}")
    if placement.num_gpus:
        kind = f":{placement.gpu_kind}" if placement.gpu_kind else ""
        words.append(f"--gres=gpu{kind}:{placement.num_gpus}")
    if placement.node_selector:
        words.append(f"--constraint={constraint_of(placement.node_selector)}")
    return [*words, *settings.options]


def constraint_of(node_selector: Mapping[str, str]) -> str:
    """Return labels of nodes as features of Slurm: the value of each, or its name where the value is `true`."""
    return "&".join(value if value not in ("", "true") else label for label, value in node_selector.items())


def batch_script(command: list[str], settings: SlurmSettings) -> str:
    """Return the script of a job: it becomes the replica, so that Slurm's signals reach that."""
    words = shlex.join(command)
    is_found = (
        f"{ADDRESS}=$(hostname --ip-address | awk '{{ print $1 }}')\nexport {ADDRESS}\n" if ADDRESS in words else ""
    )
    words = re.sub(rf"(\S*={ADDRESS})\b", lambda match: match[1].replace(ADDRESS, f'"${ADDRESS}"'), words)
    return f"#!/bin/sh\n{is_found}exec {f'{settings.prefix} ' if settings.prefix else ''}{words}\n"


def nodes_script(placement: Placement, settings: SlurmSettings, folder: Path) -> str:
    """Return the script of the job of a replica with several nodes: a step with a task on each of them.

    The first node is that of the script, where the others join it. Each task starts its process again when it dies;
    when one gives up, the others get a minute to end by themselves. `folder`: of the run.
    """
    num, service = placement.num_nodes, str(folder / SERVICE)
    options = f"--nodes={num} --ntasks={num} --ntasks-per-node=1 --input=none --kill-on-bad-exit=0 --wait={END_S}"
    prefix = (
        settings.prefix.removeprefix("srun").strip() if settings.prefix.split()[:1] == ["srun"] else settings.prefix
    )
    step = " ".join(filter(None, ["srun", options, prefix]))
    words = [service, placement.role, placement.name.rpartition("-")[2], str(num), *placement.settings]
    return (
        "#!/bin/bash\n"
        f"export RUN={shlex.quote(str(folder))} PROGRAM={shlex.quote(settings.program)}\n"
        f"RDZV=$({shlex.quote(service)} address):$((26000 + SLURM_JOB_ID * 16 % 6000))\n"
        "export RDZV\n"
        "trap : TERM # Slurm has sent the signal to the tasks, too\n"
        f"{step} {shlex.join(words)} &\n"
        'while wait "$!"; code=$?; ((code > 128)) && kill -0 "$!" 2>/dev/null; do :; done\n'
        'exit "$code"\n'
    )


def put_service(folder: Path) -> None:
    """Write the script of the tasks into the folder of the run, unless it is there: other replicas may run it.

    Raises LaunchError.
    """
    path, content = folder / SERVICE, template(SERVICE).encode()
    try:
        if not (os.access(path, os.X_OK) and path.read_bytes() == content):
            write_whole(path, content, executable=True)
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}; make its folder writable, or free space") from None


def parse_queue(text: str) -> dict[str, JobState]:
    """Return the jobs that squeue printed in `FORMAT`, by their numbers; lines that are damaged are left out."""
    jobs = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) >= 4 and fields[0].isdecimal():
            jobs[fields[0]] = JobState(fields[1], _code(fields[2]), fields[3])
    return jobs


def _code(text: str) -> int:
    """Return an exit code, also of the form ``CODE:SIGNAL``, or as wait() has it."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        return 1
    code, number = int(match[1]), int(match[2] or 0)
    if match[2] is None and code > 255:  # of wait(): the code is in the second byte
        code, number = code >> 8, code & 127
    return -number if number else code


class SlurmLauncher:
    """Places replicas as jobs of Slurm."""

    def __init__(self, site: LaunchSite) -> None:
        """Start nothing yet. Raises LaunchError where there is no Slurm."""
        self._site, self._settings = site, site.recipe.launch.slurm
        done = run(["sbatch", "--version"])
        if done.code != 0:
            raise LaunchError(f"sbatch does not work here: {last_line(done.errors)}")
        self._jobs: dict[str, str] = {}
        """Numbers of the jobs that have not ended, by the replica's name."""
        self._asked: RunningCommand | None = None
        self._asked_of: frozenset[str] = frozenset()
        self._has_nodes = False
        """Whether some replica has had several nodes."""
        self._ask_at = float("-inf")
        self._cancelling: list[RunningCommand] = []
        self._said = ""

    @property
    def leave_s(self) -> float:
        """A job ends when its last node has ended, and is seen when squeue is asked next."""
        return EXIT_S + (END_S if self._has_nodes else JOB_END_S) + 2 * LOOK_EVERY_S

    def start(self, placement: Placement) -> None:
        """Submit the job of a replica. Raises LaunchError when Slurm does not accept it."""
        name = placement.name
        words = batch_words(placement, self._settings, str(self._site.attempt.logs / f"{name}.log"))
        done = run(words, given=self._script(placement))
        number = done.output.strip().partition(";")[0]
        if done.code != 0 or not number.isdecimal():
            raise LaunchError(f"Slurm does not accept the job of {name}: {last_line(done.errors or done.output)}")
        self._jobs[name] = number
        self._has_nodes = self._has_nodes or placement.num_nodes > 1
        self._ask_at = 0.0

    def _script(self, placement: Placement) -> str:
        """Return the script of the job of a replica; what it needs is in the run's folder."""
        attempt, name = self._site.attempt, placement.name
        if placement.num_nodes > 1:
            put_service(attempt.folder)
            return nodes_script(placement, self._settings, attempt.folder)
        if placement.role == "policy":
            command = service_command(placement, ADDRESS, self._settings.program)
        else:
            folder = attempt.folder / "joined" / name
            command = join_command(placement, str(attempt.key(name)), str(folder), self._settings.program)
        return batch_script(command, self._settings)

    def poll(self) -> list[Ended]:
        """Return the replicas whose jobs have ended, by the newest answer of squeue; ask again when it is due."""
        self._cancelling = [command for command in self._cancelling if command.poll() is None]
        ended: list[Ended] = []
        if self._asked is not None and (done := self._asked.poll()) is not None:
            self._asked = None
            ended = self._ends(done)
        now = time.monotonic()
        if self._asked is None and self._jobs and now >= self._ask_at:
            self._ask_at, self._asked_of = now + LOOK_EVERY_S, frozenset(self._jobs.values())
            numbers = ",".join(sorted(self._asked_of))
            self._asked = _begin("squeue", "--noheader", "--states=all", f"--jobs={numbers}", f"--Format={FORMAT}")
        return ended

    def stop(self, name: str) -> None:
        """Cancel the job of a replica: SIGTERM, and SIGKILL after Slurm's KillWait."""
        if name in self._jobs:
            self._cancelling.append(_begin("scancel", "--quiet", self._jobs[name]))

    def close(self) -> None:
        """Cancel all jobs, and wait until they have ended."""
        if self._jobs:
            run(["scancel", "--quiet", *self._jobs.values()])
        deadline = time.monotonic() + CLOSE_S / 2
        while self._jobs and time.monotonic() < deadline:
            self.poll()
            time.sleep(0.1)
        for command in (*self._cancelling, *([self._asked] if self._asked is not None else [])):
            command.kill()

    def _ends(self, done: Done) -> list[Ended]:
        """Return the ends in an answer of squeue; a job that it no longer knows is one."""
        if done.code != 0 and _UNKNOWN not in done.errors:
            self._say(f"Slurm does not answer, and its jobs are asked for again: {last_line(done.errors)}")
            return []
        jobs = parse_queue(done.output)
        found = []
        for name, number in list(self._jobs.items()):
            if number not in self._asked_of:
                continue  # it was submitted since
            job = jobs.get(number)
            end = job.ended(name, number) if job else Ended(name, None, f"is no longer known to Slurm (job {number})")
            if end is not None:
                del self._jobs[name]
                found.append(end)
            elif job is not None and job.state == "PENDING" and job.reason not in ("", "None"):  # None: not yet known
                self._say(f"{name} waits in Slurm's queue: {job.reason} (job {number})")
        return found

    def _say(self, text: str) -> None:
        """Show a notice, unless it was the last one."""
        if text != self._said:
            self._said = text
            self._site.say(text)


def _begin(*words: str) -> RunningCommand:
    """Start a command of Slurm. Raises LaunchError."""
    try:
        return RunningCommand(words, output=tempfile.TemporaryFile(), errors=tempfile.TemporaryFile())
    except OSError as error:
        raise LaunchError(f"{words[0]} cannot be run here ({error.strerror}); install it, or set PATH") from None
