"""Model folders elsewhere than on this machine, such as in S3: fetched into a temporary folder while they are loaded.

Only a policy reads weights. The configuration and the tokenizer that all replicas read come from `model.path`, so the
fetched folder has to have the same configuration.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.folder_digests import DIGESTS, check_digests
from starling.policy.train.checkpoint.storage import Storage

log = structlog.get_logger(__name__)

CONFIG: Final = "config.json"
_WEIGHTS: Final = (".safetensors", ".bin")
"""Endings of files of weights, in the order of preference."""
_OTHERS: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")


@contextmanager
def whole_model(path: Path, url: str, options: Mapping[str, Any], place: Path) -> Iterator[Path]:
    """Lend the folder from which a model is loaded: `path`, or a copy of the one at `url`, if that is not empty.

    Args:
        path: the model's folder on this machine, with its configuration.
        url: a folder, or ``protocol://...`` of fsspec, with the whole model.
        options: of fsspec.
        place: a name for the copy, which is removed at the end; what is there already is a leftover, and removed too.

    Raises:
        ConfigError: the folder cannot be read, has no weights, is of another model, or a file differs from its digest.
    """
    if not url:
        yield path
        return
    storage = Storage(url, options)
    names = _files_of(storage)
    _check_config(storage, path)
    _remove(place)
    try:
        with storage.explained("copied"):
            place.mkdir(parents=True)
        for name in names:
            _fetch(storage, name, place / name)
        check_digests(place, source=url)
        log.info("weights_fetched", source=storage.url(), num_files=len(names))
        yield place
    finally:
        _remove(place)


def _files_of(storage: Storage) -> list[str]:
    """Return the names of the files that a model is loaded from. Raises ConfigError if there are no weights."""
    names = storage.names()
    kind = next((kind for kind in _WEIGHTS if any(name.endswith(kind) for name in names)), None)
    if CONFIG not in names or kind is None:
        missing = CONFIG if CONFIG not in names else "weights"
        raise ConfigError(
            f"policy.weights_from = {storage.url()!r} has no {missing}; give the folder of a whole Hugging Face model"
        )
    listed = _with_digests(storage) if DIGESTS in names else set()
    return [name for name in names if name.endswith((kind, *_OTHERS)) or name in listed]


def _with_digests(storage: Storage) -> set[str]:
    """Return the names of the files that have digests; nothing if those are damaged, which `check_digests` reports."""
    try:
        return set(json.loads(storage.read(DIGESTS) or b""))
    except (ValueError, TypeError, RecursionError):
        return set()


def _check_config(storage: Storage, path: Path) -> None:
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
