"""Write a folder, such as a model in Hugging Face form, so that a crash never leaves half of one."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import SafetensorError

from starling.common.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Saveable(Protocol):
    """A tokenizer or processor: anything that writes itself into a folder."""

    def save_pretrained(self, save_directory: str) -> object:
        """Write the files of `self` into `save_directory`."""


def save_hf(model: PreTrainedModel, tokenizer: Saveable | None, folder: Path) -> None:
    """Write `model` and `tokenizer` into `folder`, all or nothing.

    Raises:
        ConfigError: as `whole_folder`.
    """
    with whole_folder(folder) as temporary:
        model.save_pretrained(str(temporary))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(temporary))


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Lend a folder to write into that becomes `folder` at the end, all or nothing.

    Everything goes into a folder beside it and reaches the disk before that takes the name `folder`. A checkpoint of
    that name stays whole until then and is replaced in one operation where the file system can exchange two names
    (Linux), else by two renames. What an earlier crash left beside `folder` is removed.

    Raises:
        ConfigError: the file system refuses: no space, no permission, or `folder` is a file.
    """
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"the checkpoint {folder} is a file: remove it or choose another folder")
        for leftover in folder.parent.glob(f".{folder.name}.saving-*"):
            shutil.rmtree(leftover)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.saving-", dir=folder.parent))
        try:
            temporary.chmod(0o755)
            yield temporary
            _sync_tree(temporary)
            _replace(temporary, folder)
            _sync(folder.parent)
        finally:
            # Gone when all went well; the previous checkpoint after an exchange; else what was written so far.
            shutil.rmtree(temporary, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # the latter is how safetensors tells of a full disk
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(
            f"the checkpoint {folder} cannot be written ({reason}): free space or choose another folder"
        ) from error


def _replace(new: Path, folder: Path) -> None:
    if not folder.exists():
        new.rename(folder)
    elif not _exchange(new, folder):
        old = new.with_name(f"{new.name}.old")
        folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one operation; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return bool(result == 0)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
