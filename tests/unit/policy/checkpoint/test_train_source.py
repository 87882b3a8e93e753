"""Model folders in S3 and elsewhere: fetched whole, checked, and removed after the model is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest, write_digests
from starling.policy.train.checkpoint import storage
from starling.policy.train.checkpoint.source import whole_model
from starling.policy.train.model.load import load_model

CREDENTIALS = {"key": "testing", "secret": "testing"}
URL = "s3://models/tiny"


@pytest.fixture
def model(tiny: Any, tmp_path: Path) -> Path:
    """Return the folder of a small model, in several files and with digests."""
    folder = tmp_path / "whole"
    tiny().save_pretrained(folder, max_shard_size="20KB")
    (folder / "notes.md").write_text("has a digest, too")
    write_digests(folder)
    return folder


@pytest.fixture
def options(endpoint: str, model: Path) -> Iterator[dict[str, Any]]:
    """Return the options of a store that has the model."""
    import s3fs

    options = {"endpoint_url": endpoint, **CREDENTIALS}
    store = s3fs.S3FileSystem(**options)
    store.mkdir("models")
    for file in model.iterdir():
        store.put_file(str(file), f"models/tiny/{file.name}")
    yield options
    store.rm("models", recursive=True)


@pytest.fixture
def local(model: Path, tmp_path: Path) -> Path:
    """Return a folder without weights."""
    folder = tmp_path / "local"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "starling-digests.json"))
    return folder


def test_model_of_s3_is_that_of_its_folder(options: dict[str, Any], model: Path, local: Path, tmp_path: Path) -> None:
    place = tmp_path / ".weights-policy-0"
    place.mkdir()
    (place / "model.safetensors").write_text("of a process that was killed")
    with whole_model(local, URL, options, place) as folder:
        assert folder == place
        assert model_digest(folder) == model_digest(model)
        loaded = load_model(folder).state_dict()
    assert not place.exists()
    expected = load_model(model).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_without_url_the_folder_itself_is_read(local: Path, tmp_path: Path) -> None:
    with whole_model(local, "", {}, tmp_path / "place") as folder:
        assert folder == local


def test_folder_of_this_machine_may_be_the_source(model: Path, local: Path, tmp_path: Path) -> None:
    with whole_model(local, str(model), {}, tmp_path / "place") as folder:
        assert load_model(folder).num_parameters() > 0


def _upload(file: Path, options: dict[str, Any], data: bytes | None = None) -> None:
    import s3fs

    store = s3fs.S3FileSystem(**options)
    store.pipe_file(f"models/tiny/{file.name}", file.read_bytes() if data is None else data)
    store.invalidate_cache()


def refusal(local: Path, options: dict[str, Any], place: Path, url: str = URL) -> str:
    """Return why the model at `url` is refused; nothing is left behind."""
    with pytest.raises(ConfigError) as caught, whole_model(local, url, options, place):
        pass
    assert not place.exists()
    return str(caught.value)


def test_model_without_weights_or_configuration_is_refused(
    options: dict[str, Any], model: Path, local: Path, tmp_path: Path
) -> None:
    assert "has no config.json; give the folder of a whole" in refusal(
        local, options, tmp_path / "place", "s3://models/no"
    )
    assert "has no weights; give the folder" in refusal(local, {}, tmp_path / "place", str(local))


def test_model_of_another_configuration_is_refused(options: dict[str, Any], local: Path, tmp_path: Path) -> None:
    (local / "config.json").write_text("{}")
    text = refusal(local, options, tmp_path / "place")
    assert f"{URL}/config.json differs from {local / 'config.json'}; policy.weights_from and model.path must be" in text


def test_damaged_file_is_refused(options: dict[str, Any], model: Path, local: Path, tmp_path: Path) -> None:
    weights = min(model.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    _upload(weights, options, bytes(data))
    assert f"{URL}/{weights.name} does not match its digest" in refusal(local, options, tmp_path / "place")


def test_unreachable_store_is_one_sentence(options: dict[str, Any], local: Path, tmp_path: Path) -> None:
    impatient = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 1}}}
    text = refusal(local, {**options, **impatient}, tmp_path / "place")
    assert f"{URL} cannot be listed (" in text


def test_only_weights_are_fetched(options: dict[str, Any], model: Path, local: Path, tmp_path: Path) -> None:
    # A user with write access there must not decide what code or configuration a policy runs.
    (local / "modeling_tiny.py").write_text("ours = True")
    (local / "tokenizer.json").write_text("{}")
    for name in ("modeling_tiny.py", "configuration_tiny.py", "adapter_config.json", "tokenizer.json"):
        _upload(model / name, options, b"theirs = True")
    with whole_model(local, URL, options, tmp_path / "place") as folder:
        _upload(model / "config.json", options, b'{"attn_implementation": "owner/kernel"}')  # after it was compared
        weights = {file.name for file in model.glob("*.safetensors*")}
        others = {file.name for file in local.iterdir() if file.name.endswith((".json", ".py"))}
        assert {file.name for file in folder.iterdir()} == weights | others | {"starling-digests.json"}
        assert (folder / "modeling_tiny.py").read_text() == "ours = True"
        assert (folder / "config.json").read_bytes() == (local / "config.json").read_bytes()


def test_configuration_without_end_is_refused(
    options: dict[str, Any], model: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_SMALL_BYTES", 1000)
    _upload(model / "config.json", options, b" " * 1001)
    _upload(model / "starling-digests.json", options, b"{}")
    assert "config.json cannot be read (it has more than 1000 bytes)" in refusal(local, options, tmp_path / "place")


@pytest.mark.parametrize("form", ["{there}/{name}", "../whole/{name}"])
def test_index_of_weights_elsewhere_is_refused(model: Path, tmp_path: Path, form: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (index,) = copy.glob("*.index.json")
    content = json.loads(index.read_text())
    named = {tensor: form.format(there=model, name=name) for tensor, name in content["weight_map"].items()}
    index.write_text(json.dumps({**content, "weight_map": named}))
    with pytest.raises(ConfigError, match=r"index\.json names .*, which is no file beside it"):
        load_model(copy)


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.timeout(60)
def test_weights_that_are_no_files_are_refused(model: Path, local: Path, tmp_path: Path, kind: str) -> None:
    name = max(file.name for file in model.glob("*.safetensors"))
    (model / name).unlink()
    if kind == "fifo":
        os.mkfifo(model / name)
    else:
        (model / name).symlink_to("/dev/zero")
    text = refusal(local, {}, tmp_path / "place", str(model))
    assert f"{name} cannot be read (" in text
    assert text.endswith("check the folder and its permissions, or choose another folder")
