"""The live screen of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_disk import disk

from starling.cli.console import Console
from starling.cli.recipe.schema import Recipe
from starling.cli.run.screen import LiveScreen, PlainScreen
from starling.common.settings import load
from starling.common.wire.telemetry import RunSnapshot

QUICKSTART = Path(__file__).parents[3] / "recipes/quickstart.toml"


def shown(snapshot: RunSnapshot) -> str:
    """Return the text of the screen."""
    screen = LiveScreen(load(Recipe, [QUICKSTART]), Path("runs/demo"))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(screen._draw(snapshot))
    return captured.get()


def test_live_screen_shows_active_alarms() -> None:
    """Literally, because brackets are no markup."""
    snapshot = RunSnapshot(
        phase="rl", version=2, last_step=5, num_supervised_steps=0, elapsed_s=1.0, waiting_for="the policy"
    )
    assert "alarm" not in shown(snapshot)
    changed = RunSnapshot(
        phase="rl",
        version=2,
        last_step=5,
        num_supervised_steps=0,
        elapsed_s=1.0,
        waiting_for="the policy",
        alarms=("clip: 0.7 against a bound of 0.5 since step 12: most [tokens] are clipped",),
    )
    assert "clip: 0.7 against a bound of 0.5 since step 12: most [tokens] are clipped" in shown(changed)


def test_names_of_scores_are_no_markup() -> None:
    """A closing tag that closes nothing would end the screen, and `starling run` with it."""
    summary = {"version": 1.0, "num_prompts": 2.0, "reward_mean": 0.5, "score/[/green]": 0.25, "eval_score/j": 0.125}
    snapshot = RunSnapshot(
        phase="rl",
        version=2,
        last_step=5,
        num_supervised_steps=0,
        elapsed_s=1.0,
        waiting_for="the policy",
        rewards=(0.25, 0.5),
        evaluations=(summary,),
    )
    text = shown(snapshot)
    assert "version 1: reward 0.500 on 2 prompts ([/green] 0.250, evaluation score j 0.125)" in text
    assert "0.375  ▁█" in text


def test_plain_screen_prints_each_evaluation_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A snapshot has the last evaluations only, however many there were."""
    screen = PlainScreen(load(Recipe, [QUICKSTART]))
    for first, last in ((1, 2), (1, 2), (1, 3), (2, 4), (8, 10)):
        evaluations = tuple(
            {"version": float(version), "reward_mean": 0.5, "k": 1.0, "num_prompts": 2.0, "num_failed": 0.0}
            for version in range(first, last + 1)
        )
        screen.show(
            RunSnapshot(
                phase="rl",
                version=0,
                last_step=20,
                num_supervised_steps=0,
                elapsed_s=1.0,
                waiting_for="the policy",
                evaluations=evaluations,
                num_evaluations=last,
            )
        )
    lines = [line for line in capsys.readouterr().out.splitlines() if "evaluation of version" in line]
    assert [int(line.split("version ")[1].split(":")[0]) for line in lines] == [1, 2, 3, 4, 8, 9, 10]


def test_plain_screen_on_a_full_disk_stops_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = PlainScreen(load(Recipe, [QUICKSTART]))
    with disk(tmp_path / "small", size_mb=1) as small:
        small.fill()
        with (small.folder / "out").open("w") as out:
            monkeypatch.setattr("sys.stdout", out)
            screen.line("rollout-0", "a line that is lost")
            small.free()
            screen.line("rollout-0", "a line that is shown")
            monkeypatch.undo()
        assert "a line that is shown" in (small.folder / "out").read_text()
