"""Preparation of a replica that joins a run: choose a key, obtain the settings, write them, find the model."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import tomli_w

from starling.cli.run.environment import COMMON
from starling.cli.run.gpus import VISIBLE, visible_gpus
from starling.cli.services import SERVICES, is_installed, missing
from starling.common.counts import counted
from starling.common.errors import ConfigError, RefusedError
from starling.common.files import write_whole
from starling.common.net.curve import KeyFile, load_key
from starling.common.net.limits import role_of
from starling.common.net.role_settings import request_settings
from starling.common.ranges import MAX_SECONDS
from starling.common.settings import (
    Tree,
    child_environment,
    complete_toml,
    environment_variable,
    parse_value,
    read_toml,
)
from starling.common.wire.messages import RoleSettings

MODEL: Final = "model"
"""Folder of the model's small files, in the folder of the replica."""
_SETTING: Final = re.compile(r"[A-Za-z][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)+=.*", re.DOTALL)
_ADDRESS: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(\d{1,5})")
_MAX_GPUS: Final = 1024


@dataclass(frozen=True)
class JoinRequest:
    """Command line of `starling join`; see there."""

    controller: str
    role: str
    key: Path | None = None
    name: str = ""
    num_gpus: int = 0
    host: str = ""
    settings: tuple[str, ...] = ()
    configs: tuple[Path, ...] = ()
    folder: Path | None = None
    replaces: bool = False
    timeout_s: float = 60.0


@dataclass(frozen=True)
class Joining:
    """The service to start: its module and arguments, its environment, and what to say before."""

    command: tuple[str, ...]
    environment: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Identity:
    """Name of the replica, and its key; None without CURVE."""

    name: str
    path: Path | None = None
    key: KeyFile | None = None


@dataclass
class _Found:
    """What the controller sent to the name that it is to have."""

    identity: _Identity
    settings: RoleSettings
    notes: list[str] = field(default_factory=list)


def prepare(request: JoinRequest) -> Joining:
    """Obtain the settings of the run and write them. Returns how to start the service.

    Raises:
        ConfigError: a flag, the key or a setting is wrong, or something is missing on this machine.
        RefusedError: the controller refuses the key, or the name is taken.
        UnreachableError: there is no controller at the address.
    """
    _check(request)
    deadline = time.monotonic() + request.timeout_s
    found = _find_name(request, deadline)
    name = found.identity.name
    folder = (request.folder or Path("joined") / name).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tree = _resolved(request, found, folder, deadline)
        config = folder / "config.toml"
        write_whole(config, complete_toml(tomli_w.dumps(tree)), private=True)
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} cannot be written: {error.strerror}; free some space, or give another one: --dir"
        ) from None
    settings = found.settings
    notes = [f"{name} joins the run {settings.sections['run']['id']} at {request.controller}; its files: {folder}"]
    if settings.withheld:
        keys = ", ".join(settings.withheld)
        notes.append(f"the controller keeps {keys} to itself: if this replica needs it, give it with --set or --config")
    arguments = ["--config", str(config), *(word for path in request.configs for word in ("--config", str(path)))]
    arguments += ["--dir", str(folder), "--name", name, "--controller", request.controller]
    if found.identity.path is not None:
        arguments += ["--key", str(found.identity.path)]
    flags, environment = _devices(request, tree)
    arguments += [f"--{one.partition('=')[0].replace('_', '-')}={one.partition('=')[2]}" for one in request.settings]
    return Joining((SERVICES[request.role], *arguments, *flags), environment, tuple(notes + found.notes))


def _check(request: JoinRequest) -> None:
    """Raise ConfigError for a command line that no controller needs to be asked about."""
    part = SERVICES[request.role].split(".")[1]
    if not is_installed(part):
        raise ConfigError(missing(request.role, part))
    match = _ADDRESS.fullmatch(request.controller)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise ConfigError(f"{request.controller!r} is not the address of a controller; write tcp://HOST:PORT")
    if not 0 < request.timeout_s <= MAX_SECONDS:
        raise ConfigError(f"--timeout {request.timeout_s:g} is not a number of seconds; give one above 0")
    if not 0 <= request.num_gpus <= _MAX_GPUS:
        raise ConfigError(f"--gpus {request.num_gpus} is no number of GPUs; give 0 for all, or how many")
    for one in request.settings:
        if not _SETTING.fullmatch(one):
            raise ConfigError(f"--set {one} is no setting; write --set SECTION.KEY=VALUE")
    if request.name and role_of(request.name) != request.role:
        raise ConfigError(
            f"--name {request.name} is not the name of a {request.role}; write {request.role}-NUMBER, such as "
            f"{request.role}-8"
        )


def _find_name(request: JoinRequest, deadline: float) -> _Found:
    """Ask the controller with each key in turn, until the name of one is free."""
    identities = _identities(request)
    taken: list[str] = []
    for identity in identities:
        if len(identities) > 1 and not _lock(identity):
            taken.append(identity.name)
            continue
        left_s = max(deadline - time.monotonic(), 1.0)
        settings, _ = request_settings(request.controller, identity.key, identity.name, timeout_s=left_s)
        if not settings.connected or request.replaces:
            return _Found(identity, settings)
        taken.append(identity.name)
    names = ", ".join(taken)
    raise RefusedError(
        f"{names} {'is' if len(taken) == 1 else 'are'} connected to this run already; make a key of another name where "
        f"the run is (starling keys make FOLDER {request.role}-NUMBER), or take its place with --replace"
    )


def _identities(request: JoinRequest) -> list[_Identity]:
    """Return the names that this process may take, with their keys. Raises ConfigError if there is none."""
    if request.key is None:
        return [_Identity(request.name or f"{request.role}-0")]
    if request.key.is_dir():
        paths = [path for path in request.key.glob(f"{request.role}-*.json") if role_of(path.stem) == request.role]
        paths.sort(key=lambda path: (len(path.stem), path.stem))
        identities = [_identity(request, path) for path in paths if request.name in ("", path.stem)]
        if not identities:
            raise ConfigError(
                f"{request.key} has no key of {request.name or f'a {request.role}'}; make one where the run is: "
                f"starling keys make FOLDER {request.name or f'{request.role}-8'}"
            )
        return identities
    return [_identity(request, request.key)]


def _identity(request: JoinRequest, path: Path) -> _Identity:
    key = load_key(path)
    if role_of(key.name) != request.role:
        raise ConfigError(f"the key {path} was made for {key.name}, which is no {request.role}; give --role to match")
    if request.name and key.name != request.name:
        raise ConfigError(
            f"the key {path} was made for {key.name}, not for {request.name}; give the right key, or leave --name out"
        )
    return _Identity(key.name, path.absolute(), key)


def _lock(identity: _Identity) -> bool:
    """Lock one of several keys for the life of this process; two that start at once then take different names."""
    assert identity.path is not None, "several names come from a folder of keys"
    descriptor = os.open(identity.path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, True)  # it stays open in the service
    return True


def _resolved(request: JoinRequest, found: _Found, folder: Path, deadline: float) -> Tree:
    """Return the settings of this replica: those of the run, with the address and the model folder of this machine."""
    tree = {name: dict(section) for name, section in found.settings.sections.items()}
    tree.setdefault("network", {})["host"] = request.host or _own_address(request.controller)
    if request.role == "reward" or _is_given(request, "model.path"):
        return tree
    own = _given(request)
    load_weights = _value(own, tree, "rollout.load_weights") is True
    is_rollout = request.role == "rollout" and not load_weights and "lora" not in tree.get("model", {})
    for key in ("model.path", *(["teacher.path"] if request.role == "teacher" else [])):
        path = _value(own, tree, key)
        if isinstance(path, str) and path and not (Path(path) / "config.json").is_file():
            if not (is_rollout and key == "model.path"):
                raise ConfigError(
                    f"the model folder {path} of the run is not on this machine, and a {request.role} of this run "
                    f"reads weights from it; copy it here, and give its path with --set {key}=FOLDER"
                )
            tree["model"]["path"] = str(_fetch_model(request, found, folder, deadline))
    return tree


def _fetch_model(request: JoinRequest, found: _Found, folder: Path, deadline: float) -> Path:
    """Obtain the model's configuration and tokenizer from the controller; the weights come from the policy."""
    path = found.settings.sections["model"]["path"]
    if found.settings.sections["model"].get("trust_remote_code"):
        raise ConfigError(
            f"the model folder {path} of the run is not on this machine, and its code (model.trust_remote_code) is not "
            "sent; copy the folder here, and give its path with --set model.path=FOLDER"
        )
    identity, left_s = found.identity, max(deadline - time.monotonic(), 10.0)
    answer, files = request_settings(request.controller, identity.key, identity.name, with_model=True, timeout_s=left_s)
    if answer.problem or "config.json" not in files:
        raise ConfigError(
            f"the model folder {path} of the run is not on this machine, and the controller cannot send its small "
            f"files ({answer.problem or 'it sent no config.json'}); copy it here, and give its path with --set "
            "model.path=FOLDER"
        )
    model = folder / MODEL
    model.mkdir(exist_ok=True)
    for name, data in files.items():
        write_whole(model / name, data)
    size_kib = sum(map(len, files.values())) >> 10
    found.notes.append(f"{model} has {counted(len(files), 'file')} of the model, {size_kib} KiB; weights are pulled")
    return model


def _given(request: JoinRequest) -> Tree:
    """Return the settings that were given for this replica, by their full keys."""
    given: Tree = {}
    for path in request.configs:
        given |= _leaves(read_toml(path))
    for one in request.settings:
        key, _, text = one.partition("=")
        given[key.replace("-", "_")] = parse_value(text)
    return given


def _leaves(tree: Tree, prefix: str = "") -> Tree:
    found: Tree = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _is_given(request: JoinRequest, key: str) -> bool:
    """Return whether a setting comes from this machine: by flag, file or environment."""
    variable = "STARLING_" + key.upper().replace(".", "__")
    return key in _given(request) or environment_variable(variable) is not None


def _value(own: Tree, tree: Tree, key: str) -> Any:
    """Return a setting as given here, else as the run has it; None if neither says so."""
    section, _, name = key.partition(".")
    return own.get(key, tree.get(section, {}).get(name))


def _own_address(controller: str) -> str:
    """Return the address of this machine from which it reaches the controller; no packet is sent for it."""
    match = _ADDRESS.fullmatch(controller)
    assert match is not None, "the address was checked"
    try:
        family, kind, _, _, address = socket.getaddrinfo(match[1].strip("[]"), int(match[2]), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"{controller} cannot be reached from here: {error.strerror}; give --host ADDRESS") from None


def _devices(request: JoinRequest, tree: Tree) -> tuple[list[str], dict[str, str]]:
    """Return the flags and the environment by which a replica has its GPUs."""
    extra = {name: value for name, value in COMMON.items() if environment_variable(name) is None}
    if not request.num_gpus:
        return [], child_environment(**extra)
    present = visible_gpus()
    if len(present) < request.num_gpus:
        raise ConfigError(
            f"--gpus {request.num_gpus} is more than the {counted(len(present), 'GPU')} visible here; give at most "
            f"{len(present)}" + ("" if present else ", or leave it out")
        )
    extra[VISIBLE] = ",".join(present[: request.num_gpus])
    own = _given(request)
    size, stages = "rollout.vllm.tensor_parallel_size", "rollout.vllm.pipeline_parallel_size"
    engine = _value(own, tree, "rollout.engine")
    if request.role != "rollout" or engine != "vllm" or size in own or stages in own:
        return [], child_environment(**extra)
    num_stages = tree.get("rollout", {}).get("vllm", {}).get("pipeline_parallel_size", 1)
    if not isinstance(num_stages, int) or num_stages < 1 or request.num_gpus % num_stages:
        raise ConfigError(
            f"--gpus {request.num_gpus} cannot be shared by the {json.dumps(num_stages)} stages of "
            f"rollout.vllm.pipeline_parallel_size; give a multiple, or --set {stages}=1"
        )
    workers = request.num_gpus // num_stages
    return [f"--rollout.vllm.tensor-parallel-size={workers}"], child_environment(**extra)
