"""Named tensors in files, in the format of `torch.distributed.checkpoint` (DCP).

Each rank writes its shards, and any other number of ranks can read what they need: DCP reshards. Its files hold
tensors, which torch reads without executing code, and one index, which is a pickle: an unpickler reads it that allows
only the dozen names of an index.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Final

import torch
import xxhash
from torch import Tensor
from torch.distributed import ProcessGroup, all_gather_object, get_world_size
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

_ALLOWED: Final = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
}
"""Names that an index may contain, by module."""

Shape = tuple[torch.dtype, tuple[int, ...]]


class UnknownNameError(pickle.UnpicklingError):
    """An index that contains a name that is not allowed."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise UnknownNameError(f"it names {module}.{name}, which no index contains")


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
        except Exception as error:
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
        with self._fs.open(path, mode) as file:
            if "w" not in mode:
                yield file
                return
            digesting = _DigestingFile(file)
            try:
                yield digesting
            except Exception:
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
    def __init__(self, files: _Files, path: str) -> None:
        super().__init__(path)
        self.fs, self.path = files, path  # type: ignore[assignment]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with self.fs.create_stream(self._get_metadata_path(), "rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


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
    gathered: list[dict[str, str]] = [{}] * get_world_size(group)
    all_gather_object(gathered, files.digests, group=group)
    return {name: digest for digests in gathered for name, digest in digests.items()}


class SavedTensors:
    """Tensors written by `write_tensors`, read on demand."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        self._shapes: dict[str, Shape] | None = None

    def shapes(self) -> dict[str, Shape]:
        """Return element type and shape of each tensor, by name."""
        if self._shapes is None:
            known = _Reader(_Files(self._fs), self._path).read_metadata().state_dict_metadata
            self._shapes = {
                name: (entry.properties.dtype, tuple(entry.size))
                for name, entry in known.items()
                if isinstance(entry, TensorStorageMetadata)
            }
        return self._shapes

    def read_into(self, tensors: Mapping[str, Tensor], group: ProcessGroup | None = None) -> None:
        """Fill `tensors` in place, each of its saved shape; DTensors with this rank's shards."""
        reader = _Reader(_Files(self._fs), self._path)
        with _plain_errors(), torch.no_grad():
            load(
                dict(tensors),
                storage_reader=reader,
                planner=DefaultLoadPlanner(),
                process_group=group,
                no_dist=group is None,
            )

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
