"""A Ray cluster of two nodes on this machine, each at a loopback address of its own, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from slurm_cluster import free_ports, wait_until, with_children

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "tests" / "vllm" / "ray-requirements.txt"
NODES = {"a": "127.0.0.2", "b": "127.0.0.3"}
"""Names of the nodes, which are also their labels `site`, and their addresses."""
PORTS = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
"""Ports that are given: agents of a busy machine are too late to say which they have chosen."""
START_S = 300.0
TRIES = 5
"""Starts of a node: Ray gives one 30 s, which may be short on a busy machine."""
NICENESS = 5
"""What Ray adds for its workers, and so for the replicas."""
MARK = "RAY_NODE_OF_TEST"


def ray_python() -> Path:
    """Return the Python of Ray's environment, which is made once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        from environment import environment_python
    return environment_python("ray_weights", REQUIREMENTS)


class RayCluster:
    """The daemons of two nodes, and commands beside them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of Ray's files, with a short path for their sockets."""
        self.folder, self.python = folder, ray_python()
        self._port = free_ports(1 + len(NODES) * len(PORTS))
        self.address = f"{NODES['a']}:{self._port}"
        self.environment = {
            **os.environ,
            "HOME": str(folder),  # for the token of Ray's cluster
            "RAY_TMPDIR": str(folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": str(NICENESS),
            "OMP_NUM_THREADS": "1",
        }

    def start_node(self, name: str) -> None:
        """Start the daemons of a node, the first one `a`."""
        first = self._port + 1 + list(NODES).index(name) * len(PORTS)
        where = ["--head", f"--port={self._port}"] if name == "a" else [f"--address={self.address}"]
        where += ["--include-dashboard=false"] if name == "a" else []
        command = [
            *(str(self.python.parent / "ray"), "start", *where, f"--node-ip-address={NODES[name]}"),
            *(f"--{kind}-port={first + number}" for number, kind in enumerate(PORTS)),
            *("--min-worker-port=0", "--max-worker-port=0", "--num-cpus=8", "--num-gpus=0", f"--labels=site={name}"),
            *("--object-store-memory=100000000", "--disable-usage-stats"),
        ]
        for _ in range(TRIES):
            log = self.folder / f"start-{name}.log"
            with log.open("ab") as output:
                code = subprocess.run(
                    command,
                    env={**self.environment, MARK: self._mark(name)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    timeout=START_S,
                    preexec_fn=_come_first,
                ).returncode
            if code == 0:
                return
            self.end(name)
        raise AssertionError(f"node {name} did not start\n{log.read_text()[-3000:]}")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of a node: daemons, workers, agents and services."""
        marked = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self._mark(name) and process.status() != psutil.STATUS_ZOMBIE:
                    marked.append(process)
        return with_children(marked)

    def _mark(self, name: str) -> str:
        """Return what the environment of a node's processes has; other clusters have another one."""
        return f"{self.folder.name}-{name}"

    def agents(self, name: str) -> list[psutil.Process]:
        """Return the agents on a node."""
        found = []
        for process in self.processes(name):
            with suppress(psutil.Error):
                words = process.cmdline()
                if words[1:] == ["-m", "starling.cli.launch.agent"]:
                    found.append(process)
        return found

    def services(self, name: str) -> list[psutil.Process]:
        """Return the agents on a node, and all that they have started."""
        return with_children(self.agents(name))

    def service(self, node: str, name: str) -> psutil.Process:
        """Return the process of a replica on a node, by its title."""
        for process in self.services(node):
            with suppress(psutil.Error, IndexError):
                if process.cmdline()[0].strip() == f"starling: {name}":
                    return process
        raise AssertionError(f"{name} does not run on {node}")

    def lose_raylet(self, name: str) -> None:
        """Kill the daemon that is the node for Ray; what it has started has to notice."""
        for process in self.processes(name):
            with suppress(psutil.Error):
                if process.name() == "raylet":
                    process.kill()

    def end(self, name: str) -> None:
        """Kill all processes of a node."""
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def free_cpus(self) -> float:
        """Return the CPUs that nothing has reserved."""
        code = (
            f"import ray; ray.init({self.address!r}, logging_level='error', log_to_driver=False); "
            "print(ray.available_resources().get('CPU', 0))"
        )
        done = subprocess.run(
            [str(self.python), "-c", code], env=self.environment, capture_output=True, text=True, timeout=START_S
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return float(done.stdout.split()[-1])

    def run_environment(self) -> dict[str, str]:
        """Return the environment of `starling run` under Ray's Python: the packages of this one come on top."""
        members = [str(path) for part in ("libs", "services") for path in (ROOT / part).iterdir()]
        return {
            **self.environment,
            "PYTHONPATH": os.pathsep.join([*members, sysconfig.get_paths()["purelib"]]),
            "PYTHONUNBUFFERED": "1",
        }


def _come_first() -> None:
    """Let the daemons run before other work of a busy machine, or they are late for each other."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """Start a cluster; nothing of it is left at the end."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = RayCluster(Path(folder))
        try:
            for name in NODES:
                cluster.start_node(name)
            yield cluster
        finally:
            for name in reversed(NODES):
                cluster.end(name)
            wait_until(lambda: not any(map(cluster.processes, NODES)), "the end of Ray", 60.0)
