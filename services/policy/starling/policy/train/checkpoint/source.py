"""Weights of a model elsewhere than on this machine, such as in S3: in a temporary folder while they are loaded.

Only a policy reads weights. Configuration, tokenizer and code are those of `model.path`, which all replicas read: to
write where the weights are is not to decide what the policy runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.folder_digests import DIGESTS, check_digests
from starling.policy.train.checkpoint.storage import Storage

log = structlog.get_logger(__name__)

CONFIG: Final = "config.json"
_WEIGHTS: Final = (".safetensors", ".bin")
"""Endings of files of weights, in the order of preference."""
_OTHERS: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
"""Endings of a configuration, a tokenizer and code."""
_INDEX: Final = ".index.json"
"""Ending, after that of the weights, of a file that says which tensor is in which file of weights."""


@contextmanager
def whole_model(path: Path, url: str, options: Mapping[str, Any], place: Path) -> Iterator[Path]:
    """Lend the folder from which a model is loaded: `path`, or one with the weights at `url`, if that is not empty.

    Args:
        path: the model's folder on this machine, with its configuration.
        url: a folder, or ``protocol://...`` of fsspec, with the whole model.
        options: of fsspec.
        place: a name for the folder, which is removed at the end; what is there already is a leftover, and removed too.

    Raises:
        ConfigError: the folder cannot be read, has no weights, is of another model, or a file differs from its digest.
    """
    if not url:
        yield path
        return
    storage = Storage(url, options)
    names, digests = _weights_of(storage)
    _check_config(storage, path)
    _remove(place)
    try:
        with storage.explained("copied"):
            place.mkdir(parents=True)
            for file in path.iterdir():
                if file.name.endswith(_OTHERS) and not file.name.endswith(_INDEX) and file.name != DIGESTS:
                    (place / file.name).symlink_to(file.absolute())
        for name in names:
            _fetch(storage, name, place / name)
        if digests is not None:
            (place / DIGESTS).write_bytes(digests)
        check_digests(place, source=url)
        log.info("weights_fetched", source=storage.url(), num_files=len(names))
        yield place
    finally:
        _remove(place)


def check_source(path: Path, url: str, options: Mapping[str, Any]) -> str:
    """Check, without reading weights, that `whole_model` of the same arguments would find them.

    Returns what is there, in words.

    Raises:
        ConfigError: the folder cannot be read, has no weights, or is of another model.
    """
    storage = Storage(url, options)
    names, digests = _weights_of(storage)
    _check_config(storage, path)
    proven = "with digests" if digests is not None else "without digests, so that damaged weights are not found"
    return f"{counted(len(names), 'file')} in {storage.url()}, {proven}"


def _weights_of(storage: Storage) -> tuple[list[str], bytes | None]:
    """Return the names of the files of weights, and the file of their digests, if there is one.

    Raises ConfigError if there are no weights.
    """
    names = storage.names()
    kind = next((kind for kind in _WEIGHTS if any(name.endswith(kind) for name in names)), None)
    if CONFIG not in names or kind is None:
        missing = CONFIG if CONFIG not in names else "weights"
        raise ConfigError(
            f"policy.weights_from = {storage.url()!r} has no {missing}; give the folder of a whole Hugging Face model"
        )
    endings = (kind, kind + _INDEX)
    digests = storage.read(DIGESTS) if DIGESTS in names else None
    return [name for name in names if name.endswith(endings)], digests and _only(digests, endings)


def _only(digests: bytes, endings: tuple[str, ...]) -> bytes:
    """Return the digests of the files of weights; damaged ones as they are, which `check_digests` reports."""
    try:
        listed = json.loads(digests).items()
        return json.dumps({name: digest for name, digest in listed if name.endswith(endings)}).encode()
    except (ValueError, AttributeError, RecursionError):
        return digests


def _check_config(storage: Storage, path: Path) -> None:
    """Refuse weights beside another configuration: they are of another model. Raises ConfigError."""
    with open_regular(path / CONFIG) as file:
        own = file.read()
    if storage.read(CONFIG) != own:
        raise ConfigError(
            f"{storage.url(CONFIG)} differs from {path / CONFIG}; policy.weights_from and model.path must be the same "
            "model: copy its configuration and tokenizer to model.path again"
        )


def _fetch(storage: Storage, name: str, target: Path) -> None:
    """Copy one file, and check that it is whole. Raises ConfigError."""
    with storage.explained("read", name):
        size = storage.fs.info(storage.path(name))["size"]
        storage.fs.get_file(storage.path(name), str(target))
    if target.stat().st_size != size:
        raise ConfigError(
            f"{storage.url(name)} has {size} bytes, and {target.stat().st_size} arrived; check the storage, and start "
            "again"
        )


def _remove(place: Path) -> None:
    if place.is_symlink() or place.is_file():
        raise ConfigError(f"{place} is in the way of the weights that are fetched; remove it")
    shutil.rmtree(place, ignore_errors=True)
