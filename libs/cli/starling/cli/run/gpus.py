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


class FreeGpus:
    """Assignment of the visible GPUs to replicas: in the order of their starts, and after a restart the same ones."""

    def __init__(self) -> None:
        """All visible GPUs are free."""
        self._taken: dict[str, list[str]] = {}
        self._former: dict[str, list[str]] = {}

    def take(self, name: str, num: int) -> dict[str, str]:
        """Return the environment with `num` GPUs for the replica `name`; empty for 0, which sees all of them.

        Raises ConfigError when too few are free.
        """
        if not num:
            return {}
        present = visible_gpus()
        taken = {gpu for gpus in self._taken.values() for gpu in gpus}
        free = [gpu for gpu in present if gpu not in taken]
        former = [gpu for gpu in self._former.get(name, ()) if gpu in free]
        mine = former if len(former) == num else free[:num]
        if len(mine) < num:
            role = name.rpartition("-")[0]
            counts = {"policy": "num_policies", "rollout": "num_rollouts"}
            raise ConfigError(
                f"{name} needs launch.gpus_per_{role} = {num}, and of the {counted(len(present), 'GPU')} visible here "
                f"{len(free)} {'is' if len(free) == 1 else 'are'} free; lower it, or launch.{counts[role]}"
            )
        self._taken[name] = mine
        return {VISIBLE: ",".join(mine)}

    def release(self, name: str) -> None:
        """Make the GPUs of the replica `name` free again, after its end."""
        if name in self._taken:
            self._former[name] = self._taken.pop(name)
