"""Named tensors in files, in the format of `torch.distributed.checkpoint` (DCP).

Each rank writes its shards, and any other number of ranks can read what they need: DCP reshards. Its files hold
tensors, which torch reads without executing code, and one index, which `starling.policy.train.checkpoint.index` reads,
once.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import IO, Any, Final

import torch
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object, get_world_size
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from starling.policy.train.checkpoint.index import BadIndexError, read_index
from starling.policy.train.checkpoint.parts import Part
from starling.policy.train.checkpoint.planners import PartLoadPlanner, PartSavePlanner
from starling.policy.train.checkpoint.storage import open_file

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

INDEX: Final = ".metadata"
Shape = tuple[torch.dtype, tuple[int, ...]]


class _DigestingFile:
    """A file written from front to back, with the digest of its content."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.state = file, xxhash.xxh3_128()
        self.error: Exception | None = None
        """The error of a failed write: torch raises another one instead, which does not say that a disk is full."""

    def write(self, data: bytes) -> int:
        self.state.update(data)
        try:
            return self._file.write(data)
        except Exception as error:  # the file system is the user's and raises anything; it is raised again
            self.error = error
            raise

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """Do nothing: nothing is buffered here."""

    def close(self) -> None:
        """Do nothing: the caller that opened the file closes it."""


class _Files(FileSystemBase):
    """DCP's file-system interface over fsspec."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs
        self.digests: dict[str, str] = {}
        """Of the written files, by name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with open_file(self._fs, str(path)) as file:
                yield file
            return
        with self._fs.open(path, mode) as file:
            digesting = _DigestingFile(file)
            try:
                yield digesting
            except Exception:  # torch's, which hides that of the file
                if digesting.error is not None:
                    raise digesting.error from None
                raise
        self.digests[_name(path)] = digesting.state.hexdigest()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        self._fs.mv(path, new_path)
        self.digests[_name(new_path)] = self.digests.pop(_name(path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        self._fs.makedirs(path, exist_ok=True)

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return bool(self._fs.exists(path))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        self._fs.rm_file(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _Writer(FileSystemWriter):
    def __init__(self, files: _Files, path: str) -> None:
        # The owner of the folder syncs it to disk; without a file descriptor DCP would sync all disks.
        super().__init__(path, sync_files=False)
        self.fs, self.path = files, path  # type: ignore[assignment]

    def storage_meta(self) -> StorageMeta | None:
        """Store nothing about this process: equal tensors make equal files."""
        return None


class _Reader(FileSystemReader):
    """DCP's reader for an index that was read before."""

    def __init__(self, files: _Files, path: str, index: Metadata) -> None:
        super().__init__(path)
        self.fs, self.path = files, path  # type: ignore[assignment]
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return replace(self._index, storage_meta=StorageMeta(load_id=self.load_id))


class _TensorPlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse an entry of bytes: the default unpickles it, which executes any code. An index here has none."""
        raise BadIndexError(f"{read_item.dest_index.fqn} is no tensor")


def write_tensors(
    fs: Any, path: str, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None
) -> dict[str, str]:
    """Write `tensors` into the folder `path` of the fsspec file system `fs`. Returns the digest of each file, by name.

    With a `group`, all its ranks call this with the tensors they hold (DTensors if sharded), and get all digests.
    """
    files = _Files(fs)
    with _plain_errors():
        save(dict(tensors), storage_writer=_Writer(files, path), process_group=group, no_dist=group is None)
    if group is None:
        return files.digests
    return _all_digests(files, group)


def write_parts(fs: Any, path: str, parts: Mapping[str, Part], group: ProcessGroup) -> dict[str, str]:
    """Write the parts of all ranks of `group`, each of which calls this; see `write_tensors`."""
    files = _Files(fs)
    with _plain_errors():
        save(dict(parts), storage_writer=_Writer(files, path), planner=PartSavePlanner(), process_group=group)
    return _all_digests(files, group)


def _all_digests(files: _Files, group: ProcessGroup) -> dict[str, str]:
    gathered: list[dict[str, str]] = [{}] * get_world_size(group)
    all_gather_object(gathered, files.digests, group=group)
    return {name: digest for digests in gathered for name, digest in digests.items()}


class SavedTensors:
    """Tensors written by `write_tensors`, read on demand."""

    def __init__(self, fs: Any, path: str, files: Collection[str]) -> None:
        """Read from the folder `path` of the fsspec file system `fs`, and there only from `files`, by name."""
        self._files, self._path, self._names = _Files(fs), path, files

    @cached_property
    def _index(self) -> Metadata:
        """The index, which is read once: what is read later is what was checked."""
        with self._files.create_stream(f"{self._path}/{INDEX}", "rb") as file:
            return read_index(file, self._names)

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {
            name: (entry.properties.dtype, tuple(entry.size))
            for name, entry in self._index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def shapes(self) -> Mapping[str, Shape]:
        """Return element type and shape of each tensor, by name."""
        return self._shapes

    def read_into(self, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
        """Fill `tensors` in place, each of its saved shape; DTensors with this rank's shards."""
        with _plain_errors(), torch.no_grad():
            load(
                dict(tensors),
                storage_reader=_Reader(self._files, self._path, self._index),
                planner=_TensorPlanner(),
                process_group=group,
                no_dist=group is None,
            )

    def read_parts(self, parts: Mapping[str, Part]) -> None:
        """Fill `parts` in place, whatever parts were written."""
        with _plain_errors(), torch.no_grad():
            reader = _Reader(self._files, self._path, self._index)
            load(dict(parts), storage_reader=reader, planner=PartLoadPlanner(), no_dist=True)

    def read(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with `prefix`, on the CPU, by the rest of their names."""
        tensors = {
            name: torch.empty(shape, dtype=dtype)
            for name, (dtype, shape) in self.shapes().items()
            if name.startswith(prefix)
        }
        if tensors:
            self.read_into(tensors)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the original error in place of DCP's summary by rank."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def _name(path: str | os.PathLike[str]) -> str:
    return str(path).rpartition("/")[2]
