"""What the nodes of a replica must have in common: settings, versions, and the model's files."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.common.settings import ServiceSettings

MARKER: Final = ".{name}.nodes"
"""File in the run's folder by which the other nodes show that they see the same folder."""
OF_ONE_NODE: Final = ("network.host", "model.path")
"""Settings that each node has of its own."""


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What all nodes of a replica must have in common, and what they are told apart by."""

    node: int
    num_nodes: int
    num_ranks: int
    host: str
    settings: dict[str, str]
    """Digests by key."""
    model: str
    """Path of the model's folder."""
    model_digest: str
    folder: str
    """Path of the run's folder; empty where the nodes need not have one in common."""
    marker: str
    """Content of the marker in it; empty where there is none."""

    def differs(self, first: NodeFacts) -> str:
        """Return in one sentence why this node does not fit to node 0, whose facts are `first`; empty if it does."""
        name = f"node {self.node} ({self.host})"
        if self.num_nodes != first.num_nodes:
            return f"--nnodes {self.num_nodes} of {name} is not the --nnodes {first.num_nodes} of node 0"
        keys = [key for key, value in {**first.settings, **self.settings}.items() if first.settings.get(key) != value]
        keys += [key for key in first.settings if key not in self.settings]
        if keys:
            return f"{keys[0]} of {name} is not that of node 0; start all nodes with the same recipe and flags"
        if self.model_digest != first.model_digest:
            return f"the model folder {self.model} of {name} has other files than {first.model} of node 0"
        if self.folder != first.folder or self.marker != first.marker:
            return (
                f"{name} has --dir {self.folder} and does not see the folder {first.folder} of node 0, in which all "
                "ranks write; give all nodes one folder of a shared file system, under the same path"
            )
        return ""


def digests_of(settings: ServiceSettings, packages: Sequence[str], more: Mapping[str, Any]) -> dict[str, str]:
    """Return `NodeFacts.settings`: digests of all settings but a node's own, of versions, and of `more` values.

    Args:
        settings: of the service.
        packages: those whose versions have to be the same.
        more: further values, by what an error names them.
    """
    values = {key: value for key, value in _leaves(settings.model_dump(mode="json")) if key not in OF_ONE_NODE}
    values |= {f"the version of {name}": version_of(name) for name in packages}
    values |= more
    return {key: xxhash.xxh3_64_hexdigest(json.dumps(value).encode()) for key, value in values.items()}


def mark(folder: Path, name: str, token: str) -> None:
    """Mark the run's folder, before agents are admitted. Raises ConfigError."""
    path = folder / MARKER.format(name=name)
    try:
        write_whole(path, token)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); check --dir") from error


def read_mark(folder: Path, name: str) -> str:
    """Return the content of the marker in the run's folder; empty where there is none."""
    try:
        return (folder / MARKER.format(name=name)).read_text()[:64]
    except (OSError, UnicodeDecodeError):
        return ""


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all values of nested settings, by key."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def version_of(package: str) -> str:
    """Return the installed version of a package; empty for one that is run from a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
