"""Machines with systemd: containers of `systemd-nspawn`, on a copy of the files of this system.

What a machine writes is in a file system in memory, which outlives its processes: it can be switched off and booted
again. Machines with an address reach each other by a bridge of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PATIENCE_S: Final = 180.0
PROGRAM: Final = Path("/opt/starling/bin/starling")
LAUNCHER: Final = f"""#!/bin/sh
export PYTHONPATH={{parts}}:/opt/packages LD_LIBRARY_PATH=/opt/python/lib
exec /opt/python/bin/python{sys.version_info.major}.{sys.version_info.minor} -m starling.cli.main "$@"
"""
BRIDGE: Final = "starling-lab"
"""At most 15 characters, as for every network interface."""
DISK_SIZE: Final = "2g"
"""Limit of what a machine writes, which is in memory."""
NETWORK: Final = """[Unit]
Description=Address of this machine
Before=network-online.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'ip link set lo up; ip address replace {address}/24 dev host0; ip link set host0 up'
"""


class Machine:
    """A machine, which is switched on and off."""

    def __init__(self, folder: Path, name: str, address: str = "") -> None:
        """Create a machine; with `address` it is part of the network."""
        self.name, self.address = name, address
        self._folder, self._tree = folder, folder / "tree"
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0

    def run(self, *command: str, check: bool = True, timeout_s: float = PATIENCE_S) -> str:
        """Run a command in it as root, and return its output."""
        enter = ("nsenter", "-t", str(self._leader), "-m", "-u", "-i", "-n", "-p", "--", *command)
        done = subprocess.run(enter, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert not check or not done.returncode, done.stdout + done.stderr
        return done.stdout

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Write a file in it."""
        self.run("sh", "-c", 'mkdir -p "$(dirname "$0")" && printf %s "$1" > "$0" && chmod "$2" "$0"', path, text, mode)

    def value(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--property", name, "--value", unit).strip()

    def log(self, unit: str, after: str = "") -> str:
        """Return the journal of a unit, if `after` is given from that position on."""
        words = ["--after-cursor", after] if after else []
        return self.run("journalctl", "--no-pager", "--output", "cat", "--unit", unit, *words)

    def log_position(self) -> str:
        """Return the position of the end of the journal."""
        words = ("--no-pager", "--lines", "1", "--show-cursor", "--quiet", "--output", "cat")
        return self.run("journalctl", *words).splitlines()[-1].removeprefix("-- cursor: ")

    def boot(self) -> None:
        """Switch it on, and wait until it has booted."""
        nspawn = shutil.which("systemd-nspawn")
        assert nspawn is not None
        binds = {
            sys.base_prefix: "/opt/python",
            sysconfig.get_path("purelib"): "/opt/packages",
            str(ROOT): "/srv/starling",
        }
        command = [nspawn, "--directory", str(self._tree), "--boot", "--register=no", "--keep-unit", "--tmpfs=/tmp"]
        command += ["--machine", self.name, f"--network-bridge={BRIDGE}" if self.address else "--private-network"]
        command += [f"--bind-ro={source}:{target}" for source, target in binds.items()]
        with (self._folder / "boot.log").open("a") as log:
            self._process = subprocess.Popen(
                [*command, "--", "--unit=multi-user.target"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._leader = self._booted(self._process)

    def prepare(self) -> None:
        """Make its disk, with the files that it needs before it boots for the first time."""
        disk = self._folder / "disk"
        for folder in (disk, self._tree):
            folder.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE},mode=0755", "starling-disk", disk], check=True)
        for name in ("upper", "work"):
            (disk / name).mkdir()
        layers = f"lowerdir=/,upperdir={disk}/upper,workdir={disk}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "overlay", self._tree], check=True)
        (self._tree / "etc/machine-id").write_text("")  # systemd makes one
        (self._tree / "etc/hostname").write_text(f"{self.name}\n")
        (self._tree / "var/log/journal").mkdir(exist_ok=True)  # the journal outlives a boot
        for services in (*self._tree.glob("etc/systemd/system/*.wants"), *self._tree.glob("etc/rc?.d")):
            shutil.rmtree(services)  # of this system
        parts = ":".join(f"/srv/starling/{path.relative_to(ROOT)}" for path in _parts())
        program = self._tree / PROGRAM.relative_to("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(LAUNCHER.format(parts=parts))
        program.chmod(0o755)
        if self.address:
            units = self._tree / "etc/systemd/system"
            (units / "lab-network.service").write_text(NETWORK.format(address=self.address))
            for target in ("network-online.target.wants", "multi-user.target.wants"):
                (units / target).mkdir()
                (units / target / "lab-network.service").symlink_to("/etc/systemd/system/lab-network.service")

    def remove(self) -> None:
        """Switch it off, and remove its disk."""
        self.switch_off()
        for folder in (self._tree, self._folder / "disk"):
            if os.path.ismount(folder):
                subprocess.run(["umount", folder], check=True)

    def switch_off(self) -> None:
        """Shut it down; a machine that does not end is killed."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30.0)
        self._process = None

    def connect(self, connected: bool) -> None:
        """Plug its network cable in, or out."""
        link = f"vb-{self.name}"[:15]
        subprocess.run(["ip", "link", "set", link, "up" if connected else "down"], check=True)

    def _booted(self, process: subprocess.Popen[bytes]) -> int:
        """Wait until it has booted; return its first process."""
        log = self._folder / "boot.log"
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            assert process.poll() is None, log.read_text()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            if children:
                enter = ["nsenter", "-t", children[0], "-m", "-u", "-i", "-n", "-p", "--"]
                # Not whether it runs altogether: services of Starling are started with it, and that may take long.
                unit = "lab-network.service" if self.address else "basic.target"
                state = subprocess.run([*enter, "systemctl", "is-active", unit], capture_output=True, timeout=60)
                if state.returncode == 0:
                    return int(children[0])
            time.sleep(0.2)
        raise AssertionError(log.read_text())


@contextmanager
def machine(folder: Path) -> Iterator[Machine]:
    """Boot a machine with Starling in /opt/starling; it is gone at the end. Skips where that cannot be."""
    with machines(folder, {"starling-test": ""}) as (made,):
        yield made


@contextmanager
def machines(folder: Path, addresses: dict[str, str]) -> Iterator[tuple[Machine, ...]]:
    """Boot machines by name and address; an empty address is that of a machine without a network.

    They are gone at the end. Skips where that cannot be.
    """
    if shutil.which("systemd-nspawn") is None or os.geteuid() != 0:
        pytest.skip("needs root and systemd-nspawn, of the package systemd-container")
    made = tuple(Machine(folder / name, name, address) for name, address in addresses.items())
    with ExitStack() as stack:
        if any(addresses.values()):
            subprocess.run(["ip", "link", "add", BRIDGE, "type", "bridge"], check=True)
            stack.callback(subprocess.run, ["ip", "link", "delete", BRIDGE], check=True)
            subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
        for one in made:
            stack.callback(one.remove)
            one.prepare()
            one.boot()
        yield made


def _parts() -> list[Path]:
    return sorted(path for folder in ("libs", "services") for path in (ROOT / folder).iterdir() if path.is_dir())
