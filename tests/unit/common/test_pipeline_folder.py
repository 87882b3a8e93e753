"""Folders of diffusion pipelines: those that are refused before anything of them is loaded, and their digest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest, write_digests
from starling.common.pipeline_folder import check_pipeline_folder

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "pipeline"
    for part in ("transformer", "vae", "text_encoder"):
        (path / part).mkdir(parents=True)
        (path / part / "config.json").write_text("{}")
        (path / part / WEIGHTS).write_bytes(part.encode())
    index = {part: ["diffusers", "AClass"] for part in ("transformer", "vae", "text_encoder")}
    (path / "model_index.json").write_text(json.dumps({"_class_name": "APipeline", **index}))
    return path


def test_a_whole_pipeline_is_accepted(folder: Path) -> None:
    assert check_pipeline_folder(str(folder), weights=True) == folder
    (folder / "transformer" / WEIGHTS).unlink()
    assert check_pipeline_folder(str(folder), weights=False) == folder
    with pytest.raises(ConfigError, match=r'no weights; add its .safetensors, or set policy.init = "random"'):
        check_pipeline_folder(str(folder), weights=True)
    with pytest.raises(ConfigError, match=r"no weights; add its .safetensors$"):
        check_pipeline_folder(str(folder), weights=True, may_draw=False)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("model_index.json", r"has no model_index.json, and \[diffusion\] needs a pipeline"),
        ("transformer/config.json", "has no transformer/config.json; give the folder of a pipeline"),
        ("vae/config.json", "has no vae/config.json"),
    ],
)
def test_a_folder_without_a_part_is_refused(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        check_pipeline_folder(str(folder), weights=False)


def test_what_is_no_folder_or_no_index_is_refused(folder: Path) -> None:
    for path, message in (("", "model.path is missing"), (f"{folder}x", "does not exist")):
        with pytest.raises(ConfigError, match=message):
            check_pipeline_folder(path, weights=False)
    (folder / "model_index.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"model_index.json cannot be read \(it is no object of JSON\)"):
        check_pipeline_folder(str(folder), weights=False)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder"])
def test_a_part_that_names_other_files_is_refused(folder: Path, tmp_path: Path, part: str) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    config = folder / part / "config.json"
    config.write_text(json.dumps({"weights_of": str(other)}))
    with pytest.raises(ConfigError, match=rf"{part}/config.json has weights_of = .*outside of the folder"):
        check_pipeline_folder(str(folder), weights=False)
    config.unlink()
    config.symlink_to(other)
    with pytest.raises(ConfigError, match=rf"{part}/config.json is a link to {other}, outside of the model folder"):
        check_pipeline_folder(str(folder), weights=False)
    config.unlink()
    config.write_text("{}")
    index = folder / part / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../../other.safetensors"}}))
    with pytest.raises(ConfigError, match=r"names '../../other.safetensors', which is no file beside it"):
        check_pipeline_folder(str(folder), weights=False)


def test_parts_may_link_to_each_other_and_into_the_cache_of_a_hub(folder: Path, tmp_path: Path) -> None:
    (folder / "vae" / "config.json").unlink()
    (folder / "vae" / "config.json").symlink_to(folder / "transformer" / "config.json")
    check_pipeline_folder(str(folder), weights=True)
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    shutil.copytree(folder, snapshot)
    blob = tmp_path / "hub" / "blobs" / "1234"
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "vae" / "config.json").unlink()
    (snapshot / "vae" / "config.json").symlink_to(blob)
    check_pipeline_folder(str(snapshot), weights=True)


def test_the_files_of_all_parts_are_compared_with_their_digests(folder: Path) -> None:
    write_digests(folder)
    check_pipeline_folder(str(folder), weights=True)
    (folder / "vae" / "config.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"vae/config.json does not match its digest"):
        check_pipeline_folder(str(folder), weights=True)
    (folder / "vae" / "config.json").write_text("{}")
    (folder / "transformer" / WEIGHTS).write_bytes(b"damaged")
    check_pipeline_folder(str(folder), weights=True, reads_weights=False)
    with pytest.raises(ConfigError, match="does not match its digest"):
        check_pipeline_folder(str(folder), weights=True)


def test_the_digest_of_a_pipeline_covers_its_parts(folder: Path, tmp_path: Path) -> None:
    before = model_digest(folder)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / ".cache").mkdir()
    (copy / ".cache" / "a.lock").write_text("of a download")
    assert model_digest(copy) == before
    for part in ("transformer", "vae", "text_encoder"):
        (copy / part / WEIGHTS).write_bytes(b"other")
        assert model_digest(copy) != before
        (copy / part / WEIGHTS).write_bytes(part.encode())
    assert model_digest(copy) == before
