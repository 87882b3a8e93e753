"""What the nodes of a policy must have in common, and how they share its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest
from starling.common.kinds import KINDS
from starling.common.nodes.facts import NodeFacts, digests_of
from starling.common.nodes.nodes import JoinLimit, Nodes
from starling.common.service import NodeArguments, ServiceArguments, host_name
from starling.policy.settings.parallel import ParallelSettings
from starling.policy.shell.loading import PolicyProcess

PACKAGES: Final = ("torch", "transformers", "starling-policy")
"""Packages whose versions have to be the same."""

log = structlog.get_logger(__name__)


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
    return NodeFacts(
        node=nodes.number,
        num_nodes=nodes.num_nodes,
        num_ranks=share_of(nodes, settings.policy.parallel.num_ranks),
        host=host_name(),
        settings=digests_of(settings, PACKAGES, {"the transport of weights": list(transport)}),
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


def limit_of(parallel: ParallelSettings) -> JoinLimit:
    """Return how long the nodes wait for each other."""
    return JoinLimit(parallel.join_s, "policy.parallel.join_s")


def gather_ranks(nodes: Nodes, parallel: ParallelSettings) -> None:
    """Wait until all nodes have joined, and tell each which ranks it has. `parallel`: of the replica.

    Raises:
        UnreachableError: one has not joined in time.
        ConfigError: they have another number of ranks.
    """
    nodes.gather(limit_of(parallel))
    shares = nodes.shares
    if sum(shares) != parallel.num_ranks:
        raise ConfigError(
            f"the nodes have {' + '.join(map(str, shares))} = {counted(sum(shares), 'rank')}, and policy.parallel "
            f"has {parallel.num_ranks}; give --ranks-per-node that fit"
        )
    firsts = [sum(shares[:node]) for node in range(len(shares))]
    if any(first % parallel.tp for first in firsts):
        log.warning("tp_crosses_nodes", tp=parallel.tp, ranks_per_node=shares)
    nodes.welcome(firsts)
