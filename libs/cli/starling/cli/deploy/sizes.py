"""Sizes of a run on a cluster: its tasks, their nodes and their GPUs, derived from the recipe.

A task is what one machine runs of one replica. Ranks of a policy and workers of vLLM need a GPU each: a replica with
more of them than a machine has GPUs gets the smallest number of machines that share them equally.
"""

from __future__ import annotations

from dataclasses import dataclass

from starling.cli.recipe.pools import RolloutPool
from starling.cli.recipe.schema import Recipe
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.rollout.settings import RolloutSettings


@dataclass(frozen=True)
class Machines:
    """What `starling deploy` knows of a cluster's machines."""

    gpus: int
    """GPUs of each machine; 0 for a run on CPUs."""
    policy_nodes: int = 0
    """Machines of each policy; 0: as many as it needs."""
    rollout_nodes: int = 0
    """Machines of each rollout; 0: as many as it needs."""


@dataclass(frozen=True)
class Tasks:
    """Equal tasks of one role, such as the rollouts of a pool."""

    role: str
    first: int = 0
    """Number of the first replica."""
    num_replicas: int = 1
    """More than one only where each has one task."""
    nodes: int = 1
    """Tasks of a replica, each on a machine of its own."""
    gpus: int = 0
    """GPUs of each task."""
    pool: RolloutPool | None = None
    """Pool of the rollouts, for its settings and its choice of machines."""

    @property
    def num_tasks(self) -> int:
        """How many tasks these are."""
        return self.num_replicas * self.nodes

    @property
    def names(self) -> str:
        """Return the names of the replicas: ``rollout-0``, or ``rollout-0 to rollout-3``."""
        last = self.first + self.num_replicas - 1
        return f"{self.role}-{self.first}" + (f" to {self.role}-{last}" if last > self.first else "")

    def describe(self) -> str:
        """Return in words who they are and what they need."""
        gpus = f"{counted(self.gpus, 'GPU')}{' each' if self.num_tasks > 1 else ''}" if self.gpus else "no GPU"
        return f"{self.names}: {f'{self.nodes} nodes, ' if self.nodes > 1 else ''}{gpus}"


def tasks_of(recipe: Recipe, machines: Machines) -> list[Tasks]:
    """Return the tasks of a run besides its controller, policies first. Raises ConfigError for unfit sizes."""
    if recipe.launch.colocate:
        raise ConfigError(
            "launch.colocate = true shares the devices of one machine, and the services of this job have devices of "
            "their own; run `starling run` on one machine, or remove colocate"
        )
    found = [*_policies(recipe, machines), *_rollouts(recipe, machines)]
    for role in ("teacher", "reward"):
        if num := recipe.replicas.get(role, 0):
            uses_gpu = role == "teacher" and recipe.teacher is not None and recipe.teacher.device != "cpu"
            found.append(Tasks(role, num_replicas=num, gpus=min(1, machines.gpus) if uses_gpu else 0))
    return found


def launch_flags(recipe: Recipe) -> list[str]:
    """Return flags for a job that says where the nodes of its policy meet, which launchers of clusters choose."""
    flags = ["--launch.launcher", "local"]
    if recipe.launch.rollout_nodes > 1 and recipe.launch.places_nodes_of("rollout"):
        flags += ["--launch.rollout-nodes", "1"]  # it has no launch.rollout_rdzv, and each task of the job gets one
    return flags


def _policies(recipe: Recipe, machines: Machines) -> list[Tasks]:
    num = recipe.replicas.get("policy", 0)
    if not num:
        return []
    ranks = recipe.policy.parallel.num_ranks if recipe.kind.trains else 1
    nodes = _nodes("policy", ranks, machines.policy_nodes or recipe.launch.policy_nodes, machines)
    if nodes > 1 and num > 1:
        raise ConfigError(
            f"launch.num_policies = {num}, and each would need {nodes} machines of {counted(machines.gpus, 'GPU')}; "
            "set num_policies = 1, or sizes of policy.parallel that fit into one machine"
        )
    gpus = ranks // nodes if machines.gpus else 0
    return [Tasks("policy", num_replicas=num, nodes=nodes, gpus=gpus)]


def _rollouts(recipe: Recipe, machines: Machines) -> list[Tasks]:
    """Return the rollouts of each pool; each rollout of several nodes by itself, since its nodes meet somewhere."""
    num = recipe.replicas.get("rollout", 0)
    pools = recipe.rollout.pools or (None,)
    found: list[Tasks] = []
    first = 0
    for pool, (_, rollout) in zip(pools, recipe.rollout_variants, strict=True):
        count = num if pool is None else pool.count
        nodes, gpus = _needs(recipe, pool, rollout, machines)
        if nodes == 1 and count:
            found.append(Tasks("rollout", first, count, gpus=gpus, pool=pool))
        elif nodes > 1:
            found += [Tasks("rollout", first + i, nodes=nodes, gpus=gpus, pool=pool) for i in range(count)]
        first += count
    return found


def _needs(recipe: Recipe, pool: RolloutPool | None, rollout: RolloutSettings, machines: Machines) -> tuple[int, int]:
    """Return the machines of a rollout, and its GPUs on each of them."""
    vllm = rollout.vllm if rollout.engine == "vllm" else None
    workers = vllm.tensor_parallel_size * vllm.pipeline_parallel_size if vllm is not None else 1
    given = (pool.gpus if pool is not None else 0) or recipe.launch.gpus_per_rollout
    wanted = machines.rollout_nodes or recipe.launch.rollout_nodes
    if wanted > 1 and vllm is None:
        raise ConfigError(
            f"rollout.engine = {rollout.engine!r} runs on one machine, and its rollouts should have {wanted}; set "
            "rollout.engine = 'vllm', or leave --nodes-rollout and launch.rollout_nodes out"
        )
    if not machines.gpus:
        return max(1, wanted), 0
    if given > machines.gpus:
        raise ConfigError(
            f"launch.gpus_per_rollout or gpus of a pool is {given}, and a machine has {counted(machines.gpus, 'GPU')}; "
            "set it to the GPUs of a rollout on each of its machines"
        )
    if given:
        return max(1, wanted), given
    nodes = _nodes("rollout", workers, wanted, machines)
    return nodes, workers // nodes


def _nodes(role: str, parts: int, wanted: int, machines: Machines) -> int:
    """Return the machines that share the ranks or workers of a replica. Raises ConfigError where they cannot."""
    noun = "rank" if role == "policy" else "vLLM worker"
    if wanted > 1:
        if parts % wanted or (machines.gpus and parts // wanted > machines.gpus):
            raise ConfigError(
                f"--nodes-{role} {wanted} cannot share the {counted(parts, noun)} of a {role} equally on machines with "
                f"{counted(machines.gpus, 'GPU')}; choose another number, or other sizes in the recipe"
            )
        return wanted
    if not machines.gpus:
        return 1
    return next(num for num in range(1, parts + 1) if parts % num == 0 and parts // num <= machines.gpus)
