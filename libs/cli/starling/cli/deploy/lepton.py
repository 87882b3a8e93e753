"""A run as a job of DGX Cloud Lepton: its workers have equal machines, and each starts its share of the services.

The fields are those of the job's specification that `lep job create --file` reads, as NVIDIA documents them and version
0.47 of `leptonai` declares them. Secrets are only named.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from starling.cli.deploy.sizes import Tasks, launch_flags
from starling.cli.deploy.templates import SERVICE, filled, template
from starling.cli.deploy.texts import variable_has_secret
from starling.cli.recipe.schema import Recipe, to_shown_toml, to_toml
from starling.common.errors import ConfigError
from starling.common.files import write_whole

SHAPE: Final = re.compile(r"cpu\.[\w.-]+|gpu\.(?:(?P<num>\d+)x)?[a-z][\w.-]*")
NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
FOLDER: Final = re.compile(r"/[\w./-]+")
RDZV_PORT: Final = 29_400


class _Spec(BaseModel):
    """A table of the specification: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class SecretReference(_Spec):
    """The secret of the workspace that a variable has."""

    secret_name_ref: str


class EnvironmentVariable(_Spec):
    """A variable of the workers, with a value or from a secret."""

    name: str
    value: str | None = None
    value_from: SecretReference | None = None


class Mount(_Spec):
    """A folder of a storage, and where the workers see it."""

    path: str
    source: str = Field(serialization_alias="from")
    mount_path: str


class Affinity(_Spec):
    """Node groups that may run the job."""

    allowed_dedicated_node_groups: tuple[str, ...]


class Container(_Spec):
    """What each worker runs."""

    image: str
    command: tuple[str, ...]


class JobSpecification(_Spec):
    """The job."""

    resource_shape: str
    affinity: Affinity
    container: Container
    completions: int = Field(ge=1)
    parallelism: int = Field(ge=1)
    intra_job_communication: bool = True
    max_failure_retry: int = Field(ge=0)
    max_job_failure_retry: int = Field(ge=0)
    envs: tuple[EnvironmentVariable, ...]
    mounts: tuple[Mount, ...]
    image_pull_secrets: tuple[str, ...]

    def to_json(self) -> str:
        """Return it as the file that `lep job create` reads."""
        return self.model_dump_json(by_alias=True, exclude_none=True, indent=2)


@dataclass(frozen=True)
class LeptonRequest:
    """What `starling deploy lepton` is asked for; see there."""

    image: str
    resource_shape: str
    node_groups: tuple[str, ...]
    mounts: tuple[str, ...]
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    pull_secrets: tuple[str, ...] = ()


def gpus_of(shape: str) -> int:
    """Return the GPUs of a resource shape: 8 of ``gpu.8xh100-80gb``. Raises ConfigError for another text."""
    match = SHAPE.fullmatch(shape)
    if match is None:
        raise ConfigError(f"--resource-shape {shape} is none; write one such as gpu.8xh100-80gb or cpu.large")
    return int(match["num"] or 1) if shape.startswith("gpu.") else 0


def job_name(run: str) -> str:
    """Return the name of the job of a run: as Lepton allows, at most 36 lower-case letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9-]", "-", run.lower())[:36].strip("-")
    return name if name[:1].isalpha() else f"run-{name}"[:36].strip("-")


def specification(recipe: Recipe, tasks: Sequence[Tasks], request: LeptonRequest) -> JobSpecification:
    """Return the job of a run. Raises ConfigError for a secret in the recipe, and for what cannot be placed."""
    _check_secrets(recipe)
    mounts = tuple(_mount(text) for text in request.mounts)
    if not mounts or not request.node_groups:
        raise ConfigError("the job needs --mount for the run's folder, and --node-group; give both")
    workers = place(tasks, gpus_of(request.resource_shape))
    retries = recipe.launch.max_restarts
    return JobSpecification(
        resource_shape=request.resource_shape,
        affinity=Affinity(allowed_dedicated_node_groups=request.node_groups),
        container=Container(image=request.image, command=("/bin/bash", "-c", _script(recipe, workers, mounts[0]))),
        completions=len(workers),
        parallelism=len(workers),
        max_failure_retry=retries,
        max_job_failure_retry=retries,
        envs=(*map(_variable, request.env), *map(_secret, request.secrets)),
        mounts=mounts,
        image_pull_secrets=request.pull_secrets,
    )


def write_specification(path: Path, text: str) -> None:
    """Write the file. Raises ConfigError when it cannot be written."""
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; give another --out") from None


@dataclass
class Worker:
    """One machine of the job."""

    free: int
    """GPUs that no task has."""
    tasks: list[PlacedTask] = field(default_factory=list)


@dataclass(frozen=True)
class PlacedTask:
    """One task of a worker."""

    group: Tasks
    number: int
    """Among the tasks of its group."""
    gpus: tuple[int, ...]
    meets_at: int
    """Worker of the first node of its replica."""


def place(tasks: Sequence[Tasks], gpus: int) -> list[Worker]:
    """Return the workers of a job whose machines have `gpus` GPUs each, with their tasks, in the order of `tasks`.

    The nodes of a replica are on different workers. A task without a GPU is on worker 0, the controller's.
    """
    workers = [Worker(gpus)]
    for group in tasks:
        used: list[int] = []
        for number in range(group.num_tasks):
            taken = used if group.nodes > 1 else []
            index = _first_fitting(workers, group, taken, gpus)
            worker, meets_at = workers[index], used[0] if used and group.nodes > 1 else index
            devices = tuple(range(gpus - worker.free, gpus - worker.free + group.gpus))
            worker.free -= group.gpus
            worker.tasks.append(PlacedTask(group, number, devices, meets_at))
            used.append(index)
    return workers


def _first_fitting(workers: list[Worker], group: Tasks, taken: Sequence[int], gpus: int) -> int:
    for index, worker in enumerate(workers):
        if worker.free >= group.gpus and index not in taken:
            return index
    workers.append(Worker(gpus))
    return len(workers) - 1


def _script(recipe: Recipe, workers: Sequence[Worker], mount: Mount) -> str:
    """Return the script that each worker runs."""
    folder = str(Path(mount.mount_path) / recipe.run.folder / recipe.run.name)  # an absolute run.folder stays
    if not FOLDER.fullmatch(folder):
        raise ConfigError(f"the run's folder would be {folder}; choose a mount path and run.folder of plain letters")
    policy = next((one.group for worker in workers for one in worker.tasks if one.group.role == "policy"), None)
    settings = ""
    if policy is not None and policy.nodes > 1:
        settings = f" {shlex.join(launch_flags(recipe))}"
        settings += f' --launch.policy-nodes {policy.nodes} --launch.policy-rdzv "$(host 0):{RDZV_PORT}"'
    cases = [f"  {index})\n{_starts(worker)}    ;;" for index, worker in enumerate(workers)]
    values = {
        "FOLDER": folder,
        "PROGRAM": shlex.quote(recipe.launch.slurm.program),
        "SETTINGS": settings,
        "RECIPE": to_toml(recipe).rstrip("\n"),
        "SERVICES": "\n".join(cases),
        "SERVICE": template(SERVICE).rstrip("\n"),
    }
    return filled("worker.sh", values)


def _starts(worker: Worker) -> str:
    lines = []
    for task in worker.tasks:
        group = task.group
        flags = group.pool.flags() if group.pool is not None else ()
        gpus = ",".join(map(str, task.gpus))
        words = [gpus, task.number, task.meets_at, group.role, group.first, group.nodes, *flags]
        lines.append(f"    start {shlex.join(map(str, words))}\n")
    return "".join(lines or ["    :\n"])


def _check_secrets(recipe: Recipe) -> None:
    """Raise ConfigError for a secret in the recipe, which would be readable in the specification."""
    if to_shown_toml(recipe) != to_toml(recipe):
        raise ConfigError(
            "the recipe, or a STARLING_ variable here, has a secret, and the specification of a job is none; take it "
            "out, and give --secret STARLING_SECTION__KEY=NAME with the name of a secret of the workspace"
        )


def _mount(text: str) -> Mount:
    path, mount_path, source = [*text.split(":", 2), "", ""][:3]
    if not (path and source and FOLDER.fullmatch(mount_path)):
        raise ConfigError(f"--mount {text} is none; write PATH:MOUNT_PATH:FROM, such as /:/shared:node-nfs:lustre")
    return Mount(path=path, mount_path=mount_path.rstrip("/"), source=source)


def _variable(text: str) -> EnvironmentVariable:
    found = _assignment("--env", text, "value")
    if variable_has_secret(found["name"], found["value"]):
        raise ConfigError(
            f"--env {found['name']} has a secret, which others could read in the specification; give --secret "
            f"{found['name']}=NAME with the name of a secret of the workspace"
        )
    return EnvironmentVariable(**found)


def _secret(text: str) -> EnvironmentVariable:
    found = _assignment("--secret", text, "secret_name_ref")
    return EnvironmentVariable(name=found["name"], value_from=SecretReference(secret_name_ref=found["secret_name_ref"]))


def _assignment(flag: str, text: str, key: str) -> dict[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not value or not NAME.fullmatch(name) or name.startswith("LEPTON_"):
        raise ConfigError(f"{flag} {name} is none; write NAME=VALUE, with a name that does not begin with LEPTON_")
    return {"name": name, key: value}
