"""The command line of every service, and what follows from it."""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from pydantic import BaseModel

from starling.common.errors import ConfigError
from starling.common.ids import Role
from starling.common.net.curve import KeyFile, load_key
from starling.common.net.limits import role_of
from starling.common.net.settings import LinkSettings
from starling.common.observe.process import STOP_S, StopRequested, StopSignal, run_service, without_collection
from starling.common.settings import ServiceSettings, iter_settings, load

log = structlog.get_logger(__name__)
S = TypeVar("S", bound=ServiceSettings)

SECTIONS = (
    "run",
    "launch",
    "network",
    "model",
    "weights",
    "data",
    "sft",
    "preference",
    "rl",
    "sampling",
    "evaluation",
    "controller",
    "logging",
    "policy",
    "rollout",
    "reward",
    "teacher",
)
"""The sections of a recipe. A service reads its own and leaves the others alone."""

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""What the weights of a Hugging Face model folder are called."""


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
        """Return this service's keys, or None when the run does without. Raises ConfigError."""
        if not curve:
            return None
        path = self.key or self.folder / "keys" / f"{self.name}.json"
        key = load_key(path)
        if key.name != self.name:
            raise ConfigError(
                f"the key file {path} was made for {key.name}, and this is {self.name}; give --key or --name to match"
            )
        return key


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
    if role != "controller" and role_of(known.name) != role:
        raise ConfigError(f"--name {known.name} is no name of a {role}; write {role}-NUMBER, for example {role}-0")
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


def check_model_folder(path: str, *, weights: bool, key: str = "model.path", may_draw: bool = True) -> Path:
    """Return the folder of the model at `path`, which the setting `key` names.

    Raises ConfigError unless it is one, with weights where `weights`; `may_draw`: a policy could draw them instead.

    Asked before torch and transformers are imported, which takes seconds that a wrong path must not cost.
    """
    remedy = "give the path of a Hugging Face model folder"
    if not path:
        raise ConfigError(f"{key} is missing; {remedy}")
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"the model folder {path} does not exist; {remedy}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"the model folder {path} has no config.json; {remedy}")
    if weights and not any(True for pattern in WEIGHT_FILES for _ in folder.glob(pattern)):
        other = (
            ', or set policy.init = "random" to begin with random weights' if key == "model.path" and may_draw else ""
        )
        raise ConfigError(f"the model folder {path} has a config.json and no weights; add model.safetensors{other}")
    return folder


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def help_of(schema: type[BaseModel]) -> str:
    """Return the settings below `schema`, one paragraph each."""
    lines = ["settings (in TOML, as STARLING_SECTION__KEY in the environment, or as flags):"]
    for key, kind, default, text in iter_settings(schema):
        section, of_a_list, name = key.rpartition("[].")
        flag = f"[[{section}]] {name}" if of_a_list else f"--{key.replace('_', '-')}"
        lines.append(f"  {flag} {kind} ({default if default == 'required' else f'default {default}'})")
        lines += [f"      {line}".rstrip() for line in text.splitlines()]
    return "\n".join(lines)


def process_name(role: str, argv: Sequence[str]) -> str:
    """Return the name that a service's command line gives it, before that is parsed."""
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "--name" and value:
            return value
    return f"{role}-0"


class Shell(Protocol):
    """The hands of a service: what is left of it when its settings are known."""

    def run(self, stop: StopSignal) -> None:
        """Serve until the run is over, or `stop` is set."""


def serve(
    role: Role,
    schema: type[S],
    make_shell: Callable[[S, ServiceArguments], Shell],
    argv: Sequence[str] | None = None,
) -> int:
    """Be the service `role`: read the command line and the settings, then run. Returns the exit code.

    A replica that is told to stop before it is ready, which may take minutes, leaves at once.
    """
    stop = StopSignal(None if role == "controller" else STOP_S)
    given = sys.argv[1:] if argv is None else argv

    def body() -> None:
        arguments = parse_arguments(role, given, schema)
        settings = load(schema, arguments.configs, arguments.flags, others=SECTIONS)
        stop.install()
        try:
            with without_collection(), nullcontext() if role == "controller" else stop.interruptible():
                shell = make_shell(settings, arguments)
        except StopRequested:
            log.info("stopped_before_ready", signal=stop.name)
            return
        shell.run(stop)

    return run_service(role if role == "controller" else process_name(role, given), body)
