"""Settings of sandboxes: how strong they must be, and what the code inside may reach."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator

from starling.common.errors import ConfigError
from starling.common.settings import SettingsSection

SandboxLevel = Literal["auto", "required", "bubblewrap", "namespaces", "landlock", "process"]
"""`auto`: the strongest that this machine offers. `required`: one of the two with namespaces, or the start fails. The
others: just this one."""

GPU: Final = "gpu"
MAX_TASKS: Final = 1 << 22
"""Most that Linux counts."""
_GPU_DEVICES: Final = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")


class SandboxNeeds(SettingsSection):
    """What the code in a sandbox may reach besides the interpreter, installed packages and its own modules."""

    network: bool = False
    """Reach the network, with the addresses of this machine; without it there is a loopback device only."""
    devices: tuple[str, ...] = ()
    """Devices, as `/dev/infiniband`; `gpu` is all GPUs of this machine."""
    paths: tuple[Path, ...] = ()
    """Files and folders to read."""
    writable_paths: tuple[Path, ...] = ()
    """Files and folders to read and write."""
    variables: tuple[str, ...] = ()
    """Environment variables to pass on, for example `OPENAI_API_KEY` for a judge; all others are removed."""
    max_tasks: int = Field(default=512, ge=16, le=MAX_TASKS)
    """Limit on processes and threads. With namespaces it is that of each session, which can start no further one,
    except where root is the code's user (`sandbox_weak` in the log). At the levels `landlock` and `process` it is that
    of all sessions of a sandbox together, of which the largest are killed."""

    @field_validator("devices")
    @classmethod
    def _devices(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        for device in devices:
            if device != GPU and not device.startswith("/dev/"):
                raise ConfigError(f"devices has {device!r}: write a path below /dev, or `{GPU}`.")
        return devices

    @field_validator("paths", "writable_paths")
    @classmethod
    def _paths(cls, paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(path.expanduser() for path in paths)

    @property
    def grants_nothing(self) -> bool:
        """Whether nothing but limits is declared."""
        return not (self.network or self.devices or self.paths or self.writable_paths or self.variables)

    def device_files(self) -> list[str]:
        """Return the device files and folders that exist."""
        found: list[str] = []
        for device in self.devices:
            found += [name for pattern in _GPU_DEVICES for name in glob.glob(pattern)] if device == GPU else [device]
        return sorted(set(found))
