"""Runs every scenario file of this folder and compares the controller's output; see README.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from language import Block, format_scenario, parse, play

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_scenario(file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = file.read_text()
    played = format_scenario(play(parse(text), tmp_path))
    if request.config.getoption("--regenerate", default=False):
        file.write_text(played)
    else:
        assert text == played, "the output has changed; if that is intended: pytest tests/scenarios --regenerate"


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_scenario_with_a_compacted_journal(file: Path, tmp_path: Path) -> None:
    text = file.read_text()
    assert text == format_scenario(play(parse(text), tmp_path, compacts=True))


def test_scenario_begins_with_a_comment() -> None:
    assert FILES
    assert [file.name for file in FILES if not file.read_text().startswith("# ")] == []


@pytest.mark.parametrize(
    ("event", "problem"),
    [
        ("rollout-0 joins", "comes before the plan"),
        ("plan\nrollout-0 beats", "rollout-0 has not joined"),
        ("plan\nrollout-0 dances", "is not understood"),
        ("plan\nrollout-0 joins\nrollout-0 generates t0", "rollout-0 was never given generate:t0"),
        ("plan\ncrash politely", "a crash leaves things 'unsaid'"),
    ],
)
def test_invalid_event_is_rejected(event: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        play([Block(events=event.split("\n"))], tmp_path)


def test_block_without_separator_is_rejected() -> None:
    with pytest.raises(ValueError, match="has no ----"):
        parse("plan\nrollout-0 joins\n")
