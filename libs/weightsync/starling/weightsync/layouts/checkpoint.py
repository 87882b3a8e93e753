"""Checkpoint folders in Hugging Face format as sources and destinations: safetensors files, and an index if several.

A folder is a replica of one rank. Each file is a storage of flat bytes with the name of the file, and a shard's
`offset_bytes` counts from the file's first byte; files are memory-mapped, so a plan reads and writes them as memory.

    with open_folder(path) as folder:                     # a source
        folder.layout("checkpoint"), folder.memories

    with create_folder(path, specs) as folder:            # a destination
        ...                                               # fill folder.memories by folder.layout("export")
        folder.finish()                                   # makes the folder visible, complete and on disk
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np
import numpy.typing as npt

from starling.common.errors import WeightsError
from starling.common.files import open_regular
from starling.weightsync.layouts.fused import contiguous
from starling.weightsync.layouts.safetensors import HeaderEntry, make_header, read_header
from starling.weightsync.places.machine import find_machine
from starling.weightsync.plan.layout import (
    ITEM_BYTES,
    Box,
    Layout,
    Place,
    RankLayout,
    Shard,
    TensorSpec,
    check_layout,
    check_specs,
)

ENDING: Final = ".safetensors"
INDEX_ENDING: Final = ".safetensors.index.json"
MAX_FILE_BYTES: Final = 5_000_000_000
"""Files hold about this many bytes at most, unless one tensor is larger."""


class Folder:
    """The mapped files of a checkpoint, and the positions of its tensors."""

    def __init__(self, entries: Mapping[str, Sequence[HeaderEntry]], ties: Mapping[str, str]) -> None:
        """Describe files by name; the caller maps them."""
        self.memories: dict[str, npt.NDArray[np.uint8]] = {}
        """The bytes of each file, by its name."""
        self._entries = {entry.spec.name: (file, entry) for file, held in entries.items() for entry in held}
        self._ties = {alias: owner for alias, owner in ties.items() if alias not in self._entries}

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors of the folder, and the names tied to them."""
        specs = {name: entry.spec for name, (_, entry) in self._entries.items()}
        for alias, owner in self._ties.items():
            if owner not in specs:
                raise WeightsError(f"{alias} is tied to {owner}, which the checkpoint does not have.")
            specs[alias] = msgspec.structs.replace(specs[owner], name=alias, same_as=owner)
        return tuple(specs.values())

    def layout(self, replica: str, place: Place | None = None) -> Layout:
        """Return the layout of the folder, as one rank; `place` is this host by default."""
        shards = []
        for index, (file, entry) in enumerate(self._entries.values()):
            shape = entry.spec.shape
            box = Box(offset=(0,) * len(shape), size=shape)
            shards.append(
                Shard(tensor=index, box=box, storage=file, offset_bytes=entry.offset_bytes, strides=contiguous(shape))
            )
        place = place or find_machine().place()
        layout = Layout(replica=replica, tensors=self.tensors, ranks=(RankLayout(place=place, shards=tuple(shards)),))
        check_layout(layout)
        return layout

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return each tensor as a view of its file, elements as unsigned integers: numpy does not know all types."""
        return {
            name: np.ndarray(
                entry.spec.shape, f"u{ITEM_BYTES[entry.spec.dtype]}", self.memories[file], entry.offset_bytes
            )
            for name, (file, entry) in self._entries.items()
        }

    def close(self) -> None:
        """Release the files; they are unmapped when the last view of them is gone."""
        self.memories.clear()

    def __enter__(self) -> Self:
        """Return the folder itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the folder."""
        self.close()


def open_folder(path: str | Path, ties: Mapping[str, str] | None = None) -> Folder:
    """Map a checkpoint for reading.

    Args:
        path: a folder with one index or one safetensors file, as `save_pretrained` writes it, or such a file.
        ties: names that the checkpoint omits because they are tied, with their owners.

    Raises:
        WeightsError: no checkpoint, missing or invalid files, or files that contradict the index.
    """
    path = Path(path)
    folder = path.parent if path.is_file() else path
    wanted, index = ({path.name: None}, path.name) if path.is_file() else _listed_files(path)
    entries: dict[str, Sequence[HeaderEntry]] = {}
    for file, names in wanted.items():
        held = {entry.spec.name: entry for entry in read_header(folder / file)}
        missing = next((name for name in names or () if name not in held), None)
        if missing is not None:
            raise WeightsError(f"{folder / file} does not have tensor {missing}, which {index} lists there.")
        entries[file] = [held[name] for name in names] if names is not None else list(held.values())
    opened = Folder(entries, ties or {})
    for file in wanted:
        try:
            with (folder / file).open("rb") as stream:
                opened.memories[file] = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        except (OSError, ValueError) as error:
            raise WeightsError(f"{folder / file} cannot be mapped: {error}.") from error
    return opened


def _listed_files(folder: Path) -> tuple[dict[str, list[str] | None], str]:
    """Return the files of a checkpoint with the tensors to read from each (None: all), and the file that lists them."""
    indices = sorted(folder.glob(f"*{INDEX_ENDING}"))
    files = sorted(path.name for path in folder.glob(f"*{ENDING}"))
    if not indices and len(files) == 1:
        return {files[0]: None}, files[0]
    if len(indices) != 1:
        raise WeightsError(
            f"{folder} has {len(indices)} indices (*{INDEX_ENDING}) and {len(files)} files (*{ENDING}); "
            "give a folder with one index or one file, or the file itself."
        )
    index = indices[0]
    try:
        with open_regular(index) as file:
            places = json.loads(file.read())["weight_map"].items()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{index} is not an index of tensors: {error}.") from error
    wanted: dict[str, list[str] | None] = {}
    for name, file in places:
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
            raise WeightsError(
                f"{index} lists tensor {name!r:.100} in {file!r:.255}, which is not a file of the folder."
            )
        names = wanted.setdefault(file, [])
        if names is not None:
            names.append(name)
    return wanted, index.name


class NewFolder(Folder):
    """A checkpoint that is being written: files in a temporary folder, until `finish` renames it."""

    def __init__(
        self,
        path: Path,
        partial: Path,
        index: str,
        files: Mapping[str, tuple[bytes, Sequence[HeaderEntry]]],
        ties: Mapping[str, str],
    ) -> None:
        """Reserve and map `files` in the folder `partial`, which exists and becomes `path`; `index` names the index."""
        super().__init__({file: entries for file, (_, entries) in files.items()}, ties)
        self.path = path
        """Path of the finished checkpoint."""
        self._partial, self._index = partial, index
        self._maps: dict[str, mmap.mmap] = {}
        for file, (header, entries) in files.items():
            size_bytes = max((entry.offset_bytes + entry.size_bytes for entry in entries), default=len(header))
            handle = os.open(partial / file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                # Without this, a full disk would kill the process at a write to the mapping.
                os.posix_fallocate(handle, 0, size_bytes)
                os.pwrite(handle, header, 0)
                self._maps[file] = mmap.mmap(handle, size_bytes)
            finally:
                os.close(handle)
            self.memories[file] = np.frombuffer(self._maps[file], np.uint8)

    def add_file(self, name: str, data: bytes) -> None:
        """Write a further file of the checkpoint, such as `config.json`.

        Raises:
            WeightsError: it cannot be written, or `name` is not a plain file name.
        """
        if Path(name).name != name or name in (self._index, *self.memories):
            raise WeightsError(f"{name!r} cannot be a further file of checkpoint {self.path}; choose another name.")
        try:
            _write(self._partial / name, data)
        except OSError as error:
            raise WeightsError(f"{name} of checkpoint {self.path} cannot be written: {error}.") from error

    def finish(self) -> None:
        """Sync everything to disk, add the index, and rename the checkpoint to its path.

        Views of the files must not be written to afterwards.

        Raises:
            WeightsError: a disk error, or the path exists by now; then no files are left behind.
        """
        try:
            for mapped in self._maps.values():
                mapped.flush()
            if len(self._maps) > 1:
                sizes = sum(entry.size_bytes for _, entry in self._entries.values())
                places = {name: self._entries[name][0] for name in sorted(self._entries)}
                index = {"metadata": {"total_size": sizes}, "weight_map": places}
                _write(self._partial / self._index, json.dumps(index, indent=2).encode() + b"\n")
            for file in self._maps:
                _sync(self._partial / file)
            _sync(self._partial)
            self._partial.rename(self.path)
            _sync(self.path.parent)
        except OSError as error:
            self.close()
            raise WeightsError(f"Checkpoint {self.path} cannot be finished: {error}.") from error
        super().close()
        self._maps.clear()

    def close(self) -> None:
        """Release the files, and remove them unless `finish` has completed."""
        super().close()
        self._maps.clear()
        shutil.rmtree(self._partial, ignore_errors=True)


def create_folder(
    path: str | Path,
    specs: Iterable[TensorSpec],
    *,
    stem: str = "model",
    max_file_bytes: int = MAX_FILE_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> NewFolder:
    """Create the files of a checkpoint, with headers and space for the tensors, to be filled.

    Disk space is reserved at once. Tied names are omitted, as readers expect.

    Args:
        path: path of the checkpoint after `finish`; it must not exist, or be an empty folder.
        specs: the tensors, in the order in which they fill the files.
        stem: prefix of the file names; diffusers expects `diffusion_pytorch_model`.
        max_file_bytes: size at which a new file begins.
        metadata: further metadata of the headers.

    Raises:
        WeightsError: the path exists, the disk is too small, or a tensor cannot be written. Nothing is left behind.
    """
    path, listed = Path(path).absolute(), tuple(specs)
    check_specs(str(path), listed)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise WeightsError(f"{path} exists; remove it or choose another folder for the checkpoint.")
    owned = [spec for spec in listed if not spec.same_as]
    files = _make_files(owned, stem, max_file_bytes, {"format": "pt", **(metadata or {})})
    size_bytes = sum(len(header) + sum(entry.size_bytes for entry in entries) for header, entries in files.values())
    partial = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(path.parent).free
        if size_bytes > free_bytes:
            raise OSError(f"the disk has {free_bytes} bytes left")
        partial.mkdir()
        return NewFolder(
            path, partial, stem + INDEX_ENDING, files, {spec.name: spec.same_as for spec in listed if spec.same_as}
        )
    except (OSError, ValueError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise WeightsError(
            f"Checkpoint {path} of {size_bytes} bytes cannot be created: {error}; free space or choose another disk."
        ) from error


def _make_files(
    specs: Sequence[TensorSpec], stem: str, max_file_bytes: int, metadata: Mapping[str, str]
) -> dict[str, tuple[bytes, Sequence[HeaderEntry]]]:
    """Distribute tensors over files, in order, and name the files."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        size_bytes = int(np.prod(spec.shape, dtype=object)) * ITEM_BYTES[spec.dtype]
        if groups[-1] and filled + size_bytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size_bytes
    count = len(groups)
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}{ENDING}" for i in range(count)] if count > 1 else [stem + ENDING]
    return {name: make_header(group, metadata) for name, group in zip(names, groups, strict=True)}


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
