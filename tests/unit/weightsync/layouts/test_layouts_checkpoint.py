"""Checkpoint folders as sources and destinations, compared with safetensors and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from property_tests import examples
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from starling.common.errors import WeightsError
from starling.weightsync.layouts.checkpoint import create_folder, open_folder
from starling.weightsync.layouts.families import model_of
from starling.weightsync.layouts.safetensors import CODES, make_header, read_header
from starling.weightsync.plan.layout import ITEM_BYTES, TensorSpec
from starling.weightsync.plan.planner import make_plan
from starling.weightsync.tensors.modules import folder_tensors, layout_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def every_type() -> dict[str, torch.Tensor]:
    """A tensor of each supported element type, of random bits."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for index, (dtype, size) in enumerate(ITEM_BYTES.items()):
        bits = torch.randint(
            0, 2 if dtype == "bool" else 256, (3, index + 1, size), generator=generator, dtype=torch.uint8
        )
        made[f"t.{dtype}"] = bits.view(getattr(torch, dtype)).reshape(3, index + 1)
    return made | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4, dtype=torch.bfloat16)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.reshape(-1).view(torch.uint8).equal(b.reshape(-1).view(torch.uint8))
    )


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [
        TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
        for name, t in tensors.items()
    ]


def fill(folder: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Write each tensor where the folder's layout says, as a transfer would: bytes into storages."""
    layout = folder.layout("export")
    for shard in layout.ranks[0].shards:
        spec = layout.tensors[shard.tensor]
        data = tensors[spec.name].contiguous().reshape(-1).view(torch.uint8).numpy()
        folder.memories[shard.storage][shard.offset_bytes : shard.offset_bytes + len(data)] = data


def test_checkpoint_is_a_source(tmp_path: Path) -> None:
    tensors = every_type()
    save_file(tensors, tmp_path / SINGLE)
    with open_folder(tmp_path) as folder:
        layout = folder.layout("checkpoint")
        assert {spec.name: (spec.shape, spec.dtype) for spec in layout.tensors} == {
            spec.name: (spec.shape, spec.dtype) for spec in specs_of(tensors)
        }
        for shard in layout.ranks[0].shards:
            spec = layout.tensors[shard.tensor]
            size = shard.box.volume * ITEM_BYTES[spec.dtype]
            data = folder.memories[shard.storage][shard.offset_bytes : shard.offset_bytes + size]
            expected = tensors[spec.name].contiguous().reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(data, expected), spec.name
        assert all(same_bits(view, tensors[name]) for name, view in folder_tensors(folder).items())
        # As tensors by name, it is a plain module.
        assert {s.name for s in layout_of(folder_tensors(folder), "p").tensors} == set(tensors)
    with open_folder(tmp_path / SINGLE) as one:
        assert len(one.tensors) == len(tensors)


@pytest.mark.parametrize("max_file_bytes", [1, 64, 10**9])
def test_checkpoint_is_a_destination(tmp_path: Path, max_file_bytes: int) -> None:
    tensors = every_type()
    with create_folder(tmp_path / "out", specs_of(tensors), max_file_bytes=max_file_bytes) as folder:
        fill(folder, tensors)
        assert not (tmp_path / "out").exists()
        folder.add_file("config.json", b"{}")
        folder.finish()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert os.listdir(tmp_path) == ["out"]
    assert "config.json" in names
    assert (INDEX in names) == (max_file_bytes < 10**9)
    loaded = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            loaded |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    assert all(same_bits(loaded[name], tensor) for name, tensor in tensors.items())
    if INDEX in names:
        index = json.loads((tmp_path / "out" / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert set(index["weight_map"]) == set(tensors)
    with open_folder(tmp_path / "out") as folder:
        assert all(same_bits(view, tensors[name]) for name, view in folder_tensors(folder).items())


def test_transformers_loads_created_folders_and_its_folders_open(tmp_path: Path) -> None:
    """First load and export: the same names in both directions, tied names left out."""
    torch.manual_seed(2)
    config = transformers.Qwen3Config(**TEXT, head_dim=6, tie_word_embeddings=True)
    module = transformers.Qwen3ForCausalLM(config)
    module.save_pretrained(tmp_path / "in", max_shard_size="2KB")
    written = json.loads((tmp_path / "in" / "config.json").read_text())
    specs = [weight.spec for weight in model_of(written).weights]
    ties = {spec.name: spec.same_as for spec in specs if spec.same_as}
    assert ties == {"lm_head.weight": "model.embed_tokens.weight"}
    with (
        open_folder(tmp_path / "in", ties) as source,
        create_folder(tmp_path / "out", specs, max_file_bytes=3000) as out,
    ):
        layout = source.layout("checkpoint")
        assert {spec.name: spec.same_as for spec in layout.tensors if spec.same_as} == ties
        make_plan(layout, out.layout("export"))
        make_plan(layout, layout_of(dict(module.state_dict()), "rollout"))
        for name, array in source.arrays().items():
            out.arrays()[name][...] = array
        out.add_file("config.json", (tmp_path / "in" / "config.json").read_bytes())
        out.finish()
    again = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in module.state_dict().items())
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1


def test_file_names_of_other_libraries(tmp_path: Path) -> None:
    """What diffusers looks for, in one file and in several; two checkpoints in one folder are ambiguous."""
    tensors = {"a": torch.ones(4), "b": torch.zeros(2)}
    for index, max_file_bytes in enumerate((1, 100)):
        path = tmp_path / str(index)
        stem = "diffusion_pytorch_model"
        with create_folder(path, specs_of(tensors), stem=stem, max_file_bytes=max_file_bytes) as folder:
            fill(folder, tensors)
            folder.finish()
        assert (path / f"{stem}.safetensors.index.json").exists() == (max_file_bytes == 1)
        with open_folder(path) as opened:
            assert all(torch.equal(view, tensors[name]) for name, view in folder_tensors(opened).items())
    save_file(tensors, tmp_path / "1" / SINGLE)
    with pytest.raises(WeightsError, match=r"has 0 indices .* and 2 files .*; give a folder with one"):
        open_folder(tmp_path / "1")


def test_unfinished_folder_leaves_no_files(tmp_path: Path) -> None:
    specs = specs_of({"a": torch.zeros(4)})
    with create_folder(tmp_path / "deep" / "out", specs) as folder:
        fill(folder, {"a": torch.ones(4)})
        assert len(os.listdir(tmp_path / "deep")) == 1
    assert os.listdir(tmp_path / "deep") == []
    with (
        pytest.raises(WeightsError, match="cannot be a further file"),
        create_folder(tmp_path / "out", specs) as folder,
    ):
        folder.add_file("../config.json", b"")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(WeightsError, match="taken exists; remove it"):
        create_folder(tmp_path / "taken", specs)
    with create_folder(tmp_path / "raced", specs) as folder:
        (tmp_path / "raced").mkdir()
        (tmp_path / "raced" / "x").touch()
        with pytest.raises(WeightsError, match="raced cannot be finished"):
            folder.finish()
    assert sorted(os.listdir(tmp_path)) == ["deep", "raced", "taken"]


def test_full_disk_is_refused(tmp_path: Path) -> None:
    huge = TensorSpec(name="huge", shape=(1 << 48,), dtype="uint8")
    with pytest.raises(
        WeightsError, match=r"out of 2814749\d+ bytes cannot be created: the disk has \d+ bytes left; free"
    ):
        create_folder(tmp_path / "out", [huge])
    assert os.listdir(tmp_path) == []
    # Room that runs out while it is reserved, in the second of two files: here, a limit on the size of files.
    script = (
        "import resource, sys\n"
        "from starling.weightsync.plan.layout import TensorSpec\n"
        "from starling.weightsync.layouts.checkpoint import create_folder\n"
        "from starling.common.errors import WeightsError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "specs = [TensorSpec(name=n, shape=(s,), dtype='uint8') for n, s in (('small', 9), ('large', 1 << 21))]\n"
        "try:\n"
        "    create_folder(sys.argv[1], specs, max_file_bytes=1 << 20)\n"
        "except WeightsError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True, timeout=60, check=True
    )
    assert "cannot be created: [Errno 27] File too large; free space or choose another disk." in done.stdout
    assert os.listdir(tmp_path) == []


def broken(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no header fits its 0 bytes"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "no header fits its 10 bytes"),
        (broken(b"[1]"), "its header is not a table"),
        (broken(b"{nonsense"), "cannot be read as a safetensors file"),
        (broken(b"[" * 100_000), "cannot be read as a safetensors file"),
        (broken({"a": 3}), "tensor a lacks dtype, shape or offsets"),
        (broken(entry(shape=(-1,))), "tensor a has the shape"),
        (broken(entry(shape=(True,))), "tensor a has the shape"),
        (broken(entry(dtype="F4"), bytes(4)), "element type 'F4', expected one of BOOL"),
        (broken(entry(dtype=["F32"]), bytes(4)), r"element type .*, expected one of"),
        (broken(entry(shape=(2,)), bytes(4)), "does not have 4 bytes"),
        (broken(entry(offsets=(4, 8)), bytes(8)), "begins at byte"),
        (broken(entry(), bytes(3)), "cut short or overlong"),
        (broken(entry(), bytes(5)), "cut short or overlong"),
        (len(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]} }').to_bytes(8, "little")
         + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]} }' + bytes(4), "which no float32 may"),
    ],
)  # fmt: skip
def test_invalid_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / SINGLE).write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        open_folder(tmp_path)


@given(data=st.data())
@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_corrupted_headers_never_read_outside_the_file(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever stands in the header, a file is refused or its tensors lie inside it."""
    header, _ = make_header(specs_of({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.bfloat16)}), {})
    content = bytearray(header + bytes(16))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "changed.safetensors"
    path.write_bytes(content)
    try:
        entries = read_header(path)
    except WeightsError:
        return
    for held in entries:
        assert 8 <= held.offset_bytes <= held.offset_bytes + held.size_bytes <= len(content)


def test_invalid_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has 0 indices .* and 0 files"):
        open_folder(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "x.safetensors")
    for index, message in (
        (b"[]", "is not an index of tensors"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "which is not a file of the folder"),
        (b'{"weight_map": {"a": ".."}}', "which is not a file of the folder"),
        (b'{"weight_map": {"a": 3}}', "which is not a file of the folder"),
        (b'{"weight_map": {"b": "x.safetensors"}}', "does not have tensor b"),
        (b'{"weight_map": {"a": "y.safetensors"}}', "cannot be read as a safetensors file"),
    ):
        (tmp_path / INDEX).write_bytes(index)
        with pytest.raises(WeightsError, match=message):
            open_folder(tmp_path)
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"a": "x.safetensors"}}')
    with open_folder(tmp_path, {"b": "c"}) as folder, pytest.raises(WeightsError, match="b is tied to c, which"):
        folder.layout("checkpoint")


def test_headers_agree_with_safetensors(tmp_path: Path) -> None:
    tensors = every_type()
    save_file(tensors, tmp_path / SINGLE)
    theirs = {held.spec.name: held.spec for held in read_header(tmp_path / SINGLE)}
    assert {spec.dtype for spec in theirs.values()} >= set(CODES)
    header, entries = make_header(specs_of(tensors), {})
    assert len(header) % 8 == 0
    assert all(held.offset_bytes % ITEM_BYTES[held.spec.dtype] == 0 for held in entries)
    (tmp_path / "mine.safetensors").write_bytes(header + bytes(sum(t.nbytes for t in tensors.values())))
    assert {name: t.shape for name, t in load_file(tmp_path / "mine.safetensors").items()} == {
        name: t.shape for name, t in tensors.items()
    }


def lying_file(folder: Path, name: str = "a", **lies: Any) -> None:
    """Write a file whose only tensor is called `name`, with `lies` in its entry."""
    header = json.dumps({name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **lies}}).encode()
    (folder / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "lies",
    [
        {"shape": [9 * 10**3999] * 3000},
        {"shape": [4] + [1] * 64},
        {"shape": [2**62, 2**62, 0], "data_offsets": [0, 0]},
        {"data_offsets": [2**70, 2**70 + 4]},
        {"dtype": "x" * 1_000_000},
        {"name": "a" * 1_000_000},
        {"name": "a\x1b[2J"},
        {"name": "\ud800"},
    ],
    ids=["product of hours", "dimensions", "extents", "offsets", "type", "long name", "escapes", "surrogate"],
)
def test_header_that_lies_is_refused_in_one_short_sentence(tmp_path: Path, lies: dict[str, Any]) -> None:
    lying_file(tmp_path, **lies)
    with pytest.raises(WeightsError) as refused:
        open_folder(tmp_path)
    assert len(str(refused.value).removeprefix(str(tmp_path))) < 600
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", [SINGLE, INDEX])
def test_fifo_as_a_file_of_a_checkpoint_is_not_opened(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(WeightsError, match="it is no regular file"):
        open_folder(tmp_path)
