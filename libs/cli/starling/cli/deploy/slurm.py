"""Scripts of a run as one heterogeneous job of Slurm, and of jobs with further replicas, written from the recipe."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starling.cli.deploy.sizes import Tasks, launch_flags
from starling.cli.deploy.templates import SERVICE, filled, template
from starling.cli.launch.slurm import constraint_of
from starling.cli.recipe.schema import Recipe
from starling.common.errors import ConfigError
from starling.common.files import write_whole

MARGIN_S: Final = 60
"""Time to leave after a graceful stop, before the end of the job."""
WORD: Final = re.compile(r"[\w./:@,=+%^#-]*")
"""Texts that can stand in a script as they are."""
MAX_COMPONENTS: Final = 128
"""Of a heterogeneous job, as Slurm allows."""
_TIME: Final = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
"""Limits on time of sbatch: minutes, minutes:seconds, hours:minutes:seconds, and each of these after days."""


@dataclass(frozen=True)
class SlurmJob:
    """What `starling deploy slurm` is asked for; see there."""

    recipe_file: Path
    settings: tuple[str, ...] = ()
    cpus: int = 8
    time: str = ""
    image: str = ""
    mounts: tuple[str, ...] = ()
    interface: str = ""


def job_script(recipe: Recipe, tasks: Sequence[Tasks], job: SlurmJob) -> str:
    """Return the script of the job. Raises ConfigError for texts that cannot stand in it."""
    _check(job)
    components = [one for one in tasks if one.role != "reward"]
    if len(components) >= MAX_COMPONENTS:
        raise ConfigError(
            f"the job would have {len(components) + 1} components, and Slurm allows {MAX_COMPONENTS}; run the rollouts "
            "that join as jobs of their own (--launch.launcher slurm)"
        )
    rewards = next((one.num_tasks for one in tasks if one.role == "reward"), 0)
    services = [f"  serve 0 {rewards} reward 0 1"] if rewards else []
    options = _first_options(recipe, job, max(1, rewards))
    for number, one in enumerate(components, start=1):
        options += ["#SBATCH hetjob", f"#SBATCH --requeue {_sbatch(recipe, one, job)}"]
        flags = shlex.join(one.pool.flags()) if one.pool is not None else ""
        services.append(f"  serve {number} {one.num_tasks} {one.role} {one.first} {one.nodes} {flags}".rstrip())
    return filled(
        "starling.sbatch",
        {
            "TITLE": f"Written by `starling deploy slurm`. {'; '.join(one.describe() for one in tasks)}.",
            "OPTIONS": "\n".join(options),
            "RECIPE": shlex.quote(str(job.recipe_file.absolute())),
            "SETTINGS": shlex.join(job.settings),
            "POLICY_NODES": str(next((one.nodes for one in components if one.role == "policy"), 1)),
            "LAUNCH": shlex.join(launch_flags(recipe)),
            "FOLDER": _folder(recipe),
            "SERVICES": "\n".join(services or ["  :"]),
            "SERVICE": template(SERVICE).rstrip("\n"),
            **_surroundings(recipe, job),
        },
    )


def join_script(recipe: Recipe, tasks: Sequence[Tasks], job: SlurmJob) -> str:
    """Return the script of a job with a further rollout, as those of the last pool."""
    _check(job)
    rollouts = [one for one in tasks if one.role == "rollout" and one.nodes == 1]
    one = rollouts[-1] if rollouts else Tasks("rollout")
    single = Tasks("rollout", gpus=one.gpus, pool=one.pool)
    options = [f"#SBATCH --job-name={recipe.run.name}-join", "#SBATCH --output=%x-%j.log --open-mode=append --requeue"]
    return filled(
        "join.sbatch",
        {
            "OPTIONS": "\n".join([*options, f"#SBATCH {_sbatch(recipe, single, job)}"]),
            "SETTINGS": shlex.join(one.pool.flags()) if one.pool is not None else "",
            **_surroundings(recipe, job),
        },
    )


def write_scripts(folder: Path, recipe: Recipe, tasks: Sequence[Tasks], job: SlurmJob) -> list[Path]:
    """Write both scripts into `folder`, which is made if it does not exist. Returns their paths."""
    texts = {"starling.sbatch": job_script(recipe, tasks, job), "join.sbatch": join_script(recipe, tasks, job)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(folder / name, text, executable=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}; give another --out") from None
    return [folder / name for name in texts]


def _first_options(recipe: Recipe, job: SlurmJob, num_tasks: int) -> list[str]:
    """Return the options of the job, and those of its first component: the controller and the reward service."""
    signal_s = math.ceil(recipe.controller.stop_s) + MARGIN_S
    needs = [f"--nodes=1 --ntasks={num_tasks} --cpus-per-task={job.cpus}", *_common(recipe, job)]
    return [
        f"#SBATCH --job-name={recipe.run.name}",
        "#SBATCH --output=%x-%j.log --open-mode=append",
        f"#SBATCH --requeue --signal=B:USR1@{signal_s}",
        f"#SBATCH {' '.join(needs)}",
    ]


def _sbatch(recipe: Recipe, one: Tasks, job: SlurmJob) -> str:
    """Return the options of sbatch for tasks: their nodes, processors and GPUs."""
    kind = f"{one.pool.gpu_kind}:" if one.pool is not None and one.pool.gpu_kind else ""
    cpus = job.cpus * max(1, one.gpus)
    if one.nodes > 1:
        words = [f"--nodes={one.nodes} --ntasks-per-node=1 --cpus-per-task={cpus}"]
        words += [f"--gpus-per-node={kind}{one.gpus}"] if one.gpus else []
    else:
        words = [f"--ntasks={one.num_tasks} --cpus-per-task={cpus}"]
        words += [f"--gpus-per-task={kind}{one.gpus}"] if one.gpus else []
    if one.pool is not None and one.pool.partition:
        words.append(_option(f"--partition={one.pool.partition}"))
    if one.pool is not None and one.pool.node_selector:
        words.append(_option(f"--constraint={constraint_of(one.pool.node_selector)}"))
    return " ".join([*words, *_common(recipe, job)])


def _common(recipe: Recipe, job: SlurmJob) -> list[str]:
    """Return the options that all components have."""
    time = [f"--time={job.time}"] if job.time else []
    return [*time, *map(_option, recipe.launch.slurm.options)]


def _option(text: str) -> str:
    """Return an option of sbatch as a line of a script has it. Raises ConfigError for one that would end the line."""
    if not text.isprintable():
        raise ConfigError(f"the option {text!r} of sbatch cannot stand in a script; leave out control characters")
    return shlex.quote(text)


def _folder(recipe: Recipe) -> str:
    """Return the folder of the run, for a text in double quotes. Raises ConfigError for one that bash would change."""
    folder = str(recipe.run.folder / recipe.run.name)
    if not WORD.fullmatch(folder):
        raise ConfigError(f"the run's folder would be {folder!r}; choose run.folder without blanks, quotes and '$'")
    return folder


def _surroundings(recipe: Recipe, job: SlurmJob) -> dict[str, str]:
    """Return the values of marks that both scripts have."""
    return {
        "PROGRAM": shlex.quote(recipe.launch.slurm.program),
        "INTERFACE": job.interface,
        "IMAGE": job.image,
        "MOUNTS": ",".join(job.mounts),
    }


def _check(job: SlurmJob) -> None:
    """Raise ConfigError for a text that would mean something else in a script."""
    if job.cpus < 1:
        raise ConfigError(f"--cpus {job.cpus} is no number of processors; give at least 1")
    words = {"--time": (job.time,), "--image": (job.image,), "--mount": job.mounts, "--interface": (job.interface,)}
    for flag, texts in words.items():
        for text in texts:
            if not WORD.fullmatch(text):
                raise ConfigError(f"{flag} {text!r} cannot stand in a script; leave out blanks, quotes and '$'")
    if job.time and not _TIME.fullmatch(job.time):
        raise ConfigError(f"--time {job.time} is no limit that sbatch takes; give minutes, HH:MM:SS or D-HH:MM:SS")
