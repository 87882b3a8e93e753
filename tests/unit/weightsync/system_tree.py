"""Trees of files as Linux and NVIDIA's driver show them, of several machines."""

from __future__ import annotations

from pathlib import Path

BOOT_ID = "7c2c19b2-ff5d-46d2-a2c8-4911c8175ebb"


class SystemTree:
    """The files of one machine below a folder."""

    def __init__(self, root: Path, *, allowed: str, nodes: dict[int, str]) -> None:
        self.root = root
        self.write("proc/sys/kernel/random/boot_id", BOOT_ID)
        self.write("proc/self/status", f"Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\nSeccomp:\t0")
        for node, processors in nodes.items():
            self.write(f"sys/devices/system/node/node{node}/cpulist", processors)
            self.write(f"sys/devices/system/node/node{node}/meminfo", "MemTotal: 1 kB")
        if nodes:
            self.write("sys/devices/system/node/online", "0")

    def write(self, path: str, text: str) -> None:
        """Write a file with the newline that the kernel ends it with."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        """Make a symbolic link from `path` to `target`, both below the root."""
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / target)

    def pci(self, path: str, numa: int) -> str:
        """Add the PCI device at a path of bridges such as ``pci0000:15/0000:15:01.0/0000:1b:00.0``."""
        folder = f"sys/devices/{path}"
        self.write(f"{folder}/numa_node", str(numa))
        self.link(f"sys/bus/pci/devices/{path.rpartition('/')[2]}", folder)
        return folder

    def gpu(self, path: str, uuid: str, numa: int) -> None:
        """Add a GPU with its file of the driver."""
        self.pci(path, numa)
        address = path.rpartition("/")[2]
        self.write(
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\nGPU UUID: \t {uuid}\n"
            f"Video BIOS: \t 96.00\nBus Type: \t PCIe\nBus Location: \t {address}\nGPU Excluded:\t No",
        )

    def rdma(
        self, path: str, name: str, numa: int, *, rate: str = "400 Gb/sec (4X NDR)", state: str = "4: ACTIVE"
    ) -> None:
        """Add a card for RDMA, and the interface for IP over it."""
        folder = self.pci(path, numa)
        device = f"{folder}/infiniband/{name}"
        self.write(f"{device}/ports/1/state", state)
        self.write(f"{device}/ports/1/rate", rate)
        self.write(f"{device}/ports/1/link_layer", "InfiniBand")
        self.link(f"{device}/device", folder)
        self.link(f"sys/class/infiniband/{name}", device)
        self.interface(f"ib{name.removeprefix('mlx5_')}", path, kind=32, speed="400000")

    def interface(
        self,
        name: str,
        path: str = "",
        *,
        kind: int = 1,
        speed: str = "",
        state: str = "up",
        index: int = 2,
        peer: int = 2,
    ) -> None:
        """Add a network interface: of the PCI device at `path`, which exists or not, or a virtual one."""
        folder = f"sys/devices/{path or 'virtual'}/net/{name}"
        for file, text in (("type", kind), ("operstate", state), ("ifindex", index), ("iflink", peer)):
            self.write(f"{folder}/{file}", str(text))
        if speed:
            self.write(f"{folder}/speed", speed)
        if path:
            if not (self.root / f"sys/devices/{path}/numa_node").exists():
                self.pci(path, -1)
            self.link(f"{folder}/device", f"sys/devices/{path}")
        self.link(f"sys/class/net/{name}", folder)


def uuid_of(number: int) -> str:
    """Return the UUID of the GPU with this number."""
    return f"GPU-{number:08x}-5b3d-4b4c-9a61-0123456789ab"


def dgx(root: Path, *, allowed: str = "0-55") -> SystemTree:
    """A host of eight GPUs and eight cards, each pair behind a bridge of its own, and one Ethernet card."""
    tree = SystemTree(root, allowed=allowed, nodes={0: "0-55,112-167", 1: "56-111,168-223"})
    for number in range(8):
        bus = 0x10 + 0x10 * number
        bridges = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        gpu, card = (
            f"0000:{bus + 2:02x}:00.0/0000:{bus + 3:02x}:00.0",
            f"0000:{bus + 2:02x}:01.0/0000:{bus + 4:02x}:00.0",
        )
        tree.gpu(f"{bridges}/{gpu}", uuid_of(number), number // 4)
        tree.rdma(f"{bridges}/{card}", f"mlx5_{number + 3}", number // 4)  # 3 to 10: not in the order of characters
    tree.rdma("pci0000:f0/0000:f0:01.0/0000:f1:00.0", "mlx5_0", 1, state="1: DOWN")
    tree.interface("eth0", "pci0000:e0/0000:e0:01.0/0000:e1:00.0", speed="100000")
    tree.interface("lo", kind=772, state="unknown", index=1, peer=1)
    return tree


def laptop(root: Path) -> SystemTree:
    """One NUMA node, a wireless card that does not know its speed, and a cable that is not plugged in."""
    tree = SystemTree(root, allowed="0-7", nodes={0: "0-7"})
    tree.interface("wlan0", "pci0000:00/0000:00:14.3", index=3, peer=3)
    tree.interface("enp1s0", "pci0000:00/0000:00:1c.0/0000:01:00.0", speed="-1", state="down")
    tree.interface("docker0", speed="10000", index=4, peer=4)
    return tree


def virtual_machine(root: Path) -> SystemTree:
    """No NUMA nodes, and a virtio card: a PCI device, whose interface hangs below another device."""
    tree = SystemTree(root, allowed="0-1", nodes={})
    tree.pci("pci0000:00/0000:00:03.0", -1)
    tree.write("sys/devices/pci0000:00/0000:00:03.0/virtio2/status", "0x0000000f")
    path = "pci0000:00/0000:00:03.0/virtio2"
    tree.write(f"sys/devices/{path}/net/eth0/type", "1")
    tree.write(f"sys/devices/{path}/net/eth0/operstate", "up")
    tree.write(f"sys/devices/{path}/net/eth0/speed", "-1")
    tree.link(f"sys/devices/{path}/net/eth0/device", f"sys/devices/{path}")
    tree.link("sys/class/net/eth0", f"sys/devices/{path}/net/eth0")
    return tree


def container(root: Path) -> SystemTree:
    """Of a host of two NUMA nodes, bound to processors of the second, with one end of a pair of interfaces."""
    tree = SystemTree(root, allowed="60-63,170", nodes={0: "0-55,112-167", 1: "56-111,168-223"})
    tree.interface("eth0", speed="10000", index=2, peer=17)
    tree.interface("lo", kind=772, state="unknown", index=1, peer=1)
    tree.interface("ifb0", speed="", state="down", index=5, peer=5)
    tree.interface("dummy0", speed="", state="unknown", index=6, peer=6)
    return tree
