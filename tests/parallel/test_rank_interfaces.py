"""Network interfaces on which gloo and NCCL listen: chosen before a process group is made."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from starling.policy.settings.parallel import ParallelSettings
from starling.policy.train.parallel.group import SharedFiles, join_ranks
from starling.weightsync.transports.devices import interface_to

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the interfaces that were chosen when the process group was made, by variable; empty before."""
    found: dict[str, str] = {}
    make = dist.init_process_group

    def observed(*arguments: Any, **options: Any) -> None:
        found.update({name: os.environ[name] for name in (GLOO, NCCL) if name in os.environ})
        make(*arguments, **options)

    monkeypatch.setattr(dist, "init_process_group", observed)
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    return found


def join(folder: Path, address: str = "127.0.0.1") -> None:
    """Join the only rank of a replica, and leave it."""
    files = SharedFiles(*(folder / name for name in SharedFiles._fields))
    for path in files:
        path.touch()
    join_ranks(ParallelSettings(), 0, "cpu", files, address=address)
    dist.destroy_process_group()


def other_address() -> tuple[str, str]:
    """Return an IPv4 address of this machine that is not loopback, and its interface."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            is_other = one.family == socket.AF_INET and not one.address.startswith("127.")
            if is_other and interface_to(one.address) == name:
                return str(one.address), name
    pytest.skip("this machine has the loopback interface only")


def test_ranks_of_one_host_listen_on_the_loopback_interface(chosen: dict[str, str], tmp_path: Path) -> None:
    join(tmp_path)
    assert chosen == {GLOO: "lo", NCCL: "=lo"}


def test_nccl_of_ranks_that_other_hosts_reach_listens_on_the_interface_of_their_address(
    chosen: dict[str, str], tmp_path: Path
) -> None:
    """NCCL has one interface for all groups of a process, also for those with other replicas."""
    address, interface = other_address()
    join(tmp_path, address=address)
    assert chosen == {GLOO: "lo", NCCL: f"={interface}"}


def test_interface_of_the_environment_stays(
    chosen: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NCCL, "bond7")
    join(tmp_path)
    assert chosen[NCCL] == "bond7"
