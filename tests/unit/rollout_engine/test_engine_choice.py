"""Tests of the engine registry, and of the limit on engine restarts."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from conformance import make_folder, spec_of

from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest
from starling.common.observe.process import StopSignal
from starling.rollout.engine.base import EngineLostError, EngineSpec
from starling.rollout.engine.embedded.engine import TransformersEngine
from starling.rollout.engine.registry import make_engine
from starling.rollout.shell.engines import EngineFactory

DOOMED = '''
from pathlib import Path

from starling.rollout.engine.base import EngineLostError

MADE = Path(__file__).with_name("made")
REFUSES = Path(__file__).with_name("refuses")


class Doomed:
    """An engine that counts its instances, and whose constructor fails while a file exists."""

    def __init__(self, spec):
        with MADE.open("a") as file:
            file.write("o")
        if REFUSES.exists():
            REFUSES.unlink()
            raise EngineLostError("it did not start")

    def close(self):
        with MADE.open("a") as file:
            file.write("x")
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model") / "tiny")


def spec(folder: Path, engine: str, **rollout: Any) -> EngineSpec:
    return spec_of(folder, {"engine": engine, **rollout}, lambda: None)


def test_make_engine_builds_the_embedded_engine_by_name(folder: Path) -> None:
    engine = make_engine(spec(folder, "transformers"))
    assert isinstance(engine, TransformersEngine)
    assert engine.version == 0
    assert make_engine(spec(folder, "transformers", load_weights=False)).version == -1


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("transformer", "rollout.engine = 'transformer' is not an engine; did you mean 'transformers'?"),
        ("sglang-x", "choose transformers, vllm, diffusion, or `module:Class` for your own"),
        ("nowhere.py:Mine", "there is no file"),
        ("json:Mine", "Engine 'json:Mine': no 'Mine' in there"),
    ],
)
def test_make_engine_unknown_name_suggests_the_nearest(folder: Path, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"engine|Engine") as raised:
        make_engine(spec(folder, name))
    assert complaint in str(raised.value)


def test_engine_factory_restarts_are_limited(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "doomed.py").write_text(DOOMED)
    engines = EngineFactory(spec(folder, f"{tmp_path / 'doomed.py'}:Doomed", max_engine_restarts=2))
    engine = engines.make()
    engine = engines.replace(engine, EngineLostError("it died"), StopSignal())
    (tmp_path / "refuses").touch()
    with pytest.raises(EngineLostError, match=r"restarted 2 times within 600 s already .*: it did not start"):
        engines.replace(engine, EngineLostError("it died again"), StopSignal())
    assert (tmp_path / "made").read_text() == "oxoxo", "each engine was closed before the next"


def test_engine_factory_refuses_a_checkpoint_that_changed_before_a_restart(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    engines = EngineFactory(dataclasses.replace(spec(own, "transformers"), has_own_weights=True))
    engine = engines.make()
    assert engines.checkpoint == model_digest(own)
    engine = engines.replace(engine, EngineLostError("it died"), StopSignal())
    with (own / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ConfigError, match=rf"{own} has changed .* its digest was {engines.checkpoint}, and now it is"):
        engines.replace(engine, EngineLostError("it died again"), StopSignal())


def test_engine_factory_reads_no_checkpoint_that_a_policy_sends(folder: Path) -> None:
    engines = EngineFactory(spec(folder, "transformers"))
    engines.make()
    assert engines.checkpoint == ""


def test_engine_factory_old_restarts_do_not_count(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "doomed.py").write_text(DOOMED)
    name = f"{tmp_path / 'doomed.py'}:Doomed"
    engines = EngineFactory(spec(folder, name, max_engine_restarts=1, engine_restart_window_s=1e-6))
    engine = engines.make()
    for _ in range(3):
        engine = engines.replace(engine, EngineLostError("it died"), StopSignal())
    assert (tmp_path / "made").read_text() == "o" + "xo" * 3
