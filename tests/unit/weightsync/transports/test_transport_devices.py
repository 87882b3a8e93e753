"""Network devices of UCX: those of the configured address, and no reader from elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import psutil
import pytest
from transport_peers import NO_TARGET, piece, reader, serving

from starling.weightsync.transports.base import ConnectionLost
from starling.weightsync.transports.devices import (
    NCCL_INTERFACE,
    choose_interface,
    interface_to,
    local_address_to,
    net_devices,
)
from starling.weightsync.transports.ucx.worker import UcxWorker, has_ucx

WANTED = [piece("a", "uint8", (0, 64))]
needs_ucx = pytest.mark.skipif(not has_ucx(), reason="UCX is not installed")


def other_address() -> str:
    """Return an IPv4 address of this machine that is not loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if (
                one.family == socket.AF_INET
                and not one.address.startswith("127.")
                and interface_to(one.address) == name
            ):
                return str(one.address)
    pytest.skip("this machine has the loopback interface only")


def listeners() -> set[str]:
    """Return the IPv4 addresses on which this process listens."""
    mine = {os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)}
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    held = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}
    return {socket.inet_ntoa(bytes.fromhex(address)[::-1]) for address in held}


@contextmanager
def worker(host: str) -> Iterator[UcxWorker]:
    made = UcxWorker(host=host)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.4.5", "::1", "localhost"])
def test_loopback_address_has_the_loopback_device(host: str) -> None:
    assert net_devices(host) == "lo"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "no such host"])
def test_address_without_a_device_has_all(host: str) -> None:
    assert net_devices(host) is None


def test_own_address_has_its_interface() -> None:
    address = other_address()
    assert local_address_to(address) == address
    devices = net_devices(address)
    assert devices is not None
    assert devices.split(",")[0] == interface_to(address) != "lo"


@needs_ucx
def test_worker_listens_on_the_address_of_its_host_only() -> None:
    before, address = listeners(), other_address()
    with worker("127.0.0.1"):
        assert listeners() - before <= {"127.0.0.1"}
    with worker(address):
        assert listeners() - before <= {address}


@needs_ucx
def test_source_and_reader_listen_on_the_address_of_their_host_only() -> None:
    before = listeners()
    with serving("ucx", WANTED) as made, reader("ucx") as inside:
        assert not inside.connect(made.offer).reason
        assert listeners() - before <= {"127.0.0.1"}


@needs_ucx
def test_source_refuses_a_reader_from_another_network() -> None:
    address = other_address()
    with serving("ucx", WANTED) as made, reader("ucx", host=address) as outside:
        port = made.offer.address.rpartition(":")[2]
        offer = msgspec.structs.replace(made.offer, address=f"{address}:{port}")
        outside.client.connect("source", offer)
        outside.client.ask("source", outside.opening(offer)[0], NO_TARGET)
        event = outside.event()
        assert isinstance(event, ConnectionLost)
        with reader("ucx") as inside:
            assert not inside.connect(made.offer).reason, "the source still serves its own network"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.4.5", "::1", "localhost"])
def test_libraries_are_bound_to_the_loopback_device_of_a_loopback_address(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "")
    choose_interface(host, NCCL_INTERFACE)
    assert os.environ[NCCL_INTERFACE] == "=lo"


def test_libraries_are_bound_to_the_device_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "")
    address = other_address()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    choose_interface(address, NCCL_INTERFACE, "GLOO_SOCKET_IFNAME")
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface_to(address)
    assert os.environ[NCCL_INTERFACE] == f"={interface_to(address)}", "without `=` it is the beginning of names"


@pytest.mark.parametrize("host", ["0.0.0.0", "no such host"])
def test_libraries_are_bound_to_no_device_where_the_address_has_none(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "")
    choose_interface(host, NCCL_INTERFACE)
    assert not os.environ[NCCL_INTERFACE]


def test_device_of_the_environment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NCCL_INTERFACE, "bond7")
    choose_interface("127.0.0.1", NCCL_INTERFACE)
    assert os.environ[NCCL_INTERFACE] == "bond7"
