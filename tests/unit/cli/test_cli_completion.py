"""Completion scripts, run in the shells."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from starling.cli.main import main

BASH = """
source {script}
complete_line() {{
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _starling
  printf '%s\\n' "${{COMPREPLY[@]}}"
}}
complete_line {words}
"""
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PROMPT=; fpath=({folder} \\$fpath); autoload -Uz compinit; compinit -u -D; LISTMAX=0"
zpty -w shell "{load}; bindkey '^I' list-choices; print REA''DY"
while zpty -r shell line; do [[ $line = *READY* ]] && break; done
zpty -n -w shell '{line}'$'\\t'
text= deadline=$((SECONDS + 20))
while (( SECONDS < deadline )); do
  zpty -r -t shell line && text+=$line
  [[ $text = *{last}* ]] && break
  sleep 0.05
done
print -r -- $text
zpty -d shell
"""
CASES = (
    (("starling", "sta"), {"status"}),
    (
        ("starling", "s"),
        {"smoke", "settings", "scale", "scratch", "serve", "status", "set", "stop", "sync-report", "sim"},
    ),
    (("starling", "run", "--dry"), {"--dry-run"}),
    (("starling", "keys", "re"), {"revoke"}),
    (("starling", "completion", "z"), {"zsh"}),
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder without files, which a shell would also offer."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def script_for(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = folder / "_starling"
    path.write_text(capsys.readouterr().out)
    return path


def output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.mark.parametrize(("words", "expected"), CASES)
def test_bash_completes(
    words: tuple[str, ...], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_for("bash", tmp_path, capsys)
    text = output_of("bash", "--norc", "-c", BASH.format(script=script, words=" ".join(words)))
    assert {word.strip() for word in text.splitlines() if word.strip()} == expected


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
@pytest.mark.parametrize(("words", "expected"), CASES)
def test_fish_completes(
    words: tuple[str, ...], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = script_for("fish", tmp_path, capsys)
    text = output_of("fish", "--no-config", "-c", f"source {script}; complete -C '{' '.join(words)}'")
    assert {line.partition("\t")[0] for line in text.splitlines() if line} == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize("load", ["true", "source {folder}/_starling"], ids=["from fpath", "sourced"])
def test_zsh_completes(load: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script_for("zsh", tmp_path, capsys)
    load = load.format(folder=tmp_path)
    for line, last in (("starling sta", "status"), ("starling run --dry", "--dry-run"), ("starling keys re", "revoke")):
        text = output_of("zsh", "-f", "-c", ZSH.format(folder=tmp_path, load=load, line=line, last=last))
        assert last in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_install_writes_the_script(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZSH_CUSTOM", "ZDOTDIR", "ZSH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["completion", shell, "--install"]) == 0
    path = Path(capsys.readouterr().out.removeprefix("wrote ").partition(";")[0])
    assert path.is_relative_to(tmp_path)
    assert "sync-report" in path.read_text()
