"""Small files of Linux under /proc and /sys, below a root that tests replace. A file that cannot be read is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAX_FILE_BYTES: Final = 1 << 16
UNKNOWN_NODE: Final = -1
"""NUMA node of what has none, as the kernel writes it, too."""


def read_text(path: Path) -> str:
    """Return the content of a file without surrounding space; empty if it cannot be read.

    Many files of /sys exist and refuse to be read, such as the speed of a card that is down.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(MAX_FILE_BYTES).strip()
    except OSError:
        return ""


def read_number(path: Path, default: int) -> int:
    """Return the number in a file; `default` if there is none."""
    text = read_text(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else default


def entries(folder: Path) -> list[Path]:
    """Return the entries of a folder, `mlx5_10` after `mlx5_9`; none if it cannot be read."""
    try:
        return sorted(folder.iterdir(), key=lambda path: natural_order(path.name))
    except OSError:
        return []


def natural_order(name: str) -> tuple[tuple[str, int], ...]:
    """Return a key that sorts numbers within names by their value."""
    return tuple((text, int(digits or -1)) for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name))


def device_path(device: Path) -> tuple[str, ...]:
    """Return the buses and bridges that lead to a device, from the root complex on; empty if the link is broken."""
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ()
    roots = [number for number, part in enumerate(parts) if re.match(r"pci[0-9a-f]+:", part)]
    return parts[roots[0] :] if roots else ()


def pci_address(path: tuple[str, ...]) -> str:
    """Return the last PCI address, such as ``0000:1b:00.0``, of a path of devices; empty without one."""
    return next((part for part in reversed(path) if is_pci_address(part)), "")


def is_pci_address(text: str) -> bool:
    """Say whether `text` is the address of a PCI device."""
    return re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", text) is not None


def numa_nodes(root: Path) -> dict[int, set[int]]:
    """Return the processors of each NUMA node; empty where the kernel knows no nodes."""
    nodes = {}
    for folder in entries(root / "sys/devices/system/node"):
        if re.fullmatch(r"node[0-9]{1,6}", folder.name):
            nodes[int(folder.name[4:])] = set(parse_list(read_text(folder / "cpulist")))
    return nodes


def node_of_process(root: Path, nodes: dict[int, set[int]]) -> int:
    """Return the NUMA node that has all processors on which this process may run; unknown if several have."""
    match = re.search(r"^Cpus_allowed_list:\s*(\S+)", read_text(root / "proc/self/status"), re.MULTILINE)
    allowed = set(parse_list(match[1])) if match else set()
    present = set[int]().union(*nodes.values())
    used = [node for node, processors in nodes.items() if processors & allowed]
    return used[0] if len(used) == 1 and allowed & present else UNKNOWN_NODE


def node_of_device(device: Path, nodes: dict[int, set[int]]) -> int:
    """Return the NUMA node of a device. A machine of one node has everything on it, whatever its firmware says."""
    node = read_number(device / "numa_node", UNKNOWN_NODE)
    if node >= 0:
        return node
    return next(iter(nodes)) if len(nodes) == 1 else UNKNOWN_NODE


def parse_list(text: str) -> Iterator[int]:
    """Yield the numbers of a list such as ``0-3,8``; nothing from one that is malformed."""
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", part)
        if match:
            yield from range(int(match[1]), int(match[2] or match[1]) + 1)
