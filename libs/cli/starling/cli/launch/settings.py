"""Settings of the launchers: how each engine is reached, and what it starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from starling.common.ranges import MAX_PROCESSES
from starling.common.settings import SettingsSection


def _check_word(text: str) -> str:
    if not text or any(character in text for character in " \t\n\"'\\$`"):
        raise ValueError(f"{text!r} is the name of a program or a path; leave out blanks, quotes and '$'")
    return text


Word = Annotated[str, AfterValidator(_check_word)]
PlacedRole = Literal["policy", "rollout", "reward", "teacher"]


class SlurmSettings(SettingsSection):
    """The launcher `slurm`."""

    roles: tuple[PlacedRole, ...] = ("policy", "rollout", "reward", "teacher")
    """Roles that it places; replicas of others run on this machine."""
    options: tuple[str, ...] = ()
    """Further options of sbatch for each replica, such as `["--account=rl", "--cpus-per-task=8"]`."""
    prefix: str = ""
    """Words before the command of a replica, such as `srun --container-image=/images/starling.sqsh` with pyxis."""
    program: Word = "starling"
    """The `starling` command on the nodes."""


class KubernetesSettings(SettingsSection):
    """The launcher `kubernetes`."""

    roles: tuple[Literal["rollout", "reward", "teacher"], ...] = ("rollout", "reward", "teacher")
    """Roles that it places; replicas of others run on this machine."""
    namespace: Word = "starling"
    """Namespace of the run, in which `kubectl` may create Jobs and Secrets."""
    context: str = ""
    """Context of kubectl's configuration; empty for the current one."""
    image: str = ""
    """Image of the replicas, with `{role}` for the role: `registry.example.org/starling-{role}:1`. Empty for
    `starling-{role}`."""
    cpu: str = "1"
    """Processors that each replica asks for."""
    memory: str = "16Gi"
    """Memory of each replica, request and limit."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource of GPUs."""
    gpu_label: str = "nvidia.com/gpu.product"
    """Label of nodes with the kind of their GPUs."""
    pool_label: str = "cloud.google.com/gke-nodepool"
    """Label of nodes with the name of their pool, which `partition` names."""
    models_claim: str = ""
    """PersistentVolumeClaim with the models, mounted at `/models`; empty for none."""
    tolerations: tuple[str, ...] = ("nvidia.com/gpu",)
    """Taints of nodes with GPUs that replicas tolerate."""


def _check_cluster(address: str) -> str:
    if address == "local":
        raise ValueError("'local' would start a Ray of its own; give the address of a cluster, or 'auto'")
    return address


Amount = Annotated[float, Field(gt=0, le=1e15)]
"""Of a resource; `memory` has bytes."""


class RaySettings(SettingsSection):
    """The launcher `ray`."""

    roles: tuple[PlacedRole, ...] = ("policy", "rollout", "reward", "teacher")
    """Roles that it places; replicas of others run on this machine."""
    address: Annotated[Word, AfterValidator(_check_cluster)] = "auto"
    """The cluster: `auto` for that of this machine or of RAY_ADDRESS, `HOST:6379` for one that this machine is a node
    of, or `ray://HOST:10001` from outside."""
    python: str = ""
    """Interpreter on the nodes that has Starling, of the same version as here; empty for that of Ray's workers."""
    shared: bool = False
    """The folder of the run is on the nodes, too, under the same path. A policy needs it, or `policy.saving.folder`."""
    cpus: float = Field(default=1, ge=0, le=MAX_PROCESSES)
    """Ray's CPU of each replica, on each of its nodes. Ray counts them, and limits no process to them."""
    resources: dict[PlacedRole, dict[str, Amount]] = Field(default_factory=dict)
    """Further resources of Ray for the replicas of a role, such as `{rollout = {memory = 64e9, inference = 1}}`."""
    labels: dict[PlacedRole, dict[str, str]] = Field(default_factory=dict)
    """Labels of the nodes for a role; `rollout.pools.node_selector` comes on top."""
    gpu_label: str = "ray.io/accelerator-type"
    """Label of nodes with the kind of their GPUs, which `rollout.pools.gpu_kind` names."""
    pool_label: str = "ray.io/node-group"
    """Label of nodes with the name of their group, which `rollout.pools.partition` names."""
