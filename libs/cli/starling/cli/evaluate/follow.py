"""`starling serve --from`: a replica that serves the newest weights of a run, and takes none of its work.

It is a rollout without slots: it joins the run by a key of its own, and the controller has it pull each version that is
published, from the policy or from another rollout, and prove it like any other rollout. The model's folder gives it the
configuration and the tokenizer; weights in there are not read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from starling.cli.evaluate.options import ModelOptions
from starling.cli.services import run_module
from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from starling.rollout.settings import RolloutProcess

ONE_REPLICA = ("--num-gpus", "--seed")
"""Flags of several replicas, or of answers that the run's controller seeds."""


@dataclass(frozen=True)
class FollowOptions:
    """The run whose weights are served."""

    controller: Annotated[
        str, Parameter(name="--from", metavar="ADDRESS", help="The run's controller, tcp://host:port.")
    ] = ""
    config: Annotated[Path | None, Parameter(metavar="FILE", help="The run's config.toml, or a copy of it.")] = None
    key: Annotated[
        Path | None, Parameter(metavar="FILE", help="A rollout's key, made by `starling keys make` for this replica.")
    ] = None


NOTHING_TO_FOLLOW = FollowOptions()


def follow(run: FollowOptions, model: ModelOptions, flags: frozenset[str], settings: Sequence[str]) -> int:
    """Serve the newest weights of `run` until it ends, or until Ctrl-C. Returns the exit code.

    Args:
        run: the address, the configuration and the key.
        model: overrides of the configuration, as far as they are among `flags`.
        flags: flags of the command line.
        settings: settings of the replica.

    Raises:
        ConfigError: one of them is missing or cannot be used.
    """
    arguments = replica_arguments(run, model, flags)
    process = _read_config(run.config, [*arguments, *settings])
    name = _name_of(run, curve=process.network.curve)
    from starling.cli.run.attempt import Attempt
    from starling.cli.run.screen import short_path

    attempt = Attempt.create(process.model_copy(update={"run": process.run.model_copy(update={"name": "serve"})}))
    print(f"serves the weights of the run at {run.controller}", flush=True)
    print(f"address and API key: {short_path(attempt.folder / 'api')}/{name}.json", flush=True)
    connection = ["--name", name, "--controller", run.controller, "--dir", str(attempt.folder)]
    connection += ["--config", str(run.config), *(["--key", str(run.key)] if run.key is not None else [])]
    return run_module("rollout", [*connection, *arguments, *settings])


def replica_arguments(run: FollowOptions, model: ModelOptions, flags: frozenset[str]) -> list[str]:
    """Return the settings that make a rollout of a replica that only serves. Raises ConfigError."""
    if not run.controller.startswith("tcp://"):
        raise ConfigError(f"--from {run.controller} is not an address; write tcp://host:port, that of the controller")
    if run.config is None:
        raise ConfigError(
            "--config is missing; give the run's config.toml, by which both sides agree on element types and digests"
        )
    foreign = next((flag for flag in ONE_REPLICA if flag in flags), None)
    if foreign is not None:
        raise ConfigError(f"{foreign} is not for --from, which starts one replica; leave it out")
    arguments = ["--rollout.num-slots=0", "--rollout.api.enabled=true", "--rollout.load-weights=false"]
    arguments += ["--rollout.environment.kind="]
    if model.model:
        arguments.append(f"--model.path={Path(model.model).absolute()}")
    if "--engine" in flags:
        arguments.append(f"--rollout.engine={model.engine}")
    if "--tp-size" in flags:
        arguments.append(f"--rollout.vllm.tensor-parallel-size={model.tp_size}")
    return arguments


def _read_config(config: Path | None, settings: Sequence[str]) -> RolloutProcess:
    """Read the configuration as the replica will. Raises ConfigError, also where its run publishes no weights."""
    from starling.common.kinds import KINDS
    from starling.common.service import SECTIONS
    from starling.common.settings import load
    from starling.rollout.settings import RolloutProcess

    assert config is not None, "it was checked"
    _check_resolved(config)
    process = load(RolloutProcess, [config], settings, others=SECTIONS)
    if not KINDS[process.run.kind].learns_from_rewards and not _fans_out(config):
        raise ConfigError(
            f"{config} is of a run of run.kind = {process.run.kind!r}, which publishes no weights to serve; "
            "give that of a run of kind 'rl' or with launch.fan_out = true, or serve a folder by --model alone"
        )
    return process


def _check_resolved(config: Path) -> None:
    """Refuse a recipe, which lies beside the configuration that a started run has made of it. Raises ConfigError."""
    from starling.common.settings import read_toml

    run = read_toml(config).get("run")
    if not (isinstance(run, dict) and run.get("id")):
        raise ConfigError(
            f"{config} has no run.id, as a recipe has none; give the config.toml in the folder of the started run, "
            "runs/NAME/attempt-N"
        )


def _fans_out(config: Path) -> bool:
    """Return whether the configuration is of a run that trains nothing and publishes the weights of its folder."""
    from starling.common.settings import read_toml

    launch = read_toml(config).get("launch")
    return isinstance(launch, dict) and launch.get("fan_out") is True


def _name_of(run: FollowOptions, *, curve: bool) -> str:
    """Return the name of the replica, that of its key. Raises ConfigError."""
    from starling.common.net.curve import load_key
    from starling.common.net.limits import role_of

    if not curve:
        return f"rollout-{os.getpid()}"
    if run.key is None:
        raise ConfigError(
            "--key is missing; make a key of this replica's own where the run is, such as "
            "`starling keys make runs/mine/attempt-1/keys rollout-7`, and give the file that it writes"
        )
    name = load_key(run.key).name
    if role_of(name) != "rollout":
        raise ConfigError(
            f"the key file {run.key} was made for {name}, which is no rollout; make one for a name such as rollout-7"
        )
    return name
