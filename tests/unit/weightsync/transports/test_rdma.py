"""RDMA ports of a host, the transport that follows from them, and the notice where they are not used."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from transport_peers import needs_nixl

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer, make_offer
from starling.weightsync.transports.endpoints import check_offered_transports, choose_transport
from starling.weightsync.transports.rdma import SYSFS, RdmaPort, active_ports, unused_rdma
from starling.weightsync.transports.registry import choose_for_host
from starling.weightsync.transports.ucx.worker import components, has_rdma, has_ucx, options_for

HOST = "10.0.0.1"
NDR = "400 Gb/sec (4X NDR)"


def add_port(root: Path, device: str, number: str = "1", **attributes: str) -> None:
    folder = root / device / "ports" / number
    folder.mkdir(parents=True)
    for name, value in attributes.items():
        (folder / name).write_text(f"{value}\n")


@pytest.fixture
def infiniband(tmp_path: Path) -> Path:
    add_port(tmp_path, "mlx5_1", state="1: DOWN", link_layer="InfiniBand", rate="10 Gb/sec (4X SDR)")
    add_port(tmp_path, "mlx5_0", state="4: ACTIVE", link_layer="InfiniBand", rate=NDR)
    return tmp_path


def test_active_ports_are_those_whose_link_is_up(infiniband: Path) -> None:
    add_port(infiniband, "mlx5_0", "2", state="2: INIT", link_layer="InfiniBand", rate=NDR)
    add_port(infiniband, "mlx5_2", state="4: ACTIVE", link_layer="Ethernet", rate="100 Gb/sec (4X EDR)")
    first, second = active_ports(infiniband)
    assert first == RdmaPort("mlx5_0", "1", "InfiniBand", NDR, True)
    assert [str(first), str(second)] == [f"mlx5_0:1 (InfiniBand, {NDR})", "mlx5_2:1 (RoCE, 100 Gb/sec (4X EDR))"]


def test_host_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert active_ports(tmp_path / "infiniband") == ()


def test_damaged_entries_are_no_active_ports(tmp_path: Path) -> None:
    add_port(tmp_path, "silent")
    add_port(tmp_path, "garbage", state="\x00\xff" * 5000)
    (tmp_path / "portless").mkdir()
    (tmp_path / "file").write_text("4: ACTIVE")
    add_port(tmp_path, "bare", state="4: ACTIVE")
    assert [str(port) for port in active_ports(tmp_path)] == ["bare:1"]


@pytest.mark.parametrize(
    ("choice", "host", "encrypt", "wanted"),
    [
        ("auto", HOST, False, ("ucx", False)),
        ("auto", HOST, None, ("tcp", True)),  # the network is not declared private
        ("auto", HOST, True, ("tcp", True)),
        ("tcp", HOST, False, ("tcp", False)),
        ("auto", "127.0.0.1", None, ("ucx", False)),
    ],
)
def test_rdma_is_chosen_by_itself_on_a_private_network(
    choice: Any, host: str, encrypt: bool | None, wanted: tuple[str, bool]
) -> None:
    assert choose_transport(choice, host, encrypt=encrypt, rdma=True) == wanted


@pytest.mark.parametrize("transport", ["ucx", "tcp"])
def test_reader_on_a_private_network_accepts_what_its_source_has_chosen(transport: Any) -> None:
    rank = RankOffer(rank=0, transport=transport, address=f"{HOST}:9", secret="s", snapshot=1, holds="h", root="0" * 32)
    offer = make_offer(1, [rank])
    check_offered_transports(offer, "auto", "10.0.0.2", encrypt=False)
    for choice, encrypt in (("auto", None), ("auto", True)):
        with pytest.raises(WeightsError, match=r"does not allow at|cannot encrypt"):
            check_offered_transports(offer, choice, "10.0.0.2", encrypt=encrypt)


@pytest.mark.parametrize(
    ("transport", "choice", "encrypt", "has", "remedy"),
    [
        ("tcp", "auto", None, True, "RDMA cannot encrypt them: on a private network set network.encrypt_weights ="),
        ("tcp", "auto", True, True, "RDMA cannot encrypt them, which network.encrypt_weights = true requires"),
        ("tcp", "auto", False, False, "no UCX with RDMA is installed here: install one, or install NIXL and choose"),
        ("ucx", "ucx", None, False, "no UCX with RDMA is installed here"),
        ("tcp", "tcp", None, True, "transport 'tcp' was chosen: choose 'auto' or 'ucx'"),
        ("gloo", "gloo", False, True, "transport 'gloo' was chosen"),
    ],
)
def test_weights_over_tcp_beside_a_port_are_noticed(
    transport: Any, choice: Any, encrypt: bool | None, has: bool, remedy: str, infiniband: Path
) -> None:
    notice = unused_rdma(transport, choice, encrypt=encrypt, has_rdma=has, root=infiniband)
    assert notice.startswith(f"weights travel over TCP beside the RDMA port mlx5_0:1 (InfiniBand, {NDR}): {remedy}")


@pytest.mark.parametrize(("transport", "has"), [("ucx", True), ("nixl", False), ("nccl", False), ("local", False)])
def test_transports_that_use_rdma_are_not_noticed(transport: Any, has: bool, infiniband: Path) -> None:
    assert not unused_rdma(transport, transport, encrypt=None, has_rdma=has, root=infiniband)


def test_host_without_an_active_port_is_not_noticed(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", state="1: DOWN")
    assert choose_for_host("auto", HOST, encrypt=None, root=tmp_path) == ("tcp", True, "")


@pytest.mark.skipif(has_rdma(), reason="this UCX has RDMA and a device")
def test_port_that_ucx_cannot_use_is_noticed(infiniband: Path) -> None:
    """The wheels of UCX contain no RDMA."""
    transport, encrypted, notice = choose_for_host("auto", HOST, encrypt=False, root=infiniband)
    assert (transport, encrypted) == ("tcp", False)
    assert "no UCX with RDMA is installed here" in notice


def test_weights_within_this_machine_need_no_port(infiniband: Path) -> None:
    assert choose_for_host("auto", "127.0.0.1", encrypt=None, root=infiniband) == ("ucx", False, "")


@pytest.mark.skipif(not has_ucx(), reason="UCX is not installed")
def test_ucx_lists_its_components_with_their_devices() -> None:
    found = components()
    assert found["tcp"] > 0
    assert has_rdma() == (found.get("ib", 0) > 0)
    assert components("no such library") == {}


@needs_nixl
def test_component_without_a_device_is_no_rdma() -> None:
    """NIXL's UCX has InfiniBand wherever it is installed. A process of its own: two copies of UCX would disturb it."""
    code = (
        "import sys; from starling.weightsync.transports.ucx.worker import components; print(components(sys.argv[1]))"
    )
    (library,) = Path(str(distribution("nixl").locate_file(""))).glob("nixl_cu*.libs/libuct-*.so*")
    done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True, timeout=60)
    assert f"'ib': {len(list(SYSFS.glob('*')))}" in done.stdout, done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", HOST])
def test_worker_has_lanes_over_rdma_where_it_has_a_device(host: str) -> None:
    lanes = options_for(host)["TLS"].split(",")
    assert lanes[:2] == ["tcp", "cma"]
    assert ("ib" in lanes) == (host == HOST and has_rdma())
