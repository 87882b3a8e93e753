"""Digest of the checkpoint of a run without a policy, as the controller reads it in a thread."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from starling.common.errors import ConfigError
from starling.common.folder_digests import DIGESTS, model_digest
from starling.controller.settings import ControllerProcess
from starling.controller.shell.checkpoint import CheckpointReader, read_checkpoint

WAIT_S = 60.0


def settings(kind: str, path: str) -> ControllerProcess:
    """Return the settings of a controller of a run of this kind, with a model folder at `path`."""
    tree = {"run": {"kind": kind}, "data": {"source": "rows.jsonl"}, "controller": {"model_path": path}}
    return ControllerProcess.model_validate(tree)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Create a folder with the files of a model."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def begin(folder: Path) -> tuple[CheckpointReader, threading.Event]:
    """Begin to read `folder`; the event is set once there is a result."""
    done = threading.Event()
    reader = read_checkpoint(settings("infer", str(folder)), done.set)
    assert reader is not None
    return reader, done


def test_reader_returns_the_digest_of_the_folder_once(model: Path) -> None:
    reader, done = begin(model)
    assert done.wait(WAIT_S)
    assert reader.take("") == model_digest(model)
    assert reader.take("") is None


def test_reader_accepts_the_folder_that_the_run_began_with(model: Path) -> None:
    reader, done = begin(model)
    assert done.wait(WAIT_S)
    assert reader.take(model_digest(model)) == model_digest(model)


def test_reader_refuses_another_folder_than_the_run_began_with(model: Path) -> None:
    reader, done = begin(model)
    assert done.wait(WAIT_S)
    with pytest.raises(ConfigError) as caught:
        reader.take("a" * 32)
    assert str(caught.value) == (
        f"the checkpoint in {model} is not that of this run: its digest is {model_digest(model)}, and the run began "
        f"with {'a' * 32}; restore it, or begin a new run"
    )


def test_reader_logs_that_the_folder_cannot_be_read(model: Path) -> None:
    (model / DIGESTS).write_text("[")
    with capture_logs() as logs:
        reader, done = begin(model)
        assert done.wait(WAIT_S)
    assert reader.take("a" * 32) == ""
    [line] = logs
    assert (line["event"], line["log_level"]) == ("checkpoint_not_read", "warning")
    assert f"the files of the model folder {model} cannot be read" in line["reason"]


def test_path_that_cannot_be_looked_at_is_logged(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert read_checkpoint(settings("infer", str(tmp_path / ("x" * 300))), lambda: None) is None
    assert [(line["event"], line["log_level"]) for line in logs] == [("checkpoint_not_read", "warning")]
    assert logs[0]["reason"].endswith("cannot be read (File name too long)")


@pytest.mark.parametrize("path", ["", "{folder}/elsewhere", "{folder}/config.json", "{folder}/empty"])
def test_no_checkpoint_is_read_without_a_model_folder(path: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    with capture_logs() as logs:
        assert read_checkpoint(settings("infer", path.format(folder=tmp_path)), lambda: None) is None
    assert logs == []


def test_no_checkpoint_is_read_in_a_run_with_a_policy(model: Path) -> None:
    assert read_checkpoint(settings("rl", str(model)), lambda: None) is None
