"""States whose index of tensors is hostile: nothing of it is executed, no class changes, no other file is opened."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.header import StateHeader, encode_header, find_state, read_header
from starling.policy.train.checkpoint.index import MAX_BYTES, BadIndexError, read_index
from starling.policy.train.checkpoint.state import (
    WEIGHTS,
    HostBuffers,
    SavedState,
    StateMetadata,
    StateStore,
    take_state,
)
from starling.policy.train.checkpoint.storage import Storage
from starling.weightsync.offers.offer import digest_of

torch.set_num_threads(1)

NAME = f"{WEIGHTS}w"
METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"


def write_state(folder: Path) -> Path:
    """Write an honest state of one tensor of four ones. Returns its path."""
    snapshot = take_state(StateMetadata(run="r", version=1), {NAME: torch.ones(4)}, torch.device("cpu"), HostBuffers())
    return Path(StateStore(Storage(str(folder))).write(snapshot))


def reseal(state: Path) -> None:
    """Write the digests of the files that are there, as an attacker can."""
    header = read_header(Storage(str(state)))
    digests = {file.name: digest_of(file.read_bytes()) for file in (state / "parts").iterdir()}
    (state / "state.json").write_bytes(encode_header(msgspec.structs.replace(header, digests=digests)))


def restore(state: Path) -> torch.Tensor:
    """Restore the tensor of the state, as a policy and the export do. Returns it."""
    live = torch.zeros(4)
    SavedState.of(find_state(str(state))).restore(WEIGHTS, {"w": live})
    return live


class Harm:
    """An object whose pickle makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._path),)


def name(module: str, attribute: str) -> bytes:
    """Return the opcode that loads a name."""
    return f"c{module}\n{attribute}\n".encode()


def value(content: object) -> bytes:
    """Return the opcodes of plain values."""
    return pickle.dumps(content, 2)[2:-1]


def test_index_of_a_python_that_pickles_enums_by_name_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.2 of Debian 12 pickles the member of an enum as `getattr` of its class."""
    encoding = dcp_metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(encoding, "__reduce_ex__", lambda member, _: (getattr, (encoding, member.name)))
    state = write_state(tmp_path)
    assert b"getattr" in (state / "parts" / ".metadata").read_bytes()
    assert restore(state).tolist() == [1.0] * 4


def test_index_entry_that_becomes_bytes_executes_nothing(tmp_path: Path) -> None:
    # The first reading finds a tensor; it has prepared that the second one finds bytes, which DCP would unpickle.
    state = write_state(tmp_path / "states")
    payload = io.BytesIO()
    torch.save(Harm(tmp_path / "harm"), payload)
    (state / "parts" / "harm.distcp").write_bytes(payload.getvalue())
    properties = name(METADATA, "TensorProperties") + name("torch", "float32") + b"\x85R"
    size = name("torch", "Size") + value((4,)) + b"\x85R"
    fields = value("properties") + properties + value("size") + size + value("chunks") + b"]"
    tensor = b"N}(" + value("__class__") + name(METADATA, "TensorStorageMetadata") + fields + b"u\x86b"
    entry = name(METADATA, "BytesStorageMetadata") + b")R" + tensor
    location = name(FILESYSTEM, "_StorageInfo") + b"(" + value("harm.distcp") + value(0)
    location += value(len(payload.getvalue())) + b"tR"
    key = name(METADATA, "MetadataIndex") + value(NAME) + b"\x85R"
    change = name(METADATA, "BytesStorageMetadata") + b"N}(" + value("__setstate__") + name(METADATA, "MetadataIndex")
    index = b"\x80\x02" + name(METADATA, "Metadata") + b"(}(" + value(NAME) + entry + b"uN}(" + key + location + b"utR"
    (state / "parts" / ".metadata").write_bytes(index + change + b"u\x86b0.")
    reseal(state)
    try:
        with pytest.raises(ConfigError, match="cannot be read"):
            restore(state)
    finally:
        if hasattr(BytesStorageMetadata, "__setstate__"):
            del BytesStorageMetadata.__setstate__
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "target", ["TensorStorageMetadata", "ChunkStorageMetadata", "Metadata", "TensorProperties", "MetadataIndex"]
)
def test_index_changes_no_class_of_torch(tmp_path: Path, target: str) -> None:
    state = write_state(tmp_path / "states")
    change = name(METADATA, target) + b"N}(" + value("harmed") + value(True) + b"u\x86b0"
    index = (state / "parts" / ".metadata").read_bytes()
    (state / "parts" / ".metadata").write_bytes(b"\x80\x04" + change + index[2:])
    reseal(state)
    changed = getattr(dcp_metadata, target)
    try:
        with pytest.raises(ConfigError, match="cannot be read"):
            restore(state)
        assert not hasattr(changed, "harmed")
    finally:
        if hasattr(changed, "harmed"):
            del changed.harmed
    assert restore(write_state(tmp_path / "others")).tolist() == [1.0] * 4


def test_index_is_read_once(tmp_path: Path) -> None:
    state = write_state(tmp_path / "states")
    saved, live = SavedState.of(find_state(str(state))), torch.zeros(4)
    assert saved.has(WEIGHTS)
    (state / "parts" / ".metadata").unlink()
    saved.restore(WEIGHTS, {"w": live})
    assert live.tolist() == [1.0] * 4


@pytest.mark.parametrize("outside", ["../../../fifo", "/dev/zero", "other.distcp", "../parts/__0_0.distcp"])
def test_index_opens_only_files_of_its_state(tmp_path: Path, outside: str) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "states").mkdir()
    state = write_state(tmp_path / "states")
    edit_index(state, lambda index: [setattr(found, "relative_path", outside) for found in index.storage_data.values()])
    with pytest.raises(ConfigError, match=r"cannot be read \(it names the file '.*', which is none of this state"):
        restore(state)


def test_index_with_a_fifo_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    state = write_state(tmp_path / "states")
    found = find_state(str(state))
    (state / "parts" / "__0_0.distcp").unlink()
    os.mkfifo(state / "parts" / "__0_0.distcp")
    with pytest.raises(ConfigError, match="it is no regular file"):
        SavedState.of(found).restore(WEIGHTS, {"w": torch.zeros(4)})


def test_index_of_other_forms_is_refused(tmp_path: Path) -> None:
    edits: list[Callable[[Metadata], object]] = [
        lambda index: index.state_dict_metadata.update({NAME: BytesStorageMetadata()}),
        lambda index: index.state_dict_metadata.update({NAME: tensor_entry((4,), ((1,), (4,)))}),
        lambda index: index.state_dict_metadata.update({NAME: tensor_entry((4,), ((0, 0), (4, 1)))}),
        lambda index: index.state_dict_metadata.update({NAME: tensor_entry((-4,), ((0,), (-4,)))}),
        lambda index: index.state_dict_metadata.update({NAME: MetadataIndex(NAME)}),
        lambda index: index.state_dict_metadata.update({1: tensor_entry((4,), ((0,), (4,)))}),
        lambda index: index.storage_data.update({NAME: _StorageInfo("__0_0.distcp", 0, 8)}),
        lambda index: index.storage_data.update({MetadataIndex(NAME): _StorageInfo("__0_0.distcp", -1, 8)}),
        lambda index: index.storage_data.update({MetadataIndex(NAME): _StorageInfo("__0_0.distcp", 0, 1 << 70)}),
        lambda index: index.storage_data.update({MetadataIndex(NAME): _StorageInfo("__0_0.distcp", 0, 8, ["zstd"])}),
        lambda index: setattr(index, "state_dict_metadata", []),
        lambda index: setattr(index, "storage_data", None),
    ]
    for number, edit in enumerate(edits):
        state = write_state(tmp_path / str(number))
        edit_index(state, edit)
        with pytest.raises(ConfigError, match=r"that no index|no index contains"):
            restore(state)


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (((0,), (3,)),),
        (((0,), (2,)), ((1,), (2,))),
        (((0,), (2,)), ((0,), (2,))),
    ],
)
def test_index_whose_chunks_do_not_cover_their_tensor_is_refused(
    tmp_path: Path, chunks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
) -> None:
    # DCP would leave the elements that no chunk covers as they are, and report a restored tensor.
    state = write_state(tmp_path / "states")
    edit_index(state, lambda index: index.state_dict_metadata.update({NAME: tensor_entry((4,), *chunks)}))
    with pytest.raises(ConfigError, match=rf"cannot be read \(the chunks of '{NAME}' do not cover it"):
        restore(state)


def test_index_with_a_chunk_in_no_file_is_refused(tmp_path: Path) -> None:
    state = write_state(tmp_path / "states")
    edit_index(state, lambda index: index.storage_data.clear())
    with pytest.raises(ConfigError, match=rf"cannot be read \(a chunk of '{NAME}' is in no file"):
        restore(state)


def test_index_of_chunks_along_any_dims_covers_its_tensor() -> None:
    size = (5, 6)
    grid = [((row, column), (min(2, 5 - row), 3)) for row in (0, 2, 4) for column in (0, 3)]
    assert read_entry(size, *grid, ((0, 0), (0, 6))).size == size
    with pytest.raises(BadIndexError, match="do not cover it"):
        read_entry(size, *grid[1:], ((1, 0), (2, 3)))
    assert read_entry((), ((), ())).size == ()
    assert read_entry((0, 3)).size == (0, 3)


NESTED = b"\x80\x04}" + b")" + b"\x85" * 2_000_000 + b"Ns."
"""A dict whose key is two million tuples in each other."""
NESTED_BY_NAME = b"\x80\x02}" + b")q\x00" + b"".join(b"h%c\x85q%c" % (n, n + 1) for n in range(100)) + b"Ns."
"""The same, a hundred, each by its number."""
MEMO = b"\x80\x04Nr\xff\xff\xff\x7f."
"""A value with the number 2^31 - 1, for which the interpreter makes a table of 16 GiB and more."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [NESTED, NESTED_BY_NAME, MEMO])
def test_index_that_ends_the_interpreter_of_pickles_is_refused(program: bytes) -> None:
    # In a process of its own, which may die: that of a policy did.
    code = (
        "import io, resource, sys\n"
        "from starling.policy.train.checkpoint.index import MAX_BYTES, BadIndexError, read_index\n"
        "resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))\n"
        "try:\n    read_index(io.BytesIO(sys.stdin.buffer.read()), {'f'})\n"
        "except BadIndexError as error:\n    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], input=program, capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert b"it nests tuples" in ended.stdout or b"it numbers a value" in ended.stdout


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "numbers a value 2147483647 that is number 0"),
        (b"\x80\x04\x8b\x01\x00\x00\x00\x7f.", "the opcode LONG4"),
        (b"\x80\x02\x82\x01.", "the opcode EXT1"),
        (b"\x80\x02h\x05.", "a value that is not there"),
        (b"\x80\x02\x85.", "a value that is not there"),
        (b"\x80\x02u.", "a value that is not there"),
        (b"\x80\x02N", "it is no pickle"),
        (b"\x80\x02\xff.", "it is no pickle"),
        (b"N" * (MAX_BYTES + 1), "it has more than 67108864 bytes"),
    ],
)
def test_index_with_another_program_than_an_index_is_refused(program: bytes, complaint: str) -> None:
    with pytest.raises(BadIndexError, match=complaint):
        read_index(io.BytesIO(program), {"f"})


def read_entry(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    """Return the entry of a tensor with these chunks, from an index that has it only."""
    locations = {MetadataIndex("w", torch.Size(offsets)): _StorageInfo("f", 0, 8) for offsets, _ in chunks}
    index = Metadata(state_dict_metadata={"w": tensor_entry(size, *chunks)}, storage_data=locations)
    found = read_index(io.BytesIO(pickle.dumps(index)), {"f"}).state_dict_metadata["w"]
    assert isinstance(found, TensorStorageMetadata)
    return found


def tensor_entry(size: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    """Return the entry of a tensor with these chunks: offsets and sizes."""
    parts = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size(size), parts)


def edit_index(state: Path, edit: Callable[[Metadata], object]) -> None:
    """Change the index of a state that a test has written, and its digest."""
    path = state / "parts" / ".metadata"
    index = pickle.loads(path.read_bytes())
    edit(index)
    path.write_bytes(pickle.dumps(index))
    reseal(state)


@pytest.mark.parametrize("position", [-1, 625, 10**9])
def test_state_with_random_numbers_at_no_position_is_refused(tmp_path: Path, position: int) -> None:
    # NumPy accepts the position and reads beyond its keys: the process dies, or samples what lies there.
    def edit(header: StateHeader) -> StateHeader:
        name, keys, _, has_gauss, gauss = header.numpy_random
        return msgspec.structs.replace(header, numpy_random=(name, keys, position, has_gauss, gauss))

    check_header_is_refused(tmp_path, edit)


def test_state_with_random_numbers_of_no_generator_is_refused(tmp_path: Path) -> None:
    keys = (1,) * 624
    numpy = [("x", keys, 0, 0, 0.0), ("MT19937", keys[1:], 0, 0, 0.0), ("MT19937", (1 << 32, *keys[1:]), 0, 0, 0.0)]
    numpy += [("MT19937", (-1, *keys[1:]), 0, 0, 0.0), ("MT19937", keys, 0, 2, 0.0)]
    for number, state in enumerate(numpy):
        check_header_is_refused(
            tmp_path / f"n{number}", lambda header, state=state: msgspec.structs.replace(header, numpy_random=state)
        )
    python = [(4, (*keys, 0), None), (3, keys, None), (3, (*keys, 625), None), (3, (), None)]
    python += [(3, (*keys[1:], -1, 0), None)]
    for number, state in enumerate(python):
        check_header_is_refused(
            tmp_path / f"p{number}", lambda header, state=state: msgspec.structs.replace(header, python_random=state)
        )


def check_header_is_refused(folder: Path, edit: Callable[..., StateHeader]) -> None:
    """Check that a state with an edited header is not found."""
    state = write_state(folder)
    (state / "state.json").write_bytes(encode_header(edit(read_header(Storage(str(state))))))
    with pytest.raises(ConfigError, match="states of random numbers that no generator has"):
        find_state(str(state))
