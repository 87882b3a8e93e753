"""`starling report` and `starling compare`: pages that are whole, self-contained, small and safe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from run_folders import BEGUN, check_page, evaluation_line, make_attempt, many_steps, step_line

from starling.cli.main import main
from starling.cli.run.attempt import Attempt
from starling.cli.runs.files.curves import Column
from starling.cli.runs.files.settings import DERIVED, changed_settings, default_settings, differing_settings
from starling.cli.runs.pages.svg import Series, axis, nice, plot, tick_text

HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(1)></pre></main>&lt;\x00\x1b[2J\u202e\ud800 ]]> --> </style>"
)
FAILED = {"kind": "waiting", "tries": 1, "reason": "scorer 'm' raised KeyError", "status": "reward_error"}
JOINED = {"kind": "joined", "replica": "rollout-0", "role": "rollout", "host": "node-a", "pid": 1}
LEFT = {"kind": "left", "replica": "rollout-0", "num_leases": 0}
ADOPTED = {
    "kind": "adopted",
    "replica": "rollout-0",
    "version": 5,
    "attested": True,
    "pull_s": 0.0321,
    "pause_s": 0.001,
    "size_bytes": 5_000_000,
    "transport": "ucx",
}
LINES: list[dict[str, Any]] = [
    {"time": BEGUN, **JOINED},
    *map(step_line, range(1, 40)),
    evaluation_line(20, 0.4),
    {"time": BEGUN + 5, "kind": "published", "version": 5, "publish_s": 0.002},
    {"time": BEGUN + 6, **ADOPTED},
    {"time": BEGUN + 7, "prompt": "a", **FAILED},
    {"time": BEGUN + 8, "prompt": "b", **FAILED},
    {"time": BEGUN + 9, "kind": "set", "key": "rl.max_staleness", "value": 3, "step": 10},
    {"time": BEGUN + 10, **LEFT, "reason": "no heartbeat for 10 s"},
    {"time": BEGUN + 12, **JOINED},
    {"time": BEGUN + 40, **LEFT, "reason": "it left: the run is over"},
]


def report(folder: Path, out: Path) -> str:
    assert main(["report", str(folder), "-o", str(out)]) == 0
    return check_page(out)


def test_report_has_every_table(tmp_path: Path) -> None:
    sample = {"prompt_id": "train/0/1", "prompt": "2+2=", "completion": "four", "reward": 0.5, "status": "ok"}
    settings = {"policy": {"optimizer": {"learning_rate": 0.00123}}}
    folder = make_attempt(tmp_path / "mine", LINES, samples={3: [sample]}, settings=settings)
    text = report(folder.parent, tmp_path / "report.html")
    for words in (
        *("mine", "grpo · small · p.jsonl", "the run is complete", "node-a", "no heartbeat for 10 s", "32.1"),
        *("scorer 'm' raised KeyError", "reward_error", "rl.max_staleness = 3 from step 10 on", "0.00123"),
        *("policy.optimizer.learning_rate", "2+2=", "four", "train/0/1", "Staleness", "Entropy", "KL divergence"),
    ):
        assert words in text, words
    page = (tmp_path / "report.html").read_text()
    assert "prefers-color-scheme:dark" in page
    assert page.count("<svg") == 8
    assert '<td class="n">2</td><td class="n">1</td><td class="n">1</td>' in page, "joined twice, left once, lost once"


def test_report_says_that_steps_were_made_again(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "mine", map(step_line, (1, 2, 3, 2, 3, 4)))
    assert "2 lines of steps that were made again" in report(folder, tmp_path / "report.html")


def test_report_is_written_into_the_folder_by_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_attempt(tmp_path / "mine", LINES)
    assert main(["report", str(folder.parent)]) == 0
    assert "report.html" in capsys.readouterr().out
    check_page(folder / "report.html")


def test_hostile_texts_are_text(tmp_path: Path) -> None:
    """Prompts, completions, names and reasons of others add no element, attribute or control character."""
    line = dict.fromkeys(("replica", "role", "host", "reason", "status", "key", "value", "cause", "transport"), HOSTILE)
    kinds = ("joined", "left", "waiting", "discarded", "set", "alarm", "invalid", HOSTILE)
    lines = [
        *LINES,
        *({**line, "kind": kind, HOSTILE: HOSTILE} for kind in kinds),
        {**line, **evaluation_line(30, 0.5), "cause": HOSTILE, f"score/{HOSTILE}": 1.0},
        step_line(40, phase=HOSTILE),
        {**ADOPTED, "replica": HOSTILE, "transport": HOSTILE},
    ]
    sample = {"prompt_id": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, f"score/{HOSTILE}": HOSTILE}
    folder = make_attempt(tmp_path / "mine", lines)
    with (folder / "samples.jsonl").open("w", errors="surrogatepass") as file:
        file.write(json.dumps({"step": HOSTILE, **sample}) + "\n" + json.dumps({"step": [HOSTILE]}) + "\n{")
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace('"models/small"', '"<script>alert(2)</script>"'))
    for number, arguments in enumerate((["report", str(folder)], ["compare", str(folder), str(other(tmp_path))])):
        out = tmp_path / f"{number}.html"
        assert main([*arguments, "-o", str(out)]) == 0
        text = check_page(out)
        page = out.read_text()
        assert "<script" not in page
        assert not any(character in page for character in "\x00\x1b\u202e")
        assert "<script>alert(2)</script>" in text
    assert HOSTILE[:24] in check_page(tmp_path / "0.html")


def other(tmp_path: Path) -> Path:
    return make_attempt(tmp_path / "other", map(step_line, range(1, 30)), settings={"rl": {"group_size": 4}})


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_short_runs_are_reported(num: int, tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "run", map(step_line, range(1, num + 1)))
    text = report(folder, tmp_path / "report.html")
    assert ("There is no step yet." in text) == (num == 0)


def test_report_of_a_hundred_thousand_steps_is_small(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "long", many_steps(100_000))
    text = report(folder, tmp_path / "report.html")
    assert "100000 steps" in text or "100,000 steps" in text
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    page = (tmp_path / "report.html").read_text()
    begin = page.index("<h3>Reward</h3>")
    assert ">6<" in page[begin : page.index("</figure>", begin)], "the axis reaches the single outlier at 5.5"


def test_compare_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, out = make_attempt(tmp_path / "mine", LINES), tmp_path / "comparison.html"
    assert main(["compare", str(mine.parent), str(other(tmp_path).parent), "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    for words in ("rl.group_size", "mine", "other", "reward", "entropy (nats)", "tokens/s", "settings that differ"):
        assert words in shown, words
    assert "sampling.temperature" not in shown
    text = check_page(out)
    for words in ("rl.group_size", "seconds", "step", "Staleness, mean", "Step time", "Entropy", "Tokens/s"):
        assert words in text, words


def test_compare_needs_different_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = str(make_attempt(tmp_path / "mine", LINES))
    for arguments, words in (([mine], "1 runs are given"), ([mine, mine], "is given twice"), ([], "0 runs are given")):
        assert main(["compare", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert main(["compare", mine, str(tmp_path / "nothing")]) == 2
    assert "there is no run in" in capsys.readouterr().err


def test_page_that_cannot_be_written_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = str(make_attempt(tmp_path / "mine", LINES))
    for out, words in ((tmp_path, "is a folder"), (tmp_path / "no" / "r.html", "cannot be written")):
        assert main(["report", mine, "-o", str(out)]) == 2
        assert words in capsys.readouterr().err


def test_report_replaces_a_link(tmp_path: Path) -> None:
    folder = make_attempt(tmp_path / "mine", LINES)
    (tmp_path / "precious").write_text("kept")
    os.symlink(tmp_path / "precious", folder / "report.html")
    assert main(["report", str(folder)]) == 0
    assert (tmp_path / "precious").read_text() == "kept"
    check_page(folder / "report.html")


def test_settings_that_are_no_defaults(tmp_path: Path) -> None:
    settings = {"rl": {"group_size": 4}, "reward": {"scorers": [{"name": "math", "weight": 0.25}]}}
    folder = make_attempt(tmp_path / "mine", [], settings=settings)
    rows = {key: (value, default) for key, value, default in changed_settings(Attempt(folder))}
    assert rows["reward.scorers[0].weight"] == ("0.25", "1.0")
    assert rows["rl.group_size"][0] == "4"
    assert rows["model.path"][0] == "models/small"
    assert not {"sampling.temperature", "rl.max_staleness", "policy.optimizer.eps", "evaluation.tasks"} & set(rows)
    assert {f"controller.{name}" for name in DERIVED} <= set(default_settings()), "all of them are settings"
    secret = '[judge]\napi_key = "sk-123"\nmax_tokens = 5\n[rollout.api]\nkey = "hunter2"\n'
    (folder / "recipe.toml").write_text(f'{secret}[policy.saving]\nfolder = "ftp://me:hunter2@host/a"\n')
    assert {key: value for key, value, _ in changed_settings(Attempt(folder))} == {
        "judge.api_key": "(hidden)",
        "judge.max_tokens": "5",
        "policy.saving.folder": "ftp://...@host/a",
        "rollout.api.key": "(hidden)",
    }
    (folder / "recipe.toml").write_text("[" + "a." * 5000 + "a]\nb = 1\n")
    assert len(changed_settings(Attempt(folder))) <= 1


def test_settings_differ_where_one_run_has_none() -> None:
    assert differing_settings([{"a": 1, "b": True}, {"a": 1}]) == [("b", ["true", "–"])]
    assert differing_settings([{"a": 1}, {"a": True}]) == [("a", ["1", "true"])]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, 1), (-3e-9, 7e12), (5, 5), (0, 0), (1e300, -1e300), (-1, -1), (1e-310, 2e-310), (1e9, 1e9 + 1)],
)
def test_axis_covers_its_values_with_few_ticks(low: float, high: float) -> None:
    low, high = min(low, high), max(low, high)
    found = axis(low, high, 0, 100, 5)
    slack = (found.high - found.low) * 1e-9
    assert found.low - slack <= low <= high <= found.high + slack
    assert 2 <= len(found.ticks) <= 8
    assert -1e-6 <= found.at(low) <= found.at(high) <= 100 + 1e-6


def test_ticks_are_round_and_short() -> None:
    assert [nice(step) for step in (0.11, 1.0, 3.0, 7.0)] == [0.2, 1.0, 5.0, 10.0]
    shown = [
        tick_text(value, step) for value, step in ((0.05, 0.05), (20, 10), (15_000, 5000), (2.5e6, 5e5), (2e-6, 1e-6))
    ]
    assert shown == ["0.05", "20", "15k", "2.5M", "2e-06"]


def test_ticks_of_steps_are_integers() -> None:
    assert axis(1, 4, 0, 100, 6, tight=True, whole=True).ticks == (1, 2, 3, 4)
    assert axis(7, 7, 0, 100, 6, tight=True, whole=True).ticks == (6, 7, 8)


def test_plot_of_one_point_is_a_mark() -> None:
    drawn = plot([Series("a", 0, [Column(3, 1, 1, 1, 1)])], "step", "", described="one")
    assert drawn.count("<circle") == 1
    assert "nan" not in drawn
