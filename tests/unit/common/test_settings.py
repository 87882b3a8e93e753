"""Configuration: precedence of its sources, and one sentence for each mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import Field

from starling.common.errors import ConfigError
from starling.common.settings import Seconds, ServiceSettings, SettingsSection, iter_settings, load
from starling.controller.settings import ControllerProcess


class EngineSettings(SettingsSection):
    """A section."""

    max_rows: int = Field(default=4, ge=1)
    """Most rows."""
    exclusive: bool = False
    """One group at a time."""
    names: tuple[str, ...] = ()
    """A list."""
    patience_s: Seconds | None = None
    """A limited number or none."""


class Process(ServiceSettings):
    """A process."""

    engine: EngineSettings = EngineSettings()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text('[run]\nname = "one"\n[engine]\nmax_rows = 5\nnames = ["a"]\n[policy]\nanything = 1\n')
    return path


OTHERS = ("policy",)


def test_files_stack_then_environment_then_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = file.with_name("second.toml")
    second.write_text("[engine]\nmax_rows = 6\n")
    assert load(Process, [file], others=OTHERS).engine.max_rows == 5
    settings = load(Process, [file, second], others=OTHERS)
    assert (settings.run.name, settings.engine.max_rows, settings.engine.names) == ("one", 6, ("a",))
    monkeypatch.setenv("STARLING_ENGINE__MAX_ROWS", "7")
    assert load(Process, [file, second], others=OTHERS).engine.max_rows == 7
    flags = ["--engine.max-rows=8", "--engine.exclusive", "--engine.names", '["b", "c"]', "--run.seed", "3"]
    settings = load(Process, [file, second], flags, others=OTHERS)
    assert settings.engine == EngineSettings(max_rows=8, exclusive=True, names=("b", "c"))
    assert settings.run.seed == 3


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--engine.max-row", "1"], "unknown setting engine.max_row = 1; did you mean engine.max_rows?"),
        (["--engin.max-rows", "1"], "unknown section engin; did you mean engine?"),
        (["--max-rows", "1"], "unknown setting max_rows = 1; did you mean engine.max_rows?"),
        (["--engine.max-rows", "many"], "engine.max_rows = 'many': Input should be a valid integer"),
        (["--engine.max-rows", "0"], "engine.max_rows = 0: Input should be greater than or equal to 1"),
        (["--engine.max-rows"], "--engine.max-rows needs a value"),
        (["max_rows", "3"], "'max_rows' is not a flag"),
        (["--run.name", "a/b"], "run.name: 'a/b' names a folder; use letters"),
    ],
)
def test_a_mistake_is_one_sentence_with_value_and_remedy(file: Path, flags: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        load(Process, [file], flags, others=OTHERS)
    assert "\n" not in str(caught.value)


def test_a_misspelt_variable_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARLING_ENGINE__MAXROWS", "7")
    with pytest.raises(ConfigError, match=r"did you mean engine.max_rows\? \(in the environment\)"):
        load(Process, [file], others=OTHERS)


def test_unreadable_file_is_one_sentence(tmp_path: Path, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"bse.toml does not exist; did you mean .*base.toml\?"):
        load(Process, [tmp_path / "bse.toml"])
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(Process, [broken])
    with pytest.raises(ConfigError, match="unknown section policy"):
        load(Process, [file])


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000, "{a = " * 3000])
def test_value_that_toml_cannot_read_is_one_sentence(file: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed"):
        load(Process, [file], ["--run.seed", value], others=OTHERS)
    file.write_text(f"[run]\nseed = {value}\n")
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(Process, [file], others=OTHERS)


@pytest.mark.parametrize(("text", "name"), [("1", "1"), ("true", "true"), ("2026-01-01", "2026-01-01"), ('"a"', "a")])
def test_name_on_the_command_line_may_look_like_another_value(text: str, name: str) -> None:
    assert load(Process, [], [f"--run.name={text}", "--run.folder", text]).run.name == name
    assert str(load(Process, [], ["--run.folder", text]).run.folder) == name


@pytest.mark.parametrize("seed", ["-1", "4294967296", "999999999999999999999999999999"])
def test_seed_is_within_its_range(file: Path, seed: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed"):
        load(Process, [file], ["--run.seed", seed], others=OTHERS)


def test_pipe_is_refused_as_a_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="is not a regular file; give the path of a TOML file"):
        load(Process, [tmp_path / "pipe.toml"])


def test_settings_are_frozen_and_described() -> None:
    settings = load(Process, [])
    with pytest.raises(ValueError, match="frozen"):
        settings.engine.max_rows = 3  # type: ignore[misc]
    help_texts = {key: text for key, _, _, text in iter_settings(Process)}
    assert help_texts["engine.max_rows"] == "Most rows."
    assert {key: type for key, type, _, _ in iter_settings(Process)}["engine.patience_s"] == "float | None"


def test_every_setting_of_every_service_has_a_help_text() -> None:
    from starling.cli.recipe.schema import Recipe

    bare = [key for schema in (ControllerProcess, Recipe) for key, _, _, text in iter_settings(schema) if not text]
    assert bare == []
