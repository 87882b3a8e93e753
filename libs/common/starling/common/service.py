"""The command line of every service, and what follows from it."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from starling.common.errors import ConfigError
from starling.common.net.curve import KeyFile, load_key
from starling.common.net.link import LinkSettings
from starling.common.settings import ServiceSettings, describe

SECTIONS = (
    "run",
    "launch",
    "network",
    "model",
    "data",
    "sft",
    "rl",
    "sampling",
    "evaluation",
    "controller",
    "policy",
    "rollout",
    "reward",
)
"""The sections of a recipe. A service reads its own and leaves the others alone."""


@dataclass(frozen=True)
class ServiceArguments:
    """What a service was started with."""

    name: str
    configs: tuple[Path, ...]
    folder: Path
    """Where the run's files are: keys/, and what the service writes."""
    controller: str
    key: Path | None
    flags: tuple[str, ...]

    def key_file(self, curve: bool) -> KeyFile | None:
        """Return this service's keys, or None when the run does without."""
        if not curve:
            return None
        return load_key(self.key or self.folder / "keys" / f"{self.name}.json")


def parse_arguments(role: str, argv: Sequence[str], schema: type[BaseModel]) -> ServiceArguments:
    """Parse the command line of a service; settings are left in `flags`. Raises ConfigError, or exits for --help."""
    parser = argparse.ArgumentParser(
        prog=f"starling {role}",
        description=f"Run the {role} service.",
        epilog=help_of(schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="append", type=Path, default=[], help="TOML file; several stack")
    parser.add_argument("--dir", type=Path, default=Path("."), help="the run's folder (keys/, logs, results)")
    parser.add_argument("--key", type=Path, help="key file; default: <dir>/keys/<name>.json")
    if role != "controller":
        parser.add_argument("--name", default=f"{role}-0", help="name of this replica")
        parser.add_argument("--controller", required=True, help="address of the controller, tcp://host:port")
    try:
        known, flags = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see starling {role} --help") from None
    return ServiceArguments(
        name=role if role == "controller" else known.name,
        configs=tuple(known.config),
        folder=known.dir,
        controller="" if role == "controller" else known.controller,
        key=known.key,
        flags=tuple(flags),
    )


def link_settings(arguments: ServiceArguments, settings: ServiceSettings) -> LinkSettings:
    """Return whom a replica calls."""
    if not arguments.controller.startswith("tcp://"):
        raise ConfigError(f"--controller {arguments.controller} is no address; write tcp://host:port")
    return LinkSettings(
        name=arguments.name,
        run=settings.run.id,
        controller=arguments.controller,
        key=arguments.key_file(settings.network.curve),
        connect_s=settings.network.connect_s,
        silence_s=settings.network.silence_s,
    )


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def help_of(schema: type[BaseModel]) -> str:
    """Return the settings below `schema`, one paragraph each."""
    lines = ["settings (in TOML, as STARLING_SECTION__KEY in the environment, or as flags):"]
    for key, kind, default, text in describe(schema):
        lines.append(f"  --{key.replace('_', '-')} {kind} (default {default})")
        lines += [f"      {line}" for line in text.splitlines()]
    return "\n".join(lines)


def process_name(role: str, argv: Sequence[str]) -> str:
    """Return the name that a service's command line gives it, before that is parsed."""
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "--name" and value:
            return value
    return f"{role}-0"
