"""The place of a process, detected from the files of several machines."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from system_tree import BOOT_ID, SystemTree, container, dgx, laptop, uuid_of, virtual_machine

from starling.common.errors import WeightsError
from starling.weightsync.places.gpus import NvLink, nvlink_peers
from starling.weightsync.places.machine import SWITCH_VARIABLE, find_machine
from starling.weightsync.places.system_files import natural_order, parse_list
from starling.weightsync.plan.layout import Card, Place
from starling.weightsync.plan.topology import LINKS, card_numbers, distances


def test_gpu_of_a_dgx_has_its_node_and_the_card_behind_its_own_bridge(tmp_path: Path) -> None:
    machine = find_machine(dgx(tmp_path).root, host="dgx-1", switch="leaf-3")
    places = [machine.place_on(gpu) for gpu in machine.gpus]
    assert places == [
        Place(
            host="dgx-1",
            machine=BOOT_ID,
            device=uuid_of(number),
            pci=f"0000:{0x13 + 0x10 * number:02x}:00.0",
            numa=number // 4,
            cards=(Card(name=f"mlx5_{number + 3}", gb_per_s=50.0, rail=f"rail-{number}"),),
            rails=(f"rail-{number}",),
            switch="leaf-3",
        )
        for number in range(8)
    ]


def test_processor_of_a_dgx_uses_the_cards_of_its_node(tmp_path: Path) -> None:
    place = find_machine(dgx(tmp_path).root, host="dgx-1", switch="").place()
    assert place == Place(
        host="dgx-1",
        machine=BOOT_ID,
        numa=0,
        cards=tuple(Card(name=f"mlx5_{n + 3}", gb_per_s=50.0, rail=f"rail-{n}") for n in range(4)),
        rails=("rail-0", "rail-1", "rail-2", "rail-3"),
    )


def test_process_that_runs_on_both_nodes_has_no_node_and_all_cards(tmp_path: Path) -> None:
    place = find_machine(dgx(tmp_path, allowed="0-223").root, host="dgx-1", switch="").place()
    assert (place.numa, len(place.cards)) == (-1, 8)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (laptop, Place(host="h", machine=BOOT_ID, numa=0, cards=(Card(name="wlan0"),))),
        (virtual_machine, Place(host="h", machine=BOOT_ID, numa=-1, cards=(Card(name="eth0"),))),
        (container, Place(host="h", machine=BOOT_ID, numa=1, cards=(Card(name="eth0", gb_per_s=1.25),))),
        (lambda root: SystemTree(root, allowed="0", nodes={}), Place(host="h", machine=BOOT_ID)),
    ],
    ids=["laptop", "virtual machine", "container", "nothing"],
)
def test_machines_without_gpus(tmp_path: Path, make: object, expected: Place) -> None:
    assert callable(make)
    assert find_machine(make(tmp_path).root, host="h", switch="").place() == expected


def test_nothing_is_known_of_an_empty_root(tmp_path: Path) -> None:
    machine = find_machine(tmp_path, switch="")
    assert (machine.place(), machine.gpus, machine.cards) == (Place(host=socket.gethostname()), (), ())


def test_this_machine_is_detected() -> None:
    place = find_machine().place()
    assert (place.host, place.device) == (socket.gethostname(), "cpu")
    if os.path.exists("/proc/sys/kernel/random/boot_id"):
        assert len(place.machine) == 36


def test_gpu_whose_driver_files_are_hidden_is_found_by_its_address(tmp_path: Path) -> None:
    tree = virtual_machine(tmp_path)
    tree.pci("pci0000:00/0000:00:1e.0", 0)
    machine = find_machine(tree.root, host="h", switch="")
    assert machine.gpus == ()
    found = machine.gpu(uuid_of(7), "0000:00:1e.0")
    assert (found.uuid, found.numa, found.path) == (uuid_of(7), 0, ("pci0000:00", "0000:00:1e.0"))


def test_roce_card_of_two_ports_has_both_rates(tmp_path: Path) -> None:
    tree = virtual_machine(tmp_path)
    tree.rdma("pci0000:00/0000:00:04.0", "mlx5_bond_0", -1, rate="100 Gb/sec (2X HDR)")
    tree.write("sys/class/infiniband/mlx5_bond_0/ports/2/state", "4: ACTIVE")
    tree.write("sys/class/infiniband/mlx5_bond_0/ports/2/rate", "2.5 Gb/sec (1X SDR)")
    assert find_machine(tree.root, switch="").place().cards == (Card(name="mlx5_bond_0", gb_per_s=12.8125),)


def test_gpus_with_equally_near_cards_begin_with_different_ones(tmp_path: Path) -> None:
    tree = SystemTree(tmp_path, allowed="0", nodes={0: "0-7"})
    for number in range(2):
        tree.gpu(f"pci0000:{10 + number}/0000:{10 + number}:00.0", uuid_of(number), 0)
        tree.interface(f"eth{number}", f"pci0000:2{number}/0000:2{number}:00.0", speed="25000")
    machine = find_machine(tree.root, switch="")
    names = [[card.name for card in machine.place_on(gpu).cards] for gpu in machine.gpus]
    assert names == [["eth0", "eth1"], ["eth1", "eth0"]]


def test_switch_is_configured_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, "leaf-7")
    assert find_machine(tmp_path).switch == "leaf-7"
    monkeypatch.setenv(SWITCH_VARIABLE, "x" * 257)
    with pytest.raises(WeightsError, match="STARLING_SWITCH has 257 characters"):
        find_machine(tmp_path)


@pytest.mark.parametrize(
    ("links", "peers"),
    [
        ({}, {}),
        ({"a": [], "b": []}, {"a": (), "b": ()}),
        ({"a": [NvLink(0, "b")] * 2, "b": [NvLink(0, "a")]}, {"a": ("b",), "b": ("a",)}),
        (
            {"a": [NvLink(2, "s")], "b": [NvLink(2, "s")], "c": [NvLink(2, "t")], "d": []},
            {"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "b"), "d": ()},
        ),
    ],
    ids=["none", "not connected", "bridge", "switches"],
)
def test_nvlink_peers(links: dict[str, list[NvLink]], peers: dict[str, tuple[str, ...]]) -> None:
    assert nvlink_peers(links) == peers


def test_distances_follow_the_detected_places(tmp_path: Path) -> None:
    one, other = (find_machine(dgx(tmp_path / name).root, host=name, switch="leaf") for name in ("a", "b"))
    gpus = [one.place_on(gpu) for gpu in one.gpus]
    assert [LINKS[link] for link in distances(gpus[:1], gpus)[0]] == ["device", *["numa"] * 3, *["host"] * 4]
    # Another machine has another boot id; its first card is on the same rail, the others on the same switch.
    there = [msgspec.structs.replace(other.place_on(gpu), machine="other") for gpu in other.gpus]
    assert [LINKS[link] for link in distances(gpus[:1], there)[0]] == ["rail", *["switch"] * 7]
    assert card_numbers([*gpus, *gpus]).tolist() == [*range(8), *range(8)]


@pytest.mark.parametrize(
    ("one", "other", "link"),
    [
        (Place(host="pod-1", machine="m", device="GPU-1"), Place(host="pod-2", machine="m", device="GPU-2"), "host"),
        (Place(host="localhost", machine="m"), Place(host="localhost", machine="n"), "far"),
        (Place(host="h", machine="m", numa=0), Place(host="h", machine="m", numa=1), "host"),
        (Place(host="h", machine="m", numa=1), Place(host="h", machine="m", numa=1), "device"),
        (Place(host="h", switch="s"), Place(host="i", switch="s"), "switch"),
        (Place(host="h", switch=""), Place(host="i", switch=""), "far"),
    ],
)
def test_machine_decides_and_not_the_name_of_the_container(one: Place, other: Place, link: str) -> None:
    assert LINKS[distances([one], [other])[0, 0]] == link


@given(st.text(max_size=8))
def test_lists_of_any_text_are_numbers(text: str) -> None:
    assert all(number >= 0 for number in parse_list(text))


def test_numbers_in_names_sort_by_value() -> None:
    names = ["eth1", "mlx5_9", "mlx5_10", "mlx5_bond_0", "x", "", "10", "9"]
    assert sorted(names, key=natural_order) == ["", "9", "10", "eth1", "mlx5_9", "mlx5_10", "mlx5_bond_0", "x"]
