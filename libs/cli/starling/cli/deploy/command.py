"""The command `starling deploy`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from starling.cli.command_line import Line, define

USAGE = """[systemd] --role ROLE [--gpus 0,1] [--controller tcp://HOST:PORT]
       starling deploy slurm RECIPE.toml [OPTIONS]
       starling deploy lepton RECIPE.toml [OPTIONS]"""
NOTES = """Examples:
  starling deploy slurm grpo.toml --gpus-per-node 8 --time 24:00:00 --out job
  starling deploy systemd --role controller
  starling deploy systemd --role rollout --gpus 0,1 --controller tcp://10.0.0.1:5555
  starling deploy systemd --role rollout --join --controller tcp://10.0.0.1:5555      # needs a key, and no recipe
  starling deploy systemd --role reward --dry-run"""


def systemd(
    *,
    role: Annotated[
        Literal["controller", "policy", "rollout", "reward"], Parameter(help="Which service this machine is to run.")
    ],
    gpus: Annotated[str, Parameter(help="GPUs of a policy or a rollout, such as 0,1; default: none.")] = "",
    controller: Annotated[str, Parameter(help="Address of the controller, tcp://HOST:PORT.")] = "",
    number: Annotated[
        int,
        Parameter(
            help="Number of the replica in its name; default: that of these GPUs, else the next one of this machine."
        ),
    ] = -1,
    config: Annotated[Path, Parameter(help="Recipe of the run on this machine, which the services read.")] = Path(
        "/etc/starling/recipe.toml"
    ),
    join: Annotated[
        bool, Parameter(help="Start it by `starling join`: its settings come from the controller, not from --config.")
    ] = False,
    program: Annotated[
        Path | None, Parameter(help="The `starling` command that the units start; default: this one.")
    ] = None,
    root: Annotated[Path, Parameter(help="Install below this folder, such as the root of an image.")] = Path("/"),
    dry_run: Annotated[bool, Parameter(help="Print the files instead of writing them.")] = False,
) -> int:
    """Install the systemd unit of a service, and the environment file of its instance."""
    from starling.cli.deploy.systemd import Service, install

    service = Service(role, gpus, controller, number, config, program, join)
    print(install(service, root, dry_run=dry_run))
    return 0


Recipe = Annotated[Path, Parameter(help="The recipe of the run.")]
NodesPolicy = Annotated[int, Parameter(help="Machines of each policy; default: as few as its ranks need.")]
NodesRollout = Annotated[int, Parameter(help="Machines of each rollout; default: as few as its workers need.")]


def slurm(
    recipe: Recipe,
    /,
    *,
    out: Annotated[
        Path | None, Parameter(help="Write starling.sbatch and join.sbatch to this folder; default: print the former.")
    ] = None,
    gpus_per_node: Annotated[int, Parameter(help="GPUs of each machine; 0 for a run on CPUs.")] = 8,
    nodes_policy: NodesPolicy = 0,
    nodes_rollout: NodesRollout = 0,
    cpus: Annotated[int, Parameter(help="Processors for each GPU, and for each task without one.")] = 8,
    time: Annotated[str, Parameter(help="Limit of the job, as sbatch takes it, such as 24:00:00.")] = "",
    image: Annotated[str, Parameter(help="Container image of all steps, for pyxis.")] = "",
    mount: Annotated[
        tuple[str, ...], Parameter(help="Mount of the containers, FROM:TO; may be repeated.", negative="")
    ] = (),
    interface: Annotated[str, Parameter(help="Network card whose address each host uses, such as ib0.")] = "",
    line: Line,
) -> int:
    """Write a run as one heterogeneous job of Slurm: controller, policies and rollouts, sized by the recipe."""
    from starling.cli.deploy.sizes import Machines, tasks_of
    from starling.cli.deploy.slurm import SlurmJob, job_script, write_scripts
    from starling.cli.deploy.texts import check_readable
    from starling.cli.recipe.schema import load_recipe

    check_readable(line.settings)
    loaded = load_recipe([recipe], line.settings)
    tasks = tasks_of(loaded, Machines(gpus_per_node, nodes_policy, nodes_rollout))
    job = SlurmJob(recipe, line.settings, cpus, time, image, mount, interface)
    if out is None:
        print(job_script(loaded, tasks, job), end="")
        return 0
    for path in write_scripts(out, loaded, tasks, job):
        print(f"written: {path}")
    print("\n".join(one.describe() for one in tasks))
    print(f"submit: sbatch {out / 'starling.sbatch'}")
    return 0


def lepton(
    recipe: Recipe,
    /,
    *,
    image: Annotated[str, Parameter(help="Container image of all workers, with Starling.")],
    resource_shape: Annotated[str, Parameter(help="Shape of each worker, such as gpu.8xh100-80gb.")],
    node_group: Annotated[
        tuple[str, ...], Parameter(help="Id of a node group that may run it; may be repeated.", negative="")
    ],
    mount: Annotated[
        tuple[str, ...],
        Parameter(help="Storage, PATH:MOUNT_PATH:FROM; the first one has the run's folder.", negative=""),
    ],
    env: Annotated[tuple[str, ...], Parameter(help="Variable, NAME=VALUE; may be repeated.", negative="")] = (),
    secret: Annotated[
        tuple[str, ...],
        Parameter(help="Variable from a secret of the workspace, NAME=SECRET; may be repeated.", negative=""),
    ] = (),
    pull_secret: Annotated[
        tuple[str, ...], Parameter(help="Secret of the image's registry; may be repeated.", negative="")
    ] = (),
    nodes_policy: NodesPolicy = 0,
    nodes_rollout: NodesRollout = 0,
    out: Annotated[Path | None, Parameter(help="Write the specification to this file; default: print it.")] = None,
    line: Line,
) -> int:
    """Write a run as the specification of a job of DGX Cloud Lepton, for `lep job create --file`."""
    from starling.cli.deploy.lepton import LeptonRequest, gpus_of, job_name, specification, write_specification
    from starling.cli.deploy.sizes import Machines, tasks_of
    from starling.cli.recipe.schema import load_recipe

    loaded = load_recipe([recipe], line.settings)
    machines = Machines(gpus_of(resource_shape), nodes_policy, nodes_rollout)
    tasks = tasks_of(loaded, machines)
    request = LeptonRequest(image, resource_shape, node_group, mount, env, secret, pull_secret)
    text = specification(loaded, tasks, request).to_json()
    if out is None:
        print(text)
    else:
        write_specification(out, text)
        print("\n".join(one.describe() for one in tasks), file=sys.stderr)
        print(f"create: lep job create --name {job_name(loaded.run.name)} --file {out}")
    return 0


command: App = define("deploy", systemd, USAGE, NOTES)  # `starling deploy --role ...` is `starling deploy systemd`
command.command(systemd, name="systemd")
command.command(slurm, usage="Usage: starling deploy slurm RECIPE.toml [OPTIONS] [--SECTION.KEY VALUE ...]")
command.command(
    lepton,
    usage="Usage: starling deploy lepton RECIPE.toml --image IMAGE --resource-shape SHAPE --node-group ID "
    "--mount MOUNT [OPTIONS] [--SECTION.KEY VALUE ...]",
)
