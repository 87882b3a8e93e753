"""The filter of system calls: truncation behind old versions of Landlock, protocols of netlink, sizes of pipes."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from starling.common.sandbox import syscalls

TRUNCATE = """
import os, sys
from starling.common.sandbox import syscalls

version, path = int(sys.argv[1]), sys.argv[2]
syscalls.landlock_version = lambda: version
syscalls.forbid_new_privileges()
assert syscalls.forbid_kernel_interfaces("landlocked", network=False)
for attempt in (lambda: os.truncate(path, 0), lambda: os.close(os.open(path, os.O_RDONLY | os.O_TRUNC))):
    try:
        attempt()
        print("done")
    except PermissionError:
        print("refused")
with open(path) as file:
    file.read()
with open(path, "w") as file:
    file.write("written")
"""


@pytest.mark.skipif(syscalls.filter_program("landlocked", 1, network=False) is None, reason="there is no filter here")
@pytest.mark.parametrize(("version", "outcome"), [(2, "refused"), (3, "done")])
def test_truncation_is_refused_where_landlock_allows_it(version: int, outcome: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("contents")
    command = [sys.executable, "-c", TRUNCATE, str(version), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [outcome, outcome]
    assert path.read_text() == "written", "what may be written can be written"


NETLINK = """
import socket, sys
from starling.common.sandbox import syscalls

syscalls.forbid_new_privileges()
assert syscalls.forbid_kernel_interfaces("landlocked", network=sys.argv[1] == "network")
for protocol in range(32):
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).close()
    except PermissionError:
        continue
    except OSError:  # this kernel has no such protocol
        pass
    print(protocol)
"""


@pytest.mark.skipif(syscalls.filter_program("landlocked", 1, network=False) is None, reason="there is no filter here")
def test_only_routes_are_read_by_netlink() -> None:
    def allowed(network: str) -> list[int]:
        command = [sys.executable, "-c", NETLINK, network]
        return [int(line) for line in subprocess.run(command, capture_output=True, check=True).stdout.split()]

    assert allowed("none") == [socket.NETLINK_ROUTE]
    assert allowed("network") == list(range(32))


PIPE_SIZE = """
import fcntl, os, sys
from starling.common.sandbox import syscalls

reading, writing = os.pipe()
syscalls.forbid_new_privileges()
assert syscalls.forbid_kernel_interfaces(sys.argv[1])
assert fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ) > 0
try:
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 1 << 17)
    print("done")
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(syscalls.filter_program("own", 0, network=False) is None, reason="there is no filter here")
@pytest.mark.parametrize("surroundings", ["own", "landlocked", "shared"])
def test_size_of_pipes_cannot_be_set(surroundings: str) -> None:
    """A user has 16,384 pages for all its pipes: 64 of the largest size would take them."""
    done = subprocess.run([sys.executable, "-c", PIPE_SIZE, surroundings], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"]
