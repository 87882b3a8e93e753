"""Files of a run, from others, whose values are nested beyond what Python's stack holds: one sentence, or left out."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from starling.cli.evaluate.recipes import prompt_column
from starling.common.errors import ConfigError, WeightsError
from starling.common.net.curve import load_key
from starling.controller.data.trajectories import intact_lines, line_of_file, read_index
from starling.controller.shell.journal.database import as_config_error
from starling.controller.shell.journal.rows import Place, decode
from starling.controller.shell.recording.format import FIRST_LINE, read_recording
from starling.policy.train.checkpoint.header import DamagedStateError, find_state, read_header
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.model.load import load_model
from starling.weightsync.plan.topology import decode_topology

DEPTH = 100_000
JSON = b'{"x": ' + b"[" * DEPTH + b"]" * DEPTH + b"}\n"
PACKED = b"\x81\xa1x" + b"\x91" * DEPTH + b"\xc0"
"""The same in MessagePack: a map with one key, which no reader knows."""


def index(folder: Path) -> None:
    (folder / "index.jsonl").write_bytes(JSON)
    assert intact_lines(folder) == []
    read_index(folder)


def recording(folder: Path) -> None:
    path = folder / "events-1.rec"
    path.write_bytes(FIRST_LINE + struct.pack("<II", len(PACKED), zlib.crc32(PACKED)) + PACKED)
    read_recording(path)


def journal(folder: Path) -> None:
    with as_config_error(folder / "journal.sqlite"):
        decode(PACKED, Place(0, may_be_unbound=True))


def key(folder: Path) -> None:
    path = folder / "rollout-0.json"
    path.write_bytes(JSON)
    path.chmod(0o600)
    load_key(path)


def state(folder: Path) -> None:
    (folder / "state.json").write_bytes(JSON)
    read_header(Storage(str(folder)))


def model(folder: Path) -> None:
    (folder / "config.json").write_bytes(JSON)
    load_model(folder)


def topology(folder: Path) -> None:
    decode_topology(f"x = {'[' * DEPTH}{']' * DEPTH}")


@pytest.mark.parametrize("read", [index, recording, journal, key, state, model, topology])
def test_deep_values_are_one_sentence(tmp_path: Path, read: Callable[[Path], None]) -> None:
    with pytest.raises((ConfigError, DamagedStateError, WeightsError)) as caught:
        read(tmp_path)
    assert len(str(caught.value)) < 1000


def test_deep_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "step-000001.msgpack").write_bytes(PACKED)
    assert line_of_file(tmp_path / "step-000001.msgpack", "run") is None
    (tmp_path / "rows.jsonl").write_bytes(JSON)
    assert prompt_column(tmp_path / "rows.jsonl") == "messages"
    (tmp_path / "states" / "version-3").mkdir(parents=True)
    (tmp_path / "states" / "version-3" / "state.json").write_bytes(JSON)
    with pytest.raises(ConfigError, match="there is no intact state"):
        find_state(str(tmp_path))
