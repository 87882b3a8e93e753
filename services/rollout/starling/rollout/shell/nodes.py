"""Nodes of a rollout whose vLLM has workers on several hosts: node 0 is the service, the others are agents."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest
from starling.common.nodes.agent import NodeAgent
from starling.common.nodes.facts import NodeFacts, digests_of
from starling.common.nodes.nodes import JoinLimit, NodeSetup
from starling.common.pipeline_folder import check_pipeline_folder
from starling.common.service import ServiceArguments, check_model_folder, host_name
from starling.rollout.settings import RolloutProcess
from starling.rollout.shell.engines import make_spec

PACKAGES: Final = ("torch", "transformers", "starling-rollout")
"""Packages whose versions have to be the same, besides vLLM."""
LABEL: Final = "executor"
"""What vLLM calls the parent of workers."""


def find_model(settings: RolloutProcess) -> Path:
    """Return the folder of the model. Raises ConfigError if it cannot be used."""
    weights = settings.rollout.load_weights or settings.model.lora is not None
    if settings.diffusion is not None:
        return check_pipeline_folder(settings.model.path, weights=weights)
    return check_model_folder(
        settings.model.path,
        weights=weights,
        runs_code=settings.model.trust_remote_code,
    )


def setup_of(settings: RolloutProcess, arguments: ServiceArguments, path: Path) -> NodeSetup | None:
    """Return what node 0 listens for the others with; None for the only node. `path`: of the model's folder.

    Raises:
        ConfigError: the engine cannot have these nodes, or the address of this one is of no use to others.
    """
    if arguments.nodes is None:
        return None
    return NodeSetup(
        name=arguments.name,
        arguments=arguments.nodes,
        network=settings.network,
        key=arguments.key_file(settings.network.curve),
        facts=_facts_of(settings, arguments, path),
        limit=_limit_of(settings),
    )


def make_agent(settings: RolloutProcess, arguments: ServiceArguments) -> NodeAgent:
    """Return the agent of a node that is not node 0. Raises ConfigError as `setup_of`."""
    path = find_model(settings)
    facts = _facts_of(settings, arguments, path)

    def serve(number: int, first: int, pipe: Connection) -> None:
        """Be the executor of node `number`. All imports take place here: the agent itself has no use for them."""
        from starling.algo.tokenizer import load_tokenizer
        from starling.rollout.engine.model_config import read_config
        from starling.rollout.engine.vllm.nodes import ExecutorProcess

        trusted = settings.model.trust_remote_code
        config = read_config(path, trust_remote_code=trusted)
        tokenizer = load_tokenizer(path, config, trust_remote_code=trusted)
        spec = make_spec(path, settings, arguments.name, config, tokenizer, lambda: None)
        ExecutorProcess(spec, number, facts.num_nodes, settings.network.host).serve(pipe)

    return NodeAgent(settings, arguments, facts, serve, limit=_limit_of(settings), label=LABEL)


def _limit_of(settings: RolloutProcess) -> JoinLimit:
    return JoinLimit(settings.rollout.vllm.join_s, "rollout.vllm.join_s")


def _facts_of(settings: RolloutProcess, arguments: ServiceArguments, path: Path) -> NodeFacts:
    """Return the facts of this node, which forks one process; reads the files of its model. Raises ConfigError."""
    from starling.weightsync.transports.endpoints import is_loopback
    from starling.weightsync.vllm.versions import vllm_version

    nodes = arguments.nodes
    assert nodes is not None
    if settings.rollout.engine != "vllm":
        raise ConfigError(
            f"rollout.engine = {settings.rollout.engine!r} computes on one host, and only 'vllm' on several; remove "
            "--nnodes, or start more rollouts"
        )
    settings.rollout.vllm.workers_per_node(nodes.num_nodes)
    if is_loopback(settings.network.host) and not is_loopback(nodes.host):
        raise ConfigError(
            f"network.host = {settings.network.host!r} cannot be reached from other hosts, to which vLLM's workers "
            "connect; give --network.host an address of this one"
        )
    return NodeFacts(
        node=nodes.number,
        num_nodes=nodes.num_nodes,
        num_ranks=1,
        host=host_name(),
        settings=digests_of(settings, PACKAGES, {"the version of vllm": vllm_version()}),
        model=str(path),
        model_digest=model_digest(path),
        folder="",
        marker="",
    )
