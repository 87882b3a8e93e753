"""Devices of workers: their names in settings, and the environment variables that choose them."""

from __future__ import annotations

import re
from typing import Final

from starling.common.errors import ConfigError
from starling.common.sandbox.settings import SandboxNeeds
from starling.common.settings import environment_variables

CPU: Final = "cpu"
_DEVICE: Final = re.compile(r"cpu|cuda:[0-9]{1,4}")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
"""Which GPUs a process sees, and in which order; AMD's runtime reads it, too."""


def check_device(name: str, device: str) -> str:
    """Return a device, `cpu` or `cuda:<number>`. Raises ConfigError for what is none, as the setting `name`."""
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"{name} is {device!r}: write `cpu`, or the number of a GPU as `cuda:1`.")
    return device


def device_variables(device: str, needs: SandboxNeeds) -> dict[str, str]:
    """Return the environment variables that choose a device.

    Args:
        device: `cpu`, `cuda:<number>`, or empty for what the process sees anyway.
        needs: of the worker; they include the device.

    Raises:
        ConfigError: there is no such device, or the service itself does not see it.
    """
    if not device:
        return {}
    if device == CPU:
        return {_VISIBLE: ""}
    if not needs.device_files():
        raise ConfigError(
            f"device is {device!r}, and this machine shows no GPU (as /dev/nvidia0): start the service where "
            "there is one, or set `cpu`."
        )
    number = int(device.partition(":")[2])
    seen = environment_variables([_VISIBLE]).get(_VISIBLE)
    if seen is None:
        return {_VISIBLE: str(number)}
    names = [name.strip() for name in seen.split(",") if name.strip()]
    if number >= len(names):
        raise ConfigError(
            f"device is {device!r}, and the service sees {len(names)} GPUs ({_VISIBLE}={seen!r}): set a "
            "smaller number, or let the service see more."
        )
    return {_VISIBLE: names[number]}
