"""Cache of embeddings: shared by processes, killed in the middle of a write, damaged, and read without an encoder."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import forked
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from structlog.testing import capture_logs
from tiny_diffusion import FAMILIES
from tiny_text import save_pipeline

from starling.algo.diffusion.folder import PipelineFolder, read_pipeline
from starling.algo.diffusion.text.cache import CachedEmbedder
from starling.algo.diffusion.text.embedder import PipelineEmbedder
from starling.common.errors import ConfigError
from starling.common.wire.tensors import POOLED, TEXT

PROMPTS = ["a cat", "", "a dog", "a cat"]


def embedder_of(folder: PipelineFolder, **settings: Any) -> PipelineEmbedder:
    return PipelineEmbedder(folder, **{"dtype": torch.float32, **settings})


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> PipelineFolder:
    return save_pipeline(tmp_path_factory.mktemp("wan"), "wan")


def assert_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, array in other.items():
            assert one[name].dtype == array.dtype == np.float32
            np.testing.assert_array_equal(one[name], array)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_in_the_cache_need_no_text_encoder(name: str, tmp_path: Path) -> None:
    folder = save_pipeline(tmp_path / "pipeline", name)
    computed = embedder_of(folder)
    expected = {unconditional: computed.embed(PROMPTS, unconditional=unconditional) for unconditional in (False, True)}
    for is_first in (True, False):
        embedder = embedder_of(folder)
        cached = CachedEmbedder(embedder, tmp_path / "cache")
        for unconditional in (False, True):
            assert_same(cached.embed(PROMPTS, unconditional=unconditional), expected[unconditional])
        assert embedder.is_loaded == is_first


def test_cached_run_does_not_import_transformers(wan: PipelineFolder, tmp_path: Path) -> None:
    CachedEmbedder(embedder_of(wan), tmp_path).embed(PROMPTS)
    program = f"""
import sys, torch
from pathlib import Path
from starling.algo.diffusion.folder import read_pipeline
from starling.algo.diffusion.text.cache import CachedEmbedder
from starling.algo.diffusion.text.embedder import PipelineEmbedder
embedder = PipelineEmbedder(read_pipeline(Path({str(wan.path)!r})), dtype=torch.float32)
print(len(CachedEmbedder(embedder, Path({str(tmp_path)!r})).embed({PROMPTS!r})), "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["4", "False"], done.stderr


def test_file_has_the_shortest_type_without_loss(wan: PipelineFolder, tmp_path: Path) -> None:
    sizes = {}
    for dtype in (torch.float32, torch.bfloat16):
        cached = CachedEmbedder(embedder_of(wan, dtype=dtype), tmp_path)
        assert_same(cached.embed(["a cat"]), embedder_of(wan, dtype=dtype).embed(["a cat"]))
        (tensors,) = cached.embed(["a cat"])
        sizes[dtype] = cached.path_of("a cat").stat().st_size - len(tensors[TEXT]) * 12 * dtype.itemsize
    assert max(sizes.values()) < 400, "what is not numbers"


def test_key_names_what_embeddings_depend_on(wan: PipelineFolder, tmp_path: Path) -> None:
    sana = save_pipeline(tmp_path / "sana", "sana")

    def path_of(folder: PipelineFolder, prompt: str, unconditional: bool = False, **settings: Any) -> Path:
        cached = CachedEmbedder(embedder_of(folder, **settings), tmp_path / "cache")
        return cached.path_of(prompt, unconditional=unconditional)

    different = [
        path_of(wan, "a cat"),
        path_of(wan, "a dog"),
        path_of(wan, "a cat", dtype=torch.bfloat16),
        path_of(sana, "a cat"),
        path_of(sana, "a cat", unconditional=True),
    ]
    assert len(set(different)) == len(different)
    assert path_of(sana, "a cat", unconditional=True) == path_of(sana, " A Cat", instruct=False)
    assert path_of(wan, "a cat") == path_of(wan, " a \n cat", unconditional=True)
    copied = tmp_path / "copied"
    shutil.copytree(wan.path, copied)
    assert path_of(read_pipeline(copied), "a cat") == different[0]
    for part in ("text_encoder/config.json", "tokenizer/tokenizer.json"):
        with (copied / part).open("a") as file:
            file.write("\n")
        changed = path_of(read_pipeline(copied), "a cat")
        assert changed not in different
        different.append(changed)


@examples(60)
@given(st.data())
def test_damaged_file_is_computed_anew_and_replaced(
    wan: PipelineFolder, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    embedder = embedder_of(wan)
    cached = CachedEmbedder(embedder, folder)
    expected, path = cached.embed(["a cat"]), cached.path_of("a cat")
    right = path.read_bytes()
    kind = data.draw(st.sampled_from(["flipped", "cut", "longer", "other", "zeros"]))
    if kind == "flipped":
        position = data.draw(st.integers(0, 8 * len(right) - 1))
        damaged = bytearray(right)
        damaged[position // 8] ^= 1 << position % 8
    elif kind == "cut":
        damaged = bytearray(right[: data.draw(st.integers(0, len(right) - 1))])
    elif kind == "longer":
        damaged = bytearray(right + data.draw(st.binary(min_size=1, max_size=9)))
    elif kind == "other":
        cached.embed(["a dog"])
        damaged = bytearray(cached.path_of("a dog").read_bytes())
    else:
        damaged = bytearray(len(right))
    path.write_bytes(damaged)
    with capture_logs() as logs:
        assert_same(cached.embed(["a cat"]), expected)
        path.write_bytes(damaged)
        assert_same(cached.embed(["a cat"]), expected)
    if path.read_bytes() != right:  # a flipped bit of the header's spaces
        assert_same(CachedEmbedder(embedder, folder).embed(["a cat"]), expected)
    assert [one["event"] for one in logs] in (["embeddings_computed_anew"], [])
    if kind != "flipped":
        assert len(logs) == 1
        assert path.read_bytes() == right


def embed_in_child(pipeline: Path, folder: Path, max_bytes: int, is_killed: bool, pipe: Connection) -> None:
    """Embed prompts; a write stops at `max_bytes` of a file, by a signal that kills or as on a full disk."""
    torch.set_num_threads(1)
    embedder = embedder_of(read_pipeline(pipeline))
    embedder.embed(["load"])  # which writes progress to stderr, perhaps a file
    cached = CachedEmbedder(embedder, folder)
    pipe.send("ready")
    pipe.recv()
    if max_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL if is_killed else signal.SIG_IGN)
    with capture_logs() as logs:
        found = cached.embed(PROMPTS)
    pipe.send([tensors[TEXT].tolist() for tensors in found])
    pipe.send([one["event"] for one in logs])
    pipe.close()


def test_concurrent_writers_leave_whole_files(wan: PipelineFolder, tmp_path: Path) -> None:
    expected = embedder_of(wan).embed(PROMPTS)
    arguments = (embed_in_child, wan.path, tmp_path, 0, False)
    with forked(*arguments) as one, forked(*arguments) as two, forked(*arguments) as three:
        children = [one, two, three]
        for child in children:
            assert next(child.received()) == "ready"
        for child in children:
            child.pipe.send("go")
        for child in children:
            texts, events = child.received()
            assert texts == [tensors[TEXT].tolist() for tensors in expected]
            assert events == []
            assert child.exit_code() == 0
    embedder = embedder_of(wan)
    assert_same(CachedEmbedder(embedder, tmp_path).embed(PROMPTS), expected)
    assert not embedder.is_loaded
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == len(set(PROMPTS))


@pytest.mark.parametrize("max_bytes", [1, 100, 300])
def test_writer_that_is_killed_leaves_no_part_of_a_file(max_bytes: int, wan: PipelineFolder, tmp_path: Path) -> None:
    with forked(embed_in_child, wan.path, tmp_path, max_bytes, True) as child:
        assert next(child.received()) == "ready"
        child.pipe.send("go")
        assert list(child.received()) == []
        assert child.exit_code() == -signal.SIGXFSZ
    (partial,) = tmp_path.glob("*/*")
    assert partial.suffix == ".partial"
    assert partial.stat().st_size == max_bytes
    with capture_logs() as logs:
        cached = CachedEmbedder(embedder_of(wan), tmp_path)
        assert_same(cached.embed(PROMPTS), embedder_of(wan).embed(PROMPTS))
    assert logs == []
    assert partial.exists(), "its writer may still be there"
    os.utime(partial, (0, 0))
    CachedEmbedder(embedder_of(wan), tmp_path)
    assert not partial.exists()


def test_full_disk_is_reported_once_and_embeddings_are_returned(wan: PipelineFolder, tmp_path: Path) -> None:
    with forked(embed_in_child, wan.path, tmp_path, 100, False) as child:
        assert next(child.received()) == "ready"
        child.pipe.send("go")
        texts, events = child.received()
        assert child.exit_code() == 0
    assert texts == [tensors[TEXT].tolist() for tensors in embedder_of(wan).embed(PROMPTS)]
    assert events == ["embeddings_not_cached"]
    assert not list(tmp_path.glob("*/*"))


def test_no_file_stays_open(wan: PipelineFolder, tmp_path: Path) -> None:
    cached = CachedEmbedder(embedder_of(wan), tmp_path)
    cached.embed(["a"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        cached.embed([f"a cat {number}" for number in range(20)])
    assert len(os.listdir("/proc/self/fd")) == before


def test_cache_that_is_no_folder_is_refused(wan: PipelineFolder, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(ConfigError, match=r"the cache of embeddings .* cannot be used \(File exists\)"):
        CachedEmbedder(embedder_of(wan), tmp_path / "cache")


def test_pooled_embeddings_are_cached(tmp_path: Path) -> None:
    cached = CachedEmbedder(embedder_of(save_pipeline(tmp_path / "sd3", "sd3")), tmp_path / "cache")
    first, again = cached.embed(["a"]), cached.embed(["a"])
    assert first[0].keys() == {TEXT, POOLED}
    assert_same(again, first)
