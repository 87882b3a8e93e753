"""Digest by which policies that make steps together are found to compute the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starling.policy.shell.loading import PolicyProcess
from starling.policy.shell.peers import settings_digest

CONFIG = {"model_type": "qwen3", "max_position_embeddings": 512, "rope_parameters": {"rope_theta": 1e6}}


def digest(folder: Path, **changes: Any) -> str:
    """Return the digest of a policy whose model has a configuration with these changes."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return settings_digest(PolicyProcess(), folder)


@pytest.mark.parametrize(
    "changes", [{"max_position_embeddings": 8}, {"rope_parameters": {"rope_theta": 1e4}}, {"router_aux_loss_coef": 0.1}]
)
def test_another_configuration_of_the_model_has_another_digest(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert digest(tmp_path, **changes) != digest(tmp_path)


def test_copy_of_the_model_folder_has_the_same_digest(tmp_path: Path) -> None:
    """Where it is, which version of transformers wrote it, and the order of its entries do not matter."""
    copy = tmp_path / "copy"
    copy.mkdir()
    original = digest(tmp_path, transformers_version="4.57.0", _name_or_path="/models/a")
    assert digest(copy, _name_or_path="/models/b", transformers_version="5.0.0") == original


@pytest.mark.parametrize("changes", [{"publish_timeout_s": 10.0}, {"parallel": {"replica_timeout_s": 90.0}}])
def test_other_time_limits_of_a_step_have_another_digest(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Each policy waits for the others, which may wait for the readers of a snapshot."""
    original = digest(tmp_path)
    assert settings_digest(PolicyProcess.model_validate({"policy": changes}), tmp_path) != original
