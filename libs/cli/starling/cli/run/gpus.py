"""Visible GPUs, and their division among the instances of an engine."""

from __future__ import annotations

from pathlib import Path

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.settings import environment_variable

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, as CUDA_VISIBLE_DEVICES names them; does not load the driver."""
    visible = environment_variable(VISIBLE)
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)


def num_instances(num_gpus: int, tp_size: int, present: int) -> tuple[int, str]:
    """Return how many instances `num_gpus` GPUs make, and the arithmetic in words.

    `present`: number of visible GPUs; when 0, `num_gpus` counts instances on the CPU times `tp_size`.
    Raises ConfigError.
    """
    if num_gpus < 1 or tp_size < 1:
        raise ConfigError(f"--num-gpus {num_gpus} and --tp-size {tp_size} must both be 1 or more")
    if num_gpus % tp_size:
        lower = num_gpus // tp_size * tp_size
        fitting = [str(n) for n in (lower, lower + tp_size) if n]
        raise ConfigError(
            f"--num-gpus {num_gpus} does not divide into instances of --tp-size {tp_size}; give --num-gpus "
            f"{' or '.join(fitting)}, or another --tp-size"
        )
    if present and num_gpus > present:
        raise ConfigError(
            f"--num-gpus {num_gpus} is more than the {counted(present, 'GPU')} visible here; give at most {present}"
        )
    num = num_gpus // tp_size
    what = counted(num_gpus, "GPU") if present else f"no GPU here: {counted(num_gpus, 'share')} of the CPU"
    return num, f"{what} = {counted(num, 'instance')} x tp {tp_size}"


def devices_of(name: str, num: int, first: int = 0) -> dict[str, str]:
    """Return the environment with the `num` GPUs of the policy or rollout `name`; empty for 0, where all see all.

    `first`: GPUs before those of the first replica of the role. Raises ConfigError when there are too few.
    """
    if not num:
        return {}
    role, _, index = name.rpartition("-")
    present = visible_gpus()
    mine = present[first + int(index) * num :][:num]
    if len(mine) < num:
        counts = {"policy": "num_policies", "rollout": "num_rollouts"}
        raise ConfigError(
            f"launch.gpus_per_{role} = {num}, and the {counted(len(present), 'GPU')} visible here are too few for "
            f"{name}; lower it, or launch.{counts[role]}"
        )
    return {VISIBLE: ",".join(mine)}
