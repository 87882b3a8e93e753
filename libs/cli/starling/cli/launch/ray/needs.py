"""What a replica asks Ray for: the bundles of its placement group, their labels, and how they are spread."""

from __future__ import annotations

from typing import Any, Final, cast

from starling.cli.launch.interface import Placement
from starling.cli.launch.settings import PlacedRole, RaySettings

ADDRESS: Final = "{address}"
"""In arguments of a service: the address of its node, which its actor knows."""
MEETING: Final = "{meeting}"
"""In arguments of a service: host and port at which the nodes of its replica meet, those of its first node."""


def needs(placement: Placement, settings: RaySettings) -> dict[str, Any]:
    """Return the placement group of a replica: one bundle for each of its nodes, all alike, each on another node."""
    bundle: dict[str, float] = {}
    if settings.cpus:
        bundle["CPU"] = settings.cpus
    if placement.num_gpus:
        bundle["GPU"] = placement.num_gpus
    bundle |= settings.resources.get(cast(PlacedRole, placement.role), {})
    num = placement.num_nodes
    return {
        "bundle": bundle or {"CPU": 0.001},  # Ray refuses one that asks for nothing
        "num_nodes": num,
        "strategy": "STRICT_PACK" if num == 1 else "STRICT_SPREAD",
        "labels": labels(placement, settings),
    }


def labels(placement: Placement, settings: RaySettings) -> dict[str, str]:
    """Return the labels that the nodes of a replica must have; those of its pool count more than those of its role."""
    found = dict(settings.labels.get(cast(PlacedRole, placement.role), {}))
    if placement.gpu_kind:
        found[settings.gpu_label] = placement.gpu_kind
    if placement.partition:
        found[settings.pool_label] = placement.partition
    return {**found, **placement.node_selector}


def node_flags(placement: Placement) -> list[list[str]]:
    """Return the further flags of the service on each node: none for one node."""
    num = placement.num_nodes
    if num == 1:
        return [[]]
    return [["--nnodes", str(num), "--node-rank", str(node), "--rdzv", MEETING] for node in range(num)]


def shown(wanted: dict[str, Any]) -> str:
    """Return a placement group in words: ``2 nodes, each with CPU 1, GPU 8 and the label zone=a``."""
    words = ", ".join(f"{name} {amount:g}" for name, amount in wanted["bundle"].items())
    several = "a node with" if wanted["num_nodes"] == 1 else f"{wanted['num_nodes']} nodes, each with"
    pairs = ", ".join(f"{name}={value}" for name, value in wanted["labels"].items())
    return f"{several} {words}" + (f" and the label{'s' if len(wanted['labels']) > 1 else ''} {pairs}" if pairs else "")
