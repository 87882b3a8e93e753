"""A Slurm cluster of four nodes on this machine, with fake GPUs, in a temporary folder; root starts it.

All nodes have the loopback address. Each has four GPUs, which are character devices like /dev/null: Slurm hands them
out and sets CUDA_VISIBLE_DEVICES, and nothing can compute on them.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo", "shellcheck")
NODES = ("n1", "n2", "n3", "n4")
GPUS = 4
START_S = 60.0
NULL_DEVICE = os.makedev(1, 3)
CONFIGURATION = """
ClusterName=starling
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire={cred_expire_s}
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
GresTypes=gpu
SlurmctldTimeout=10
SlurmdTimeout=15
MinJobAge=3600
KillWait=30
NodeName=n[1-4] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=8 Boards=1 SocketsPerBoard=1 \
CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
"""
CRED_EXPIRE_S = 10
"""A requeued job is not started again before this time, by default two minutes."""


def missing() -> str:
    """Return why no cluster can be started here; nothing if one can."""
    lacking = [name for name in COMMANDS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: install Debian's packages slurm-wlm, munge and shellcheck"
    return "" if os.geteuid() == 0 else "only root can start munged and slurmd, and make device files"


class SlurmCluster:
    """The daemons of a cluster, and commands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Write the configuration, and start munged, slurmctld and a slurmd for each node."""
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        for number in range(GPUS):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, NULL_DEVICE)
        port = free_ports(1 + len(NODES))
        text = CONFIGURATION.format(
            folder=folder, port=port, first=port + 1, last=port + len(NODES), gpus=GPUS, cred_expire_s=CRED_EXPIRE_S
        )
        (folder / "slurm.conf").write_text(text.lstrip())
        gres = f"NodeName=n[1-4] Name=gpu File={folder}/gpu[0-{GPUS - 1}] Flags=nvidia_gpu_env\n"
        (folder / "gres.conf").write_text(gres)
        files = {"key-file": "key", "socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        paths = [f"--{flag}={folder}/munge.{suffix}" for flag, suffix in files.items()]
        self._start("munged", "munged", "--foreground", "--force", *paths)
        wait_until((folder / "munge.sock").exists, "munged", START_S)
        self._start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for name in NODES:
            self.start_node(name)
        wait_until(lambda: self.node_states() == {"idle": len(NODES)}, "all nodes to be idle", START_S)

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def lose_node(self, name: str) -> None:
        """Kill the daemon and all other processes of a node, as a power cut does."""
        tasks = [one for one in self.processes() if variables(one).get("SLURMD_NODENAME") == name]
        parents = [parent for one in tasks if (parent := one.parent()) is not None and parent.name() == "slurmstepd"]
        for process in [psutil.Process(self.daemons[name].pid), *parents, *with_children(tasks)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.daemons.pop(name).wait()

    def _start(self, name: str, *command: str) -> None:
        """Start a daemon; those that serve all nodes come before other work of a busy machine, or clients fail."""
        with (self.folder / f"{name}.out").open("ab") as output:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        if name not in NODES:
            os.setpriority(os.PRIO_PROCESS, self.daemons[name].pid, 0)

    def command(self, *words: str, environment: dict[str, str] | None = None) -> str:
        """Run a command to its end, and return what it prints."""
        done = subprocess.run(
            words, env={**self.environment, **(environment or {})}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def node_states(self) -> dict[str, int]:
        """Return how many nodes are in each state."""
        done = subprocess.run(
            ["sinfo", "-hN", "-o%T"], env=self.environment, capture_output=True, text=True, timeout=60
        )
        states = done.stdout.split()
        return {state: states.count(state) for state in states}

    def job(self, number: str) -> dict[str, str]:
        """Return what Slurm knows of a job, of a heterogeneous one of its first component."""
        command = ["scontrol", "show", "job", "--oneliner", number]
        for _ in range(5):  # a controller of a busy machine may be late, which ends the command by a signal
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
            if done.stdout:
                return dict(word.partition("=")[::2] for word in done.stdout.splitlines()[0].split() if "=" in word)
            time.sleep(1.0)
        raise AssertionError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")

    def processes(self) -> list[psutil.Process]:
        """Return the processes of all jobs and daemons, by the configuration in their environment."""
        conf = self.environment["SLURM_CONF"]
        return with_children([one for one in psutil.process_iter() if variables(one).get("SLURM_CONF") == conf])

    def services(self) -> dict[str, psutil.Process]:
        """Return the processes of services, by their title such as `policy-0.node-1`."""
        titled = {}
        for process in self.processes():
            with suppress(psutil.Error, IndexError):
                title = process.cmdline()[0]
                if title.startswith("starling: "):
                    titled[title.removeprefix("starling: ").strip()] = process
        return titled

    def stop(self) -> None:
        """End all jobs, and then the daemons."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, timeout=60, check=False)
        with suppress(AssertionError):
            wait_until(lambda: not self.command("squeue", "-h"), "the end of all jobs", 60.0)
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
        for daemon in self.daemons.values():
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Start a cluster in `folder`; nothing of it is left at the end."""
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def variables(process: psutil.Process) -> dict[str, str]:
    """Return the environment of a process; nothing if it has ended or is a stranger's."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def with_children(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return processes with all that they have started: a service overwrites its environment by its title."""
    found = {one.pid: one for one in processes}
    for process in processes:
        with suppress(psutil.Error):
            found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def free_ports(num: int) -> int:
    """Return the first of `num` free ports below those that the kernel gives to outgoing connections."""
    for first in range(17_000, 20_000, num):
        probes = [socket.socket() for _ in range(num)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise AssertionError("no free ports between 17000 and 20000")


def wait_until(condition: Callable[[], object], what: str, timeout_s: float) -> None:
    """Wait until `condition()` is true. Raises AssertionError with `what` if that takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(1.0)
