"""What the nodes of a replica must have in common: settings, versions, the model's files, and the folder of the run."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.common.folder_digests import model_digest
from starling.common.kinds import KINDS
from starling.common.service import NodeArguments, ServiceArguments, host_name
from starling.policy.shell.loading import PolicyProcess

MARKER: Final = ".{name}.nodes"
"""File in the run's folder by which the other nodes show that they see the same folder."""
OF_ONE_NODE: Final = ("network.host", "model.path")
"""Settings that each node has of its own."""
PACKAGES: Final = ("torch", "transformers", "starling-policy")
"""Packages whose versions have to be the same."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of a replica must have in common, and what they are told apart by."""

    node: int
    num_nodes: int
    num_ranks: int
    host: str
    settings: dict[str, str]
    """Digests by key."""
    model: str
    """Path of the model's folder."""
    model_digest: str
    folder: str
    """Path of the run's folder."""
    marker: str
    """Content of the marker in it; empty where there is none."""

    def differs(self, first: NodeFacts) -> str:
        """Return in one sentence why this node does not fit to node 0, whose facts are `first`; empty if it does."""
        name = f"node {self.node} ({self.host})"
        if self.num_nodes != first.num_nodes:
            return f"--nnodes {self.num_nodes} of {name} is not the --nnodes {first.num_nodes} of node 0"
        keys = [key for key, value in {**first.settings, **self.settings}.items() if first.settings.get(key) != value]
        keys += [key for key in first.settings if key not in self.settings]
        if keys:
            return f"{keys[0]} of {name} is not that of node 0; start all nodes with the same recipe and flags"
        if self.model_digest != first.model_digest:
            return f"the model folder {self.model} of {name} has other files than {first.model} of node 0"
        if self.folder != first.folder or self.marker != first.marker:
            return (
                f"{name} has --dir {self.folder} and does not see the folder {first.folder} of node 0, in which all "
                "ranks write; give all nodes one folder of a shared file system, under the same path"
            )
        return ""


def facts_of(
    settings: PolicyProcess, arguments: ServiceArguments, path: Path, transport: tuple[str, bool], marker: str = ""
) -> NodeFacts:
    """Return the facts of this node; reads the files of its model.

    Args:
        settings: of the policy.
        arguments: its command line.
        path: of the model's folder.
        transport: of the weights, and whether it encrypts them.
        marker: content of the marker.

    Raises:
        ConfigError: the ranks cannot be shared by the nodes, or the address at which this one would serve weights is of
            no use to others, or the model cannot be read.
    """
    from starling.weightsync.transports.endpoints import is_loopback

    nodes = arguments.nodes
    assert nodes is not None
    if not KINDS[settings.run.kind].trains:
        raise ConfigError(f"run.kind = {settings.run.kind!r} trains nothing, and needs one node; remove --nnodes")
    if is_loopback(settings.network.host) and not is_loopback(nodes.host):
        raise ConfigError(
            f"network.host = {settings.network.host!r} cannot be reached from other hosts, which pull weights from "
            "each node; give --network.host an address of this one"
        )
    if transport[0] == "local" and not is_loopback(nodes.host):
        raise ConfigError('policy.transport = "local" serves readers on one host only; set "auto", or "tcp"')
    values = {key: value for key, value in _leaves(settings.model_dump(mode="json")) if key not in OF_ONE_NODE}
    values |= {f"the version of {name}": version_of(name) for name in PACKAGES}
    values["the transport of weights"] = list(transport)
    return NodeFacts(
        node=nodes.number,
        num_nodes=nodes.num_nodes,
        num_ranks=share_of(nodes, settings.policy.parallel.num_ranks),
        host=host_name(),
        settings={key: xxhash.xxh3_64_hexdigest(json.dumps(value).encode()) for key, value in values.items()},
        model=str(path),
        model_digest=model_digest(path),
        folder=str(arguments.folder.absolute()),
        marker=marker,
    )


def share_of(nodes: NodeArguments, num_ranks: int) -> int:
    """Return how many of the ranks of a replica are on this node. Raises ConfigError."""
    if nodes.num_ranks:
        return nodes.num_ranks
    share, left = divmod(num_ranks, nodes.num_nodes)
    if left or not share:
        raise ConfigError(
            f"policy.parallel has {counted(num_ranks, 'rank')}, which {nodes.num_nodes} nodes cannot share equally; "
            "change its sizes, or give each node its --ranks-per-node"
        )
    return share


def mark(folder: Path, name: str, token: str) -> None:
    """Mark the run's folder, before agents are admitted. Raises ConfigError."""
    path = folder / MARKER.format(name=name)
    try:
        write_whole(path, token)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); check --dir") from error


def read_mark(folder: Path, name: str) -> str:
    """Return the content of the marker in the run's folder; empty where there is none."""
    try:
        return (folder / MARKER.format(name=name)).read_text()[:64]
    except (OSError, UnicodeDecodeError):
        return ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of nested settings, by key."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def version_of(package: str) -> str:
    """Return the installed version of a package; empty for one that is run from a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
