"""Installation of systemd units: the unit of a role, the environment file of an instance, and what to do next."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError
from starling.common.files import write_whole

INSTANCES: Final = ("policy", "rollout")
"""Roles with one unit for several replicas of a machine."""
COMMON: Final = ("starling.target",)
USERS: Final = "starling.sysusers.conf"
PROGRAM: Final = "/opt/starling/bin/starling"
"""In the units; replaced by the command that is installed."""
HIDDEN: Final = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")
"""Folders that the units hide from the services."""
CONNECT_S: Final = 600
"""How long a replica looks for its controller: machines start in any order."""


@dataclass(frozen=True)
class Service:
    """What `starling deploy systemd` is asked for; see there."""

    role: str
    gpus: str
    controller: str
    number: int
    config: Path
    program: Path | None
    join: bool = False

    @property
    def has_instances(self) -> bool:
        """Whether the role has one unit for several replicas of a machine."""
        return self.role in INSTANCES

    @property
    def command(self) -> str:
        """The `starling` command that the unit starts."""
        return str(self.program or Path(sys.prefix) / "bin/starling")

    @property
    def folder(self) -> str:
        """Folder of the service's files."""
        return "/var/lib/starling-reward" if self.role == "reward" else "/var/lib/starling"


def unit_text(name: str) -> str:
    """Return the text of a file of this package."""
    return resources.files("starling.cli.deploy").joinpath("units", name).read_text()


def install(service: Service, root: Path, *, dry_run: bool = False) -> str:
    """Write the files below `root`, unless it is a dry run. Returns what was done, or would be, and what to do next.

    A file that is there already with the same text stays. Raises ConfigError for what cannot be installed.
    """
    _check(service)
    number = _number_of(service, root)
    name = f"{service.role}-{number}"
    instance = name if service.has_instances else service.role
    unit = f"starling-{service.role}" + ("@" if service.has_instances else "") + ".service"
    text = unit_text(unit).replace(PROGRAM, service.command)
    files = {
        f"etc/systemd/system/{unit}": text.replace("--name reward-0 ", f"--name {name} "),
        **{f"etc/systemd/system/{name}": unit_text(name) for name in COMMON},
        "etc/sysusers.d/starling.conf": unit_text(USERS),
    }
    drop_in = f"etc/systemd/system/{unit.replace('@', f'@{number}')}.d/join.conf"
    if service.join:
        _check_joins(service, root / f"etc/starling/{instance}.env")
        files[drop_in] = _join_text(service, name)
    elif (root / drop_in).exists():
        raise ConfigError(f"{instance} joins by its key; repeat --join, or remove {root / drop_in} and its .env file")
    lines = [_written(root / path, text, dry_run) for path, text in files.items()]
    lines.append(_written(root / f"etc/starling/{instance}.env", _environment(service), dry_run))
    return "\n".join([*lines, *_next(service, name, unit.replace("@", f"@{number}"), root)])


def _check(service: Service) -> None:
    if service.gpus and not service.has_instances:
        raise ConfigError(f"--gpus {service.gpus} is for a policy or a rollout; remove it for a {service.role}")
    if service.number >= 0 and service.role == "controller":
        raise ConfigError(f"--number {service.number} is for replicas; remove it for the controller")
    if service.gpus and not re.fullmatch(r"\d+(,\d+)*", service.gpus):
        raise ConfigError(f"--gpus {service.gpus} is no list of GPUs; give numbers with commas, such as 0,1")
    if service.controller and not re.fullmatch(r"tcp://[^\s:]+(:[^\s:]+)*:\d+", service.controller):
        raise ConfigError(f"--controller {service.controller} is not an address; write tcp://host:port")
    if service.has_instances and not service.controller:
        raise ConfigError(f"--controller is missing; a {service.role} needs its address, tcp://host:port")
    if service.join and service.role == "controller":
        raise ConfigError("--join is for replicas; remove it for the controller")
    if service.join and not service.controller:
        raise ConfigError("--controller is missing; --join needs the address to join at, tcp://host:port")
    if service.role == "controller" and service.controller:
        raise ConfigError(f"--controller {service.controller} is for the others; remove it for the controller")
    for path, flag in ((service.command, "--program"), (str(service.config), "--config")):
        if not path.startswith("/") or re.search(r"[\s%$\"'\\]", path):
            raise ConfigError(f"{flag} {path} cannot stand in a unit; give an absolute path without special characters")
        if path.startswith(HIDDEN):
            raise ConfigError(
                f"{flag} {path} is in a folder that the services do not see; install it elsewhere, such as in "
                "/opt/starling or /etc/starling"
            )


def _check_joins(service: Service, path: Path) -> None:
    """Raise ConfigError if the environment file is there, and does not say where to join: it is never overwritten."""
    if path.exists() and not any(line.startswith("CONTROLLER=") for line in path.read_text().splitlines()):
        raise ConfigError(
            f"{path} was made without --join: it has no line CONTROLLER={service.controller}, without which the unit "
            "cannot start; remove the file, and repeat the command"
        )


def _number_of(service: Service, root: Path) -> int:
    """Return the number of the instance with these GPUs, or of a new one; that of the reward service stays."""
    if service.number >= 0:
        return service.number
    if not service.has_instances:
        unit = root / f"etc/systemd/system/starling-{service.role}.service"
        installed = re.search(rf"--name {service.role}-(\d+) ", unit.read_text()) if unit.exists() else None
        return int(installed[1]) if installed else 0
    taken: dict[int, str] = {}
    for path in (root / "etc/starling").glob(f"{service.role}-*.env"):
        name = path.stem.rpartition("-")[2]
        if name.isascii() and name.isdecimal():
            taken[int(name)] = path.read_text()
    if service.gpus:
        for number, text in sorted(taken.items()):
            if f"CUDA_VISIBLE_DEVICES={service.gpus}" in text.splitlines():
                return number
    return next(number for number in range(len(taken) + 1) if number not in taken)


def _join_text(service: Service, name: str) -> str:
    """Return the drop-in by which the replica `name` starts with its key alone: the controller has the settings."""
    return (
        "# The settings come from the controller. The key is this instance's own, so its predecessor is gone.\n"
        "[Service]\n"
        "ExecStart=\n"
        f"ExecStart={service.command} join ${{CONTROLLER}} --role {service.role} --name {name} "
        f"--key {service.folder}/keys/{name}.json "
        f"--dir {service.folder}/{name} --replace --timeout {CONNECT_S} $FLAGS\n"
    )


def _environment(service: Service) -> str:
    """Return the environment file of an instance."""
    lines = ["# Settings of this instance as STARLING_SECTION__KEY=value, or as words of FLAGS."]
    if not service.join:
        lines.append(f"CONFIG={service.config}")
    flags = ""
    if service.has_instances:
        lines.append(f"CUDA_VISIBLE_DEVICES={service.gpus}")
    if service.has_instances or service.join:
        lines.append(f"CONTROLLER={service.controller}")
    elif service.controller:
        flags = f"--controller {service.controller}"
    lines.append(f"FLAGS={flags}")
    if service.role != "controller":
        lines.append(f"STARLING_NETWORK__CONNECT_S={CONNECT_S}")
    return "\n".join(lines) + "\n"


def _written(path: Path, text: str, dry_run: bool) -> str:
    """Write a file, and return what was done. An environment file that differs is left to the operator."""
    if dry_run:
        return f"# {path}\n{text}"
    if path.exists() and path.read_text() == text:
        return f"unchanged: {path}"
    if path.suffix == ".env" and path.exists():
        return f"kept as it is, since it was edited or made for something else: {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
        path.chmod(0o640 if path.suffix == ".env" else 0o644)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; run the command as root, or give another --root, or --dry-run"
        ) from None
    return f"written: {path}"


def _next(service: Service, name: str, unit: str, root: Path) -> list[str]:
    """Return what remains to be done. `name`: of the replica."""
    prefix = "" if root == Path("/") else "on the machine with this root, "
    lines = ["", f"Next, {prefix}as root:", "  systemd-sysusers && systemctl daemon-reload"]
    if service.role == "controller":
        lines.append("  starling prepare RECIPE.toml --dir /var/lib/starling --network.port 5555")
        lines.append("  chown -R starling: /var/lib/starling")
    elif service.controller:
        lines.append(
            f"  # copy keys/{name}.json of the controller's folder to {service.folder}/keys, for its owner only"
        )
    if not service.join and not (root / str(service.config).lstrip("/")).exists():
        lines.append(f"  # put config.toml of the controller's folder at {service.config}")
    lines.append(f"  systemctl enable --now {shlex.quote(unit)} starling.target")
    return lines
