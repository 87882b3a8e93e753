"""The machine of this process, and the places of ranks on it.

What is not detected is unknown, and never guessed. The switch is configuration: no file of a machine names it.
"""

from __future__ import annotations

import os
import re
import socket
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.places.cards import FoundCard, find_cards, nearest_cards
from starling.weightsync.places.gpus import FoundGpu, find_gpus, gpu_at, nvlink_peers, read_nvlinks
from starling.weightsync.places.system_files import node_of_process, numa_nodes, read_text
from starling.weightsync.plan.layout import CPU, MAX_LABEL_CHARACTERS, MAX_NVLINK_PEERS, Place

SWITCH_VARIABLE: Final = "STARLING_SWITCH"
"""Environment variable that names the switch of this machine's cards."""
ROOT: Final = Path("/")


class Machine(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What a process sees of its machine."""

    host: str
    """Name of the machine, or of the container."""
    machine: str
    """Identity of the running kernel, which all containers of a machine share; empty when unknown."""
    nodes: dict[int, set[int]]
    """Processors of each NUMA node."""
    numa: int
    """NUMA node of this process, -1 when unknown, or when it may run on several."""
    gpus: tuple[FoundGpu, ...]
    cards: tuple[FoundCard, ...]
    nvlink: dict[str, tuple[str, ...]]
    """PCI addresses of the GPUs that each GPU reaches over NVLink, by its own."""
    switch: str
    root: Path

    @cached_property
    def _ordinals(self) -> dict[str, int]:
        return {gpu.pci: number for number, gpu in enumerate(self.gpus)}

    def place(self) -> Place:
        """Return the place of a rank that computes on the processor."""
        return self._place(CPU, "", self.numa, nearest_cards(self.cards, (), self.numa))

    def place_on(self, gpu: FoundGpu) -> Place:
        """Return the place of a rank on `gpu`."""
        cards = nearest_cards(self.cards, gpu.path, gpu.numa, self._ordinals.get(gpu.pci, 0))
        return self._place(gpu.uuid, gpu.pci, gpu.numa, cards)

    def gpu(self, uuid: str, pci: str) -> FoundGpu:
        """Return the GPU that CUDA describes so; the files of the driver may be hidden from a container."""
        known = next((one for one in self.gpus if one.uuid == uuid), None)
        return known or gpu_at(self.root, self.nodes, uuid, pci)

    def _place(self, device: str, pci: str, numa: int, cards: tuple[FoundCard, ...]) -> Place:
        return Place(
            host=self.host,
            machine=self.machine,
            device=device,
            pci=pci,
            numa=numa,
            cards=tuple(one.card for one in cards),
            rails=tuple(one.card.rail for one in cards if one.card.rail),
            nvlink=self.nvlink.get(pci, ())[:MAX_NVLINK_PEERS],
            switch=self.switch,
        )


def find_machine(root: Path = ROOT, *, host: str = "", switch: str | None = None) -> Machine:
    """Detect this machine.

    Args:
        root: the root of the file system. NVLink is asked for only below the real one.
        host: name of the machine; by default that of this process.
        switch: switch of its cards; by default the value of `SWITCH_VARIABLE`.

    Raises:
        WeightsError: the name of the switch is too long.
    """
    if switch is None:
        switch = os.environ.get(SWITCH_VARIABLE, "")
    if len(switch) > MAX_LABEL_CHARACTERS:
        raise WeightsError(
            f"{SWITCH_VARIABLE} has {len(switch)} characters: name the switch in at most {MAX_LABEL_CHARACTERS}."
        )
    nodes = numa_nodes(root)
    gpus = find_gpus(root, nodes)
    boot = read_text(root / "proc/sys/kernel/random/boot_id")
    return Machine(
        host=host or socket.gethostname(),
        machine=boot if re.fullmatch(r"[0-9a-f-]{36}", boot) else "",
        nodes=nodes,
        numa=node_of_process(root, nodes),
        gpus=gpus,
        cards=find_cards(root, nodes),
        nvlink=nvlink_peers(read_nvlinks()) if root == ROOT else {},
        switch=switch,
        root=root,
    )
