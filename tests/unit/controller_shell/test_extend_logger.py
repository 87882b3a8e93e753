"""`docs/how-to/extend/logger.md`: its example is a working logger."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from starling.controller.settings import LoggingSettings
from starling.controller.shell.loggers.fanout import LoggerFanout, makers
from starling.controller.shell.loggers.logger import RunInfo

PAGE = (Path(__file__).parents[3] / "docs/how-to/extend/logger.md").read_text()


def test_page_example_is_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is named in a recipe, and gets a run's steps and samples."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_logger.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    run = RunInfo(id="demo", name="demo", folder=tmp_path)
    fanout = LoggerFanout(makers(["my_logger.py:Csv"], run), LoggingSettings(), tmp_path)
    fanout.note("step", {"step": 1, "phase": "sft", "loss": 2.0})
    fanout.note("step", {"step": 2, "phase": "rl", "reward_mean": 0.5})
    rows = [{"prompt": "ab>", "completion": "ba", "reward": 1.0}, {"prompt": "cd>", "completion": "x", "reward": 0.0}]
    fanout.note("samples", {"step": 2, "rows": rows})
    assert fanout.close() == []
    assert (tmp_path / "rewards.csv").read_text().splitlines() == ["2,0.5", "2,ab>,ba,1.0"]


def test_page_settings_exist() -> None:
    """Every setting that the page names exists."""
    named = set(re.findall(r"`logging\.(\w+)`", PAGE))
    assert named
    assert named <= set(LoggingSettings.model_fields)
