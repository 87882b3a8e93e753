"""What the controller tells a process that joins: the sections of its role, and the small files of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from starling.common.folder_digests import DIGESTS
from starling.controller.settings import ControllerProcess
from starling.controller.shell import role_settings
from starling.controller.shell.role_settings import RoleSettingsSource

BASE = """
[run]
name = "one"
folder = "/somewhere"
[network]
host = "10.0.0.1"
port = 5555
lease_s = 7.0
[model]
path = "model"
[rollout]
num_slots = 3
[rollout.api]
key = "sk-1"
[reward]
[[reward.scorers]]
name = "exact"
[data]
source = "prompts.jsonl"
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RoleSettingsSource:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)
    (tmp_path / "more.toml").write_text("[rollout]\nmax_rows = 5\n[run]\nid = 'older'\n[controller]\nstart_s = 3.0\n")
    settings = ControllerProcess.model_validate({"data": {"source": "prompts.jsonl"}, "run": {"id": "one/1"}})
    return RoleSettingsSource([tmp_path / "base.toml", tmp_path / "more.toml"], settings)


def test_rollout_is_told_its_sections_without_secrets_and_addresses(source: RoleSettingsSource, tmp_path: Path) -> None:
    settings, buffers = source.answer("rollout", False)
    assert settings.sections == {
        "run": {"name": "one", "id": "one/1", "kind": "rl"},
        "network": {"lease_s": 7.0, "curve": True},
        "model": {"path": str(tmp_path / "model")},
        "rollout": {"num_slots": 3, "max_rows": 5, "api": {}},
    }
    assert settings.withheld == ("rollout.api.key",)
    assert (settings.files, buffers, settings.problem) == ((), (), "")


def test_reward_is_told_nothing_of_the_model(source: RoleSettingsSource) -> None:
    settings, _ = source.answer("reward", True)
    assert set(settings.sections) == {"run", "network", "reward"}
    assert settings.problem == "the model folder (none) is not on the controller's machine"


def test_file_that_cannot_be_read_is_a_problem_of_the_answer(source: RoleSettingsSource, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("[")
    settings, _ = source.answer("rollout", False)
    assert "more.toml is not valid TOML" in settings.problem
    (tmp_path / "more.toml").write_text("# nothing")
    assert source.answer("rollout", False)[0].problem == "", "it is read again"


def test_configuration_and_tokenizer_are_sent_and_no_code_or_weights(
    source: RoleSettingsSource, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    sent = {"config.json": b"{}", "tokenizer.json": b"[1]", "chat_template.jinja": b"x", "merges.txt": b"a b"}
    others = {"model.safetensors", "model.safetensors.index.json", "modeling.py", "README.md", DIGESTS, ".hidden.json"}
    for name, data in {**sent, **dict.fromkeys(others, b"other")}.items():
        (model / name).write_bytes(data)
    settings, buffers = source.answer("rollout", True)
    assert {file.name: data for file, data in zip(settings.files, buffers, strict=True)} == sent
    assert [file.nbytes for file in settings.files] == [len(data) for data in buffers]
    again = source.answer("rollout", True)[1]
    assert all(one is other for one, other in zip(buffers, again, strict=True)), "each is in memory once"


def test_model_of_too_many_bytes_is_not_sent(
    source: RoleSettingsSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(role_settings, "MAX_MODEL_BYTES", 3)
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_bytes(b"{}")
    settings, buffers = source.answer("rollout", True)
    assert (settings.files, buffers) == ((), ())
    assert "tokenizer.json is one file too many or too large to be sent" in settings.problem
