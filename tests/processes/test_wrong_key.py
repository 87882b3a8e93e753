"""A replica whose key file is not there: it says so before it loads a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 300.0
CONFIG = '[model]\npath = "{path}"\n\n[teacher]\npath = "{path}"\n'


@pytest.mark.parametrize("role", ["rollout", "teacher"])
def test_missing_key_is_found_before_the_model_is_read(role: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # and nothing of what a model needs
    (model / "model.safetensors").write_bytes(b"")
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(path=model))
    command = [sys.executable, "-m", "starling.cli.main", role, "--name", f"{role}-0", "--config", str(config)]
    command += ["--key", str(tmp_path / "none.json"), "--dir", str(tmp_path), "--controller", "tcp://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert f"the key file {tmp_path}/none.json cannot be read (No such file or directory)" in done.stderr
