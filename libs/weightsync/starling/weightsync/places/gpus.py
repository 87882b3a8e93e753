"""GPUs of a machine, from the files of NVIDIA's driver, and the NVLink connections between them, from its library."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from starling.weightsync.places.system_files import (
    device_path,
    entries,
    is_pci_address,
    node_of_device,
    read_text,
)

NVML: Final = "libnvidia-ml.so.1"
MAX_LINKS: Final = 36
"""NVLink connections of one GPU that are asked for; a Blackwell GPU has 18."""
TO_GPU, TO_SWITCH = 0, 2
"""Kinds of devices at the other end of a connection (`nvmlIntNvLinkDeviceType_t`)."""


class FoundGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of this machine that the process may see."""

    uuid: str
    """As `nvidia-smi -L` prints it: the same in every process, whatever CUDA_VISIBLE_DEVICES is."""
    pci: str
    """PCI address, such as ``0000:1b:00.0``."""
    numa: int
    """NUMA node, -1 when unknown."""
    path: tuple[str, ...]
    """Bridges that lead to it, its own PCI address last; empty when unknown."""


class NvLink(msgspec.Struct, frozen=True):
    """The other end of one active NVLink connection."""

    kind: int
    pci: str


def find_gpus(root: Path, nodes: dict[int, set[int]]) -> tuple[FoundGpu, ...]:
    """Return the GPUs that NVIDIA's driver lists, in the order of their PCI addresses."""
    found = []
    for folder in entries(root / "proc/driver/nvidia/gpus"):
        match = re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]{8,64})", read_text(folder / "information"), re.MULTILINE)
        if match and is_pci_address(folder.name):
            found.append(gpu_at(root, nodes, match[1], folder.name))
    return tuple(sorted(found, key=lambda gpu: gpu.pci))


def gpu_at(root: Path, nodes: dict[int, set[int]], uuid: str, pci: str) -> FoundGpu:
    """Return the GPU of this UUID and PCI address, with what /sys says of that address."""
    device = root / "sys/bus/pci/devices" / pci
    return FoundGpu(uuid=uuid, pci=pci, numa=node_of_device(device, nodes), path=device_path(device))


def nvlink_peers(links: Mapping[str, Sequence[NvLink]]) -> dict[str, tuple[str, ...]]:
    """Return the GPUs that each GPU reaches over NVLink, by PCI address.

    Args:
        links: the active connections of each GPU. GPUs that are connected to switches reach each other through them.
    """
    switched = {pci for pci, ends in links.items() if any(end.kind == TO_SWITCH for end in ends)}
    peers = {}
    for pci, ends in links.items():
        reached = {end.pci for end in ends if end.kind == TO_GPU} | (switched if pci in switched else set())
        peers[pci] = tuple(sorted(reached - {pci}))
    return peers


class _PciInfo(ctypes.Structure):
    """`nvmlPciInfo_t` of the third version."""

    _fields_ = [
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    ]

    @property
    def address(self) -> str:
        return f"{self.domain:04x}:{self.bus:02x}:{self.device:02x}.0"


def read_nvlinks() -> dict[str, list[NvLink]]:
    """Return the active NVLink connections of each GPU by PCI address; empty without NVIDIA's library."""
    links: dict[str, list[NvLink]] = {}
    with suppress(OSError, AttributeError), _library() as nvml:  # no library, or one that is too old
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return {}
        for number in range(count.value):
            device, own = ctypes.c_void_p(), _PciInfo()
            if nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)):
                continue
            if not nvml.nvmlDeviceGetPciInfo_v3(device, ctypes.byref(own)):
                links[own.address] = list(_links_of(nvml, device))
    return links


@contextmanager
def _library() -> Iterator[ctypes.CDLL]:
    nvml = ctypes.CDLL(NVML)
    if nvml.nvmlInit_v2():
        raise OSError("NVIDIA's driver is not running")
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _links_of(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Iterator[NvLink]:
    for link in range(MAX_LINKS):
        active, kind, remote = ctypes.c_int(), ctypes.c_int(TO_GPU), _PciInfo()
        if nvml.nvmlDeviceGetNvLinkState(device, link, ctypes.byref(active)) or not active.value:
            continue
        if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(device, link, ctypes.byref(kind)):
            continue
        if not nvml.nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, ctypes.byref(remote)):
            yield NvLink(kind.value, remote.address)
