"""A Docker daemon for tests: the one that answers here, or one of its own in namespaces of its own.

The own daemon has a network namespace, so that its bridges, its rules of iptables and its forwarding are none of the
machine's; slirp4netns connects it to the outside. With it end its processes, its mounts and its network, however the
test ends. Compose and buildx are fetched as Debian packages where the client lacks them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

PATIENCE_S: Final = 600.0
"""Deadline of a command and of a wait, also on a busy machine."""
PROGRAMS: Final = ("docker", "dockerd", "iptables", "slirp4netns", "unshare", "nsenter", "setpriv", "curl")
PLUGINS: Final = ("compose", "buildx")
HOST: Final = "10.0.2.2"
"""The machine's loopback address, as the daemon's containers reach it."""
DNS: Final = "10.0.2.3"
CGROUP: Final = "starling-compose-test"
START: Final = f"""
until grep --quiet tap0 /proc/net/route; do sleep 0.1; done
# By itself: dockerd gives it 15 s to start.
containerd --root "$0/data/containerd/daemon" --state "$0/exec/containerd" --address "$0/exec/containerd.sock" &
until [ -S "$0/exec/containerd.sock" ]; do sleep 0.1; done
dockerd --data-root "$0/data" --exec-root "$0/exec" --pidfile "$0/exec/pid" --host "unix://$0/docker.sock" \
    --containerd "$0/exec/containerd.sock" --dns {DNS} --cgroup-parent /{CGROUP} &
daemon=$!
trap 'kill $daemon' TERM
until wait $daemon; ! kill -0 $daemon 2>/dev/null; do :; done
"""
KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"
SOURCES: Final = f"deb [signed-by={KEYRING}] http://deb.debian.org/debian trixie main\n"


def run(
    *command: str | Path,
    environment: dict[str, str],
    folder: Path | None = None,
    check: bool = True,
    timeout_s: float = PATIENCE_S,
) -> str:
    """Run a command, in `folder`, and return its output with its errors."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert not check or not done.returncode, f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
    return done.stdout


def eventually(is_true: Callable[[], bool], what: str, diagnosis: Callable[[], str]) -> None:
    """Wait until it is true; fail with `what` was waited for, and why it may not have come."""
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE_S:.0f} s\n{diagnosis()}"
        time.sleep(0.5)


class DockerHost:
    """A daemon, and the commands of its client."""

    def __init__(self, environment: dict[str, str], leader: int = 0) -> None:
        """Take the client's environment, and the first process of the daemon's namespaces, unless they are ours."""
        self.environment = environment
        self._enter = ("nsenter", "-t", str(leader), "-n", "-p", "-m", "--") if leader else ()
        self._root = f"/proc/{leader}/root" if leader else ""

    @property
    def machine(self) -> str:
        """Address of this machine for builds and containers; nothing with a daemon that is not ours."""
        return HOST if self._enter else ""

    def docker(self, *arguments: str | Path, check: bool = True) -> str:
        """Run a command of the client, and return its output."""
        return run("docker", *arguments, environment=self.environment, check=check)

    def inside(self, *command: str, check: bool = True) -> str:
        """Run a command where the daemon's processes and published ports are."""
        return run(*self._enter, *command, environment=self.environment, check=check)

    def kill(self, container: str) -> None:
        """Kill all processes of a container with SIGKILL, as the kernel does when memory lacks.

        Not by `docker kill`, after which Docker does not restart it.
        """
        first = self.docker("inspect", "--format", "{{.State.Pid}}", container).strip()
        self.inside("kill", "-KILL", first)

    def volume(self, name: str) -> Path:
        """Return the folder of a volume, which may be a mount that only the daemon sees."""
        return Path(self._root + self.docker("volume", "inspect", "--format", "{{.Mountpoint}}", name).strip())


def missing() -> str:
    """Return why no daemon can be had here; nothing if one can."""
    if _answers(dict(os.environ)):
        return ""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} not found: install Debian's packages docker.io, iptables, slirp4netns and curl"
    return "" if os.geteuid() == 0 else "only root can start dockerd"


@contextmanager
def docker_host(folder: Path) -> Iterator[DockerHost]:
    """Yield the daemon that answers here, or one whose data is in `folder`, for as long as the context lasts."""
    environment = dict(os.environ)
    _add_plugins(folder, environment)
    if _answers(environment):
        yield DockerHost(environment)
        return
    with (folder / "dockerd.log").open("w") as log:
        yield from _own(folder, environment, log)


def _own(folder: Path, environment: dict[str, str], log: IO[str]) -> Iterator[DockerHost]:
    shutil.rmtree(folder / "exec", ignore_errors=True)  # of a daemon that was killed: its numbers of processes mislead
    environment["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    own = ("--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    space = _background(log, "unshare", *own, "bash", "-c", START, str(folder))
    network: subprocess.Popen[bytes] | None = None
    try:
        leader = _first_child(space)
        network = _background(log, "slirp4netns", "--configure", "--mtu=65520", str(leader), "tap0")
        read_log = (folder / "dockerd.log").read_text
        eventually(lambda: _answers(environment) or space.poll() is not None, "the daemon answers", read_log)
        assert space.poll() is None, read_log()
        yield DockerHost(environment, leader)
        with suppress(ProcessLookupError):
            os.kill(leader, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            space.wait(60.0)
    finally:
        for process in (space, network):
            if process is not None:
                process.kill()  # and by --kill-child all that is in the namespaces
                process.wait(60.0)
        _remove_cgroups()


def _background(log: IO[str], *command: str) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, however that ends."""
    command = ("setpriv", "--pdeathsig=KILL", "--", *command)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _first_child(process: subprocess.Popen[bytes]) -> int:
    children: list[str] = []

    def is_there() -> bool:
        children[:] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return bool(children)

    eventually(is_there, "the namespaces are made", lambda: f"unshare: {process.poll()}")
    return int(children[0])


def _answers(environment: dict[str, str]) -> bool:
    if shutil.which("docker") is None:
        return False
    info = ["docker", "version", "--format", "{{.Server.Version}}"]
    return subprocess.run(info, env=environment, capture_output=True, timeout=60, check=False).returncode == 0


def _add_plugins(folder: Path, environment: dict[str, str]) -> None:
    """Fetch the plugins that the client lacks into `folder`, from a release of Debian that has them."""

    def lacks(plugin: str) -> bool:
        done = subprocess.run(["docker", plugin, "version"], env=environment, capture_output=True, check=False)
        return done.returncode != 0

    configuration = folder / "client"
    if (configuration / "cli-plugins").is_dir():
        environment["DOCKER_CONFIG"] = str(configuration)
    lacking = [plugin for plugin in PLUGINS if lacks(plugin)]
    if not lacking:
        return
    apt = folder / "apt"
    for part in ("lists/partial", "cache/archives/partial", "tree"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "sources").write_text(SOURCES)
    settings = {"Etc::sourcelist": "sources", "State::lists": "lists", "Cache": "cache"}
    options = ["--quiet", "--option=Dir::Etc::sourceparts=-", "--option=APT::Sandbox::User=root"]
    options += [f"--option=Dir::{name}={apt / part}" for name, part in settings.items()]
    run("apt-get", *options, "update", environment=environment)
    for plugin in lacking:
        run("apt-get", *options, "download", f"docker-{plugin}", environment=environment, folder=apt)
        (package,) = apt.glob(f"docker-{plugin}_*.deb")
        run("dpkg-deb", "--extract", package, apt / "tree", environment=environment)
    shutil.copytree(apt / "tree/usr/libexec/docker/cli-plugins", configuration / "cli-plugins", dirs_exist_ok=True)
    shutil.rmtree(apt)
    environment["DOCKER_CONFIG"] = str(configuration)


def _remove_cgroups() -> None:
    """Remove the groups that the daemon made, which are empty once its containers have ended."""
    for top in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")):
        for path, _, _ in os.walk(top / CGROUP, topdown=False):
            with suppress(OSError):
                Path(path).rmdir()
