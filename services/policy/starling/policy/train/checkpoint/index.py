"""Index of the tensors in a folder of `torch.distributed.checkpoint` (its file `.metadata`), which may be anyone's.

The file is a pickle, and a pickle is a program. This one runs without any class or function of torch but the element
types: each other name stands for a class of records, which keep what the pickle gives them and do nothing. The entries
are then made of the records, where each has exactly the type and the fields that it has in an index.

Why no class of torch: a pickle can set attributes, of objects and of classes, so that what it has made changes its type
later, or that the classes behave in another way from then on.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Collection, Iterator
from math import prod
from typing import IO, Any, Final, Never

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

_DTYPES: Final = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


MAX_BYTES: Final = 64 << 20
"""Largest index: each chunk has some 200 bytes, so these are those of 1,500 tensors on 200 ranks."""
_MAX_DEPTH: Final = 3
"""Tuples in each other. An index has two; Python hashes and compares them on the C stack, without a limit."""


class BadIndexError(pickle.UnpicklingError):
    """An index with a name, an entry or a file that no index of this format contains."""


class _Record:
    """An object of an index, as its pickle describes it: how it was made, and the state that it was given.

    It has `__setstate__`, so no pickle sets an attribute of it, and none of a class of records: there the method has
    no object, and fails.
    """

    __slots__ = ("args", "state")
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any) -> None:
        """Accept the arguments that `__new__` has kept."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Size(_Record): ...


class _Layout(_Record): ...


class _Metadata(_Record): ...


class _TensorEntry(_Record): ...


class _Chunk(_Record): ...


class _Properties(_Record): ...


class _Key(_Record): ...


class _MemoryFormat(_Record): ...


class _Location(_Record): ...


_RECORDS: Final = {
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Layout,
    ("torch.distributed.checkpoint.metadata", "Metadata"): _Metadata,
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"): _TensorEntry,
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"): _Chunk,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): _Properties,
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"): _Key,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    # Python 3.11.2, that of Debian 12, pickles the member of an enum as an attribute of its class.
    ("builtins", "getattr"): _MemoryFormat,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Location,
}
"""Names that an index contains besides element types, by module and name."""


_PUSHES: Final = frozenset(
    {
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "GLOBAL",
        "EMPTY_LIST",
        "EMPTY_DICT",
    }
)
_POPS: Final = {"APPEND": 1, "BUILD": 1, "SETITEM": 2}
"""Number of values that an opcode takes from the stack, and adds to the one below."""
_MAKES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "REDUCE": 2, "NEWOBJ": 2, "STACK_GLOBAL": 2}
"""Number of values of which an opcode makes one."""


def _check_program(content: bytes) -> None:
    """Refuse a pickle with which the interpreter of pickles itself could fail or take memory without a limit.

    It goes through the opcodes without making anything: of each value it knows only how many tuples lie in each other.

    Raises:
        BadIndexError: it has another opcode than an index, takes what is not there, or nests tuples.
    """
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    try:
        for code, argument in _opcodes(content):
            if code in _PUSHES:
                stack.append(0)
            elif code == "MARK":
                marks.append(len(stack))
            elif code in ("APPENDS", "SETITEMS"):
                del stack[marks.pop() :]
            elif code in _POPS:
                del stack[len(stack) - _POPS[code] :]
            elif code in _MAKES or code in ("TUPLE", "EMPTY_TUPLE"):
                begin = marks.pop() if code == "TUPLE" else len(stack) - _MAKES.get(code, 0)
                depth = 1 + max(stack[begin:], default=0) if "TUPLE" in code else 0
                if begin < 0 or depth > _MAX_DEPTH:
                    raise BadIndexError("it nests tuples as no index does, or takes a value that is not there")
                stack[begin:] = [depth]
            elif code in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif code in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                if argument not in (None, len(memo)):
                    raise BadIndexError(f"it numbers a value {argument} that is number {len(memo)}")
                memo.append(stack[-1])
            elif code not in ("PROTO", "FRAME", "STOP"):
                raise BadIndexError(f"it has the opcode {code}, which no index contains")
    except IndexError:
        raise BadIndexError("it takes a value that is not there") from None


def _opcodes(content: bytes) -> Iterator[tuple[str, Any]]:
    """Yield name and argument of each opcode. Raises BadIndexError where there is none."""
    try:
        for opcode, argument, _ in pickletools.genops(content):
            yield opcode.name, argument
    except ValueError as error:
        raise BadIndexError(f"it is no pickle: {error}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _RECORDS.get((module, name)) or (_DTYPES.get(name) if module == "torch" else None)
        if found is None:
            raise BadIndexError(f"it names {module}.{name}, which no index contains")
        return found


def read_index(file: IO[bytes], files: Collection[str]) -> Metadata:
    """Read an index of tensors, made of fresh objects of torch's classes.

    Args:
        file: its content.
        files: names of the files that may contain tensors.

    Raises:
        BadIndexError: it is not an index of tensors in these files.
        Exception: it is no pickle, as `pickle.Unpickler.load`.
    """
    content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise BadIndexError(f"it has more than {MAX_BYTES} bytes")
    _check_program(content)
    try:
        found = _Unpickler(io.BytesIO(content)).load()
    except TypeError as error:  # as where it sets an attribute of a class
        raise BadIndexError(f"it does what no index does: {error}") from None
    fields = _fields(found, _Metadata)
    entries = _dict(fields, "state_dict_metadata")
    locations = {_key(key): _location(value, files) for key, value in _dict(fields, "storage_data").items()}
    return Metadata(
        state_dict_metadata={_text(name): _tensor_entry(name, entry, locations) for name, entry in entries.items()},
        storage_data=locations,
    )


def _tensor_entry(name: str, record: Any, locations: Collection[MetadataIndex]) -> TensorStorageMetadata:
    """Return the entry of a tensor whose chunks cover it: DCP leaves what no chunk covers as it is, in silence."""
    fields = _fields(record, _TensorEntry)
    size, found = _size(fields.get("size")), fields.get("chunks")
    if type(found) is not list:
        _refuse(found)
    chunks = [_chunk(chunk, size) for chunk in found]
    filled = [chunk for chunk in chunks if prod(chunk.sizes)]
    if sum(prod(chunk.sizes) for chunk in filled) != prod(size) or _overlap(filled):
        raise BadIndexError(f"the chunks of {name!r:.255} do not cover it")
    if any(MetadataIndex(name, chunk.offsets) not in locations for chunk in filled):
        raise BadIndexError(f"a chunk of {name!r:.255} is in no file")
    return TensorStorageMetadata(_properties(fields.get("properties")), size, chunks)


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Return whether any two chunks, none of them empty, have elements in common."""
    if len(chunks) < 2 or not chunks[0].offsets:
        return len(chunks) > 1
    # Along the dim with the most different offsets, few chunks begin before another one ends.
    dim = max(range(len(chunks[0].offsets)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    open_chunks: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        open_chunks = [other for other in open_chunks if other.offsets[dim] + other.sizes[dim] > chunk.offsets[dim]]
        if any(_meet(chunk, other) for other in open_chunks):
            return True
        open_chunks.append(chunk)
    return False


def _meet(first: ChunkStorageMetadata, second: ChunkStorageMetadata) -> bool:
    bounds = zip(first.offsets, first.sizes, second.offsets, second.sizes, strict=True)
    return all(begin < at + length and at < begin + size for begin, size, at, length in bounds)


def _properties(record: Any) -> TensorProperties:
    """Return the element type; the other properties are those of every tensor here."""
    state = record.state if type(record) is _Properties else None
    if type(state) is not tuple or not state or type(state[0]) is not torch.dtype:
        _refuse(state)
    return TensorProperties(dtype=state[0])


def _chunk(record: Any, whole: torch.Size) -> ChunkStorageMetadata:
    """Return a chunk, which lies in a tensor of size `whole`."""
    fields = _fields(record, _Chunk)
    offsets, sizes = _size(fields.get("offsets")), _size(fields.get("sizes"))
    if not len(offsets) == len(sizes) == len(whole):
        _refuse(fields)
    if any(offset + size > dim for offset, size, dim in zip(offsets, sizes, whole, strict=True)):
        _refuse(fields)
    return ChunkStorageMetadata(offsets, sizes)


def _key(record: Any) -> MetadataIndex:
    fields = _fields(record, _Key)
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields.get("fqn")),
        None if offset is None else _size(offset),
        None if index is None else _number(index),
    )


def _location(record: Any, files: Collection[str]) -> _StorageInfo:
    fields = _fields(record, _Location)
    name = _text(fields.get("relative_path"))
    if name not in files:
        raise BadIndexError(f"it names the file {name!r:.255}, which is none of this state")
    if fields.get("transform_descriptors"):
        _refuse(fields)
    return _StorageInfo(name, _number(fields.get("offset")), _number(fields.get("length")))


def _fields(record: Any, kind: type[_Record]) -> dict[str, Any]:
    """Return the fields of a record of a dataclass."""
    if type(record) is not kind or type(record.state) is not dict:
        _refuse(record)
    state: dict[str, Any] = record.state
    return state


def _dict(fields: dict[str, Any], name: str) -> dict[Any, Any]:
    value = fields.get(name)
    if type(value) is not dict:
        _refuse(value)
    return value


def _size(record: Any) -> torch.Size:
    """Return the size in a record: `torch.Size` was called with one tuple of numbers."""
    if type(record) is not _Size or len(record.args) != 1 or type(record.args[0]) is not tuple:
        _refuse(record)
    return torch.Size([_number(value) for value in record.args[0]])


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        _refuse(value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        _refuse(value)
    return value


def _refuse(value: Any) -> Never:
    raise BadIndexError(f"it has a {type(value).__name__.lstrip('_')} that no index of tensors contains in that place")
