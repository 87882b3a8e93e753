"""Unusable scorers are rejected at the start, in one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from starling.common.errors import ConfigError
from starling.common.sandbox.launch import choose
from starling.reward.score.pool.check import check_scorers
from starling.reward.score.scorers.gym import make_gym
from starling.reward.score.scorers.registry import BUILT_IN, BUILT_IN_CLASSES
from starling.reward.settings import RewardSettings

MISBEHAVING = Path(__file__).with_name("misbehaving.py")


def settings(name: str, **others: Any) -> RewardSettings:
    scorer = {"name": name, **({"options": others.pop("options")} if "options" in others else {})}
    return RewardSettings.model_validate({"scorers": [scorer], **others})


def test_every_built_in_scorer_can_be_used() -> None:
    needed: dict[str, dict[str, Any]] = {
        "overlong": {"max_tokens": 8, "buffer": 2},
        "regex": {"pattern": "(.*)"},
        "length": {"max_tokens": 8},
        "ocr": {"recogniser": "bitmap"},
    }
    names = [*BUILT_IN, *BUILT_IN_CLASSES, "reasoning_gym:spell_backward"]
    scorers = [{"name": name, "options": needed.get(name, {})} for name in names]
    level = "process" if choose("auto").mechanism == "process" else "auto"
    check_scorers(RewardSettings.model_validate({"scorers": scorers, "sandbox": level}))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"python": "/nowhere/python"}, "Scorer 'math': python is '/nowhere/python', which cannot be run"),
        ({"needs": {"paths": ["/nowhere"]}}, "Scorer 'math': paths has '/nowhere', which does not exist"),
    ],
)
def test_scorer_whose_worker_cannot_be_started_is_named(wrong: dict[str, Any], problem: str) -> None:
    scorers = [{"name": "exact_match"}, {"name": "math", **wrong}]
    with pytest.raises(ConfigError, match=f"^{problem}"):
        check_scorers(RewardSettings.model_validate({"scorers": scorers}))


def test_user_scorer_is_found_by_path_and_in_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from beside import f\nclass A:\n    g = staticmethod(f)\n")
    (tmp_path / "beside.py").write_text("def f(completion, reference, prompt_text, metadata): return 1\n")
    (tmp_path / "signal.py").write_text("raise RuntimeError('I took the place of the standard library')\n")
    check_scorers(settings(f"{tmp_path}/mine.py:f"))
    monkeypatch.chdir(tmp_path)
    check_scorers(settings("mine.py:f"))
    check_scorers(settings("mine:f"))
    check_scorers(settings("mine:A.g"))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("no_such_module_at_all:f", {}, r"cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        ("/nowhere/mine.py:f", {}, r"there is no file '/nowhere/mine.py'"),
        (f"{MISBEHAVING}:lenght", {}, r"no 'lenght' in there; did you mean 'length'"),
        (f"{MISBEHAVING}:NOT_CALLABLE", {}, r"is a int, not a function"),
        (f"{MISBEHAVING}:too_few", {}, r"must take \(completion, reference, prompt_text, metadata\)"),
        (f"{MISBEHAVING}:coroutine", {}, r"not async"),
        (f"{MISBEHAVING}:everything", {"bonsu": 1}, r"no option 'bonsu'; its options are: bonus\."),
        (
            f"{MISBEHAVING}:all_arguments",
            {"num_tokens": 1},
            r"gets 'num_tokens' of each completion: give its option another",
        ),
        (f"{MISBEHAVING}:all_arguments", {"units": 1}, r"no option 'units'; its options are: unit\."),
        ("overlong", {}, r"needs the option 'max_tokens': set `options = \{ max_tokens = \.\.\. \}`"),
        ("overlong", {"max_tokens": 10, "buffer": 11}, r"max_tokens is 10 and buffer 11: .* 1 <= buffer <= max_tokens"),
        ("overlong", {"max_tokens": 10, "buffer": 0}, r"1 <= buffer <= max_tokens"),
        ("overlong", {"max_tokens": 10.5, "buffer": 1}, r"give whole numbers"),
        ("overlong", {"max_tokens": 10, "buffer": 2, "scale": -1}, r"scale must be a finite number above 0, not -1"),
        ("exact_match", {"strip": True}, r"no option 'strip'; its options are: none\."),
        ("format", {"pattern": "(open"}, r"'\(open' is not a regular expression"),
        ("format", {"pattern": 3}, r"3 is not a regular expression"),
        ("math", {"precision": -1}, r"precision must be a whole number"),
        ("reasoning_gym:spell_backwards", {}, r"no task 'spell_backwards': did you mean 'spell_backward'"),
        ("reasoning_gym:spell_backward", {"min_word_len": -3}, r"refuses its options"),
        ("reasoning_gym:spell_backward", {"colour": 1}, r"refuses its options"),
    ],
)
def test_unusable_scorer_is_named_with_a_remedy(name: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_scorers(settings(name, options=options))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import os; os._exit(5)", r"ended its process \(exit status 5\)"),
        ("import sys; sys.exit('no licence')", r"SystemExit: no licence"),
        ("1 / 0", r"ZeroDivisionError"),
        ("while True: pass", r"took longer than 0.3 s"),
        ("def f(:", r"SyntaxError"),
    ],
)
def test_module_that_fails_on_import_is_found_at_start(tmp_path: Path, code: str, problem: str) -> None:
    (tmp_path / "bad.py").write_text(code)
    with pytest.raises(ConfigError, match=problem):
        check_scorers(settings(f"{tmp_path / 'bad.py'}:f", start_timeout_s=0.3 if "while" in code else 60.0))


def test_reasoning_gym_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        make_gym("spell_backward")
