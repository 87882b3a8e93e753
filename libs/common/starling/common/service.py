"""Command line and life of a service's process."""

from __future__ import annotations

import argparse
import faulthandler
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn, Protocol, TypeVar

import structlog
from pydantic import BaseModel

from starling.common.errors import ConfigError, StarlingError
from starling.common.folder_digests import check_digests
from starling.common.ids import Role
from starling.common.model_folder import check_indexes, check_links, check_named_files, leave_hub
from starling.common.net.curve import KeyFile, load_key
from starling.common.net.limits import role_of
from starling.common.net.settings import LinkSettings
from starling.common.observe.log import configure as configure_log
from starling.common.observe.notify import NOTIFY_VARIABLES, NotifySocket
from starling.common.observe.process import (
    STOP_S,
    ServiceStopped,
    StopSignal,
    disk_fault,
    run_service,
    without_collection,
)
from starling.common.settings import (
    ObserveSettings,
    ServiceSettings,
    Tree,
    iter_settings,
    load,
    nearest,
    take_variables,
)

if TYPE_CHECKING:
    from starling.common.observe.metrics import Family

log = structlog.get_logger(__name__)
S = TypeVar("S", bound=ServiceSettings)

SECTIONS = (
    "run",
    "launch",
    "network",
    "observe",
    "model",
    "diffusion",
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
"""Sections of a recipe. A service reads its own and ignores the others."""

OWN_FLAGS = ("--help", "--config", "--dir", "--key", "--name", "--controller")
"""Flags of every service that are not settings."""
COMMANDS: Final = {
    "reward": "\n\n`starling reward bench` measures a running service, and `starling reward replay FILE` scores a "
    "quarantined\ncompletion again; each has a --help of its own."
}
"""What help says of the commands of a service."""
NODE_FLAGS: Final[dict[str, tuple[str, ...]]] = {
    "policy": ("--nnodes", "--node-rank", "--rdzv", "--ranks-per-node"),
    "rollout": ("--nnodes", "--node-rank", "--rdzv"),
}
"""Further ones of services that may have several nodes."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""Names of the weight files of a Hugging Face model folder."""


@dataclass(frozen=True)
class NodeArguments:
    """Which of the nodes of a replica this process is: node 0 speaks with the controller, the others follow it."""

    number: int
    num_nodes: int
    """At least 2."""
    host: str
    """Of node 0, where the others join it."""
    port: int
    num_ranks: int
    """Ranks on this node; 0 for an equal share."""


@dataclass(frozen=True)
class ServiceArguments:
    """Command line of a service."""

    name: str
    configs: tuple[Path, ...]
    folder: Path
    """The run's files: keys/, and the files that the service writes."""
    controller: str
    key: Path | None
    flags: tuple[str, ...]
    nodes: NodeArguments | None = None
    """Of a replica on several nodes."""

    def key_file(self, curve: bool) -> KeyFile | None:
        """Return this service's keys, or None for a run without CURVE. Raises ConfigError."""
        if not curve:
            return None
        path = self.key or self.folder / "keys" / f"{self.name}.json"
        key = load_key(path)
        if key.name != self.name:
            raise ConfigError(
                f"the key file {path} was made for {key.name}, not for {self.name}; give --key or --name to match"
            )
        return key


def parse_arguments(role: str, argv: Sequence[str], schema: type[BaseModel]) -> ServiceArguments:
    """Parse the command line of a service; settings are left in `flags`. Raises ConfigError, or exits for --help."""
    parser = _parser(role, schema if {"-h", "--help"} & set(argv) else None)
    try:
        known, flags = parser.parse_known_args(list(argv))
    except ConfigError:
        _check_flags(role, argv, schema)  # a misspelt flag explains why another one is missing
        raise
    _check_flags(role, flags, schema)
    if role != "controller" and role_of(known.name) != role:
        raise ConfigError(f"--name {known.name} is not the name of a {role}; write {role}-NUMBER, such as {role}-0")
    return ServiceArguments(
        name=role if role == "controller" else known.name,
        configs=tuple(known.config),
        folder=known.dir,
        controller="" if role == "controller" else known.controller,
        key=known.key,
        flags=tuple(flags),
        nodes=_read_nodes(known) if role in NODE_FLAGS else None,
    )


def _read_nodes(known: argparse.Namespace) -> NodeArguments | None:
    """Return which node a replica is; None for the only one. Raises ConfigError."""
    if known.nnodes is None and (known.rdzv or known.node_rank >= 0 or getattr(known, "ranks_per_node", 0)):
        raise ConfigError("--nnodes is missing; give the number of nodes, or leave the other flags of nodes out")
    num_nodes = 1 if known.nnodes is None else known.nnodes
    number, most = known.node_rank, num_nodes - 1
    if num_nodes < 1:
        raise ConfigError(f"--nnodes {num_nodes} is no number of nodes; give at least 1")
    if getattr(known, "ranks_per_node", 0) < 0:
        raise ConfigError(f"--ranks-per-node {known.ranks_per_node} is no number of ranks; give at least 1")
    if not (0 <= number <= most or (number < 0 and num_nodes == 1)):
        given = f"--node-rank {number} is not one of them" if number >= 0 else "--node-rank is missing"
        raise ConfigError(f"--nnodes {num_nodes} has the nodes 0 to {most}, and {given}; give each node its own")
    if num_nodes == 1:
        return None
    host, _, port = known.rdzv.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        given = f"--rdzv {known.rdzv} is no address" if known.rdzv else "--rdzv is missing"
        raise ConfigError(f"{given}; give each node the address at which node 0 listens, host:port")
    return NodeArguments(number, num_nodes, host, int(port), getattr(known, "ranks_per_node", 0))


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(role: str, schema: type[BaseModel] | None) -> argparse.ArgumentParser:
    """Return the parser of a service's own flags; its help lists the settings of `schema`.

    argparse, not the library of the `starling` command: that would make every start of a process slower.
    """
    example = f"starling-{role} --config recipe.toml --dir runs/mine"
    example += "" if role == "controller" else f" --name {role}-0 --controller tcp://10.0.0.1:5555"
    parser = _ArgumentParser(
        prog=f"starling {role}",
        usage=f"starling {role} [OPTIONS] [--SECTION.KEY VALUE ...]",
        description=f"Run the {role} service.{COMMANDS.get(role, '')}",
        epilog="" if schema is None else f"{settings_help(schema)}\n\nexample:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    files = parser.add_argument_group("files")
    files.add_argument("--config", action="append", type=Path, default=[], metavar="FILE", help="TOML file; may repeat")
    files.add_argument(
        "--dir", type=Path, default=Path("."), help="the run's folder (keys/, logs, results); default: ."
    )
    files.add_argument("--key", type=Path, metavar="FILE", help="key file; default: <dir>/keys/<name>.json")
    if role != "controller":
        connection = parser.add_argument_group("connection")
        connection.add_argument("--name", default=f"{role}-0", help=f"name of this replica; default: {role}-0")
        may_lack, text = role == "reward", "tcp://host:port"
        text = f"{text}; none: serve HTTP only" if may_lack else f"required: {text}"
        connection.add_argument("--controller", required=not may_lack, default="", metavar="ADDRESS", help=text)
    if role in NODE_FLAGS:
        _add_nodes(parser, role)
    return parser


def _add_nodes(parser: argparse.ArgumentParser, role: str) -> None:
    """Add the flags of the nodes of a replica that may have several."""
    parts = "ranks are" if role == "policy" else "vLLM workers are"
    nodes = parser.add_argument_group(f"nodes, for a {role} whose {parts} on several hosts")
    nodes.add_argument("--nnodes", type=int, default=None, metavar="N", help="number of nodes; default: 1")
    nodes.add_argument("--node-rank", type=int, default=-1, metavar="I", help="which one this is, from 0")
    nodes.add_argument("--rdzv", default="", metavar="HOST:PORT", help="where node 0 listens for the others")
    if role == "policy":
        nodes.add_argument(
            "--ranks-per-node", type=int, default=0, metavar="N", help="ranks on this node; default: an equal share"
        )


def _check_flags(role: str, flags: Sequence[str], schema: type[BaseModel]) -> None:
    """Raise ConfigError for a flag that is neither the service's nor a setting, and like one of the service's."""
    own = (*OWN_FLAGS, *NODE_FLAGS.get(role, ()))
    for flag in (flag.partition("=")[0] for flag in flags if flag.startswith("--")):
        if flag in own or "." in flag:
            continue
        like = nearest(flag, own, cutoff=0.75)
        names = {setting.key.rpartition(".")[2] for setting in iter_settings(schema)}
        if like is not None and flag[2:].replace("-", "_") not in names:
            raise ConfigError(f"unknown flag {flag}; did you mean {like}?")


def link_settings(arguments: ServiceArguments, settings: ServiceSettings) -> LinkSettings:
    """Return how a replica reaches its controller. Raises ConfigError."""
    if not arguments.controller.startswith("tcp://"):
        raise ConfigError(f"--controller {arguments.controller} is not an address; write tcp://host:port")
    return LinkSettings(
        name=arguments.name,
        run=settings.run.id,
        controller=arguments.controller,
        key=arguments.key_file(settings.network.curve),
        connect_s=settings.network.connect_s,
        silence_s=settings.network.silence_s,
    )


def check_model_folder(
    path: str,
    *,
    weights: bool,
    key: str = "model.path",
    may_draw: bool = True,
    reads_weights: bool = True,
    runs_code: bool = False,
) -> Path:
    """Return the model folder at `path`, the value of the setting `key`.

    Called before the import of torch and transformers, which takes seconds that a wrong path must not cost.

    Args:
        path: a Hugging Face model folder.
        weights: whether it must hold weights.
        key: named in errors.
        may_draw: whether a policy could initialise the weights at random instead.
        reads_weights: whether this process is about to read the weights. Where the folder has digests, those of other
            files are compared in any case, and those of the weights only then.
        runs_code: whether custom code in the folder is run (`model.trust_remote_code`).

    Raises:
        ConfigError: it is not a model folder, has no weights, a file differs from its digest, or it names other
            files, models or kernels to load, or has links to other files.
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
    check_digests(folder, leave_out=() if weights and reads_weights else WEIGHT_FILES)
    check_links(folder)
    check_named_files(folder, runs_code=runs_code)
    if weights:
        check_indexes(folder)
    return folder


def host_name() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def settings_help(schema: type[BaseModel]) -> str:
    """Return the settings below `schema` by section, one paragraph each."""
    lines, last = ["settings (in TOML, as STARLING_SECTION__KEY in the environment, or as flags):"], ""
    for setting in iter_settings(schema):
        section, of_a_list, name = setting.key.rpartition("[].")
        if (top := setting.key.partition(".")[0]) != last:
            last = top
            lines += ["", f"[{top}]"]
        flag = f"[[{section}]] {name}" if of_a_list else f"--{setting.key.replace('_', '-')}"
        default = "required" if setting.default == "required" else f"default {setting.default}"
        lines.append(f"  {flag} {setting.type} ({default})")
        lines += [f"      {line}".rstrip() for line in setting.text.splitlines()]
    return "\n".join(lines)


def process_name(role: str, argv: Sequence[str]) -> str:
    """Return the name in a service's command line, before that is parsed, with the number of a node but the first."""
    found: dict[str, str] = {}
    for flag, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        found.setdefault(name, value if equals else following)
    node = found.get("--node-rank", "") if role in NODE_FLAGS else ""
    return (found.get("--name") or f"{role}-0") + (f".node-{node}" if node.isdecimal() and int(node) else "")


class Shell(Protocol):
    """The part of a service that acts; created once the settings are known."""

    def run(self, stop: StopSignal, notify: NotifySocket) -> None:
        """Serve until the run ends or `stop` is set; tell the service manager by `notify` how it goes."""


def serve(
    role: Role,
    schema: type[S],
    make_shell: Callable[[S, ServiceArguments], Shell],
    argv: Sequence[str] | None = None,
    *,
    translate: Callable[[Tree, str], Tree] | None = None,
    families: Callable[[], Sequence[Family]] = tuple,
) -> int:
    """Run the service `role`: read the command line and the settings, then serve. Returns the exit code.

    A replica that receives a stop signal before it is ready, which may take minutes, exits at once. `translate` makes
    settings of a file of another form, see `load`; `families` returns the metrics of the service.
    """
    if role in ("policy", "rollout", "teacher"):
        leave_hub()
    notify = NotifySocket.from_variables(take_variables(NOTIFY_VARIABLES))  # before any process is started
    if notify.has_watchdog:
        faulthandler.enable()  # it ends a process by SIGABRT: the stacks say where that hung
    stop = StopSignal(None if role == "controller" else STOP_S)
    given = sys.argv[1:] if argv is None else argv
    name = role if role == "controller" else process_name(role, given)

    def body() -> None:
        arguments = parse_arguments(role, given, schema)
        settings = load(schema, arguments.configs, arguments.flags, others=SECTIONS, translate=translate)
        configure_log(name, settings.run.log_format)
        stop.install()
        page = _endpoint(settings.observe, name, families, notify) if settings.observe.http else nullcontext()
        with _reporting_disk_faults(arguments, settings), page:
            try:
                with without_collection(), nullcontext() if role == "controller" else stop.interruptible():
                    shell = make_shell(settings, arguments)
            except ServiceStopped:
                log.info("stopped_before_ready", signal=stop.name)
                return
            shell.run(stop, notify)

    return run_service(name, body)


@contextmanager
def _reporting_disk_faults(arguments: ServiceArguments, settings: ServiceSettings) -> Iterator[None]:
    """Tell the controller of a fault of a disk that ends this replica in the block."""
    try:
        yield
    except (StarlingError, OSError) as error:
        fault = disk_fault(error)
        if fault and arguments.controller:
            # Imported here: few processes ever need it.
            from starling.common.net.faults import report_fault

            with suppress(ConfigError):  # the last line of this process is about its disk
                report_fault(link_settings(arguments, settings), fault)
        raise


@contextmanager
def _endpoint(
    settings: ObserveSettings, name: str, families: Callable[[], Sequence[Family]], notify: NotifySocket
) -> Iterator[None]:
    """Answer over HTTP in this block what is said to `notify`. Raises ConfigError."""
    # Imported here: a service without an endpoint does not load it.
    from starling.common.observe.endpoint import open_endpoint
    from starling.common.observe.page import StatusPage

    notify.page = StatusPage(settings.stalled_s)
    endpoint = open_endpoint(settings, name, notify.page, families())
    try:
        yield
    finally:
        endpoint.close()
