"""Rewards from scores: keys, sums, clips, weights and scale by exact tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.rewardclient.combine import FunctionScores, RewardFunction, RewardRule, combine

NO_LIMIT = {"clip_min": -math.inf, "clip_max": math.inf}
QUALITY = FunctionScores({"vq": (1.0, 4.0, -9.0), "mq": (0.5, 4.0, 1.0), "overall": (6.0, -6.0, 0.25)})


def rule(*functions: RewardFunction, **fields: float) -> RewardRule:
    return RewardRule(functions=functions, **fields)


@pytest.mark.parametrize(
    ("made", "rewards"),
    [
        (rule(RewardFunction(name="q", score_key="overall")), (5.0, -5.0, 0.25)),
        (rule(RewardFunction(name="q", score_key="overall", **NO_LIMIT)), (5.0, -5.0, 0.25)),
        (rule(RewardFunction(name="q", score_key="overall", **NO_LIMIT), **NO_LIMIT), (6.0, -6.0, 0.25)),
        (rule(RewardFunction(name="q", score_key="vq+mq")), (1.5, 5.0, -5.0)),
        (rule(RewardFunction(name="q", score_key=" vq + mq ", clip_min=-1.0)), (1.5, 5.0, -1.0)),
        (rule(RewardFunction(name="q", score_key="vq+vq")), (2.0, 5.0, -5.0)),
        (rule(RewardFunction(name="q", score_key="vq", weight=0.5, clip_max=2.0)), (0.5, 1.0, -2.5)),
        (rule(RewardFunction(name="q", score_key="vq", weight=-1.0)), (-1.0, -4.0, 5.0)),
        (rule(RewardFunction(name="q", score_key="vq"), scale=10.0), (10.0, 40.0, -50.0)),
        (
            rule(
                RewardFunction(name="q", score_key="vq"),
                RewardFunction(name="p", weight=2.0),
                RewardFunction(name="absent", weight=0.0),
                clip_max=4.5,
            ),
            (3.0, 4.5, -3.0),
        ),
    ],
)
def test_reward_is_the_scaled_sum_of_weighted_scores(made: RewardRule, rewards: tuple[float, ...]) -> None:
    found = combine(made, {"q": QUALITY, "p": FunctionScores({"p": (1.0, 1.0, 1.0)})}, 3)
    assert found.rewards == rewards
    assert found.statuses == ("ok",) * 3
    assert found.problems == ((),) * 3


def test_sample_without_a_score_has_no_reward_but_reasons() -> None:
    scores = {
        "q": FunctionScores({"q": (1.0, None, math.nan)}, "one crashed"),
        "p": FunctionScores({}, "out of memory"),
    }
    found = combine(rule(RewardFunction(name="q")), scores, 3)
    assert found.rewards == (1.0, None, None)
    assert found.statuses == ("ok", "reward_error", "reward_error")
    assert found.problems[1] == ("scorer 'q' has no score for this sample: one crashed",)
    found = combine(rule(RewardFunction(name="q"), RewardFunction(name="p"), RewardFunction(name="r")), scores, 2)
    assert found.rewards == (None, None), "the score of one scorer alone is not comparable with that of all"
    assert found.problems[0] == ("scorer 'p' failed: out of memory", "the service has no scorer 'r'; it has p, q.")
    found = combine(rule(RewardFunction(name="q", score_key="q+z")), scores, 1)
    assert found.problems == (("scorer 'q' has no score 'z'; it has q.",),)
    scores = {
        "q": FunctionScores({}, "scorer 'q' took longer than 2 s."),
        "p": FunctionScores({"p": (None,)}, "scorer 'p' fell."),
    }
    found = combine(rule(RewardFunction(name="q"), RewardFunction(name="p")), scores, 1)
    assert found.problems == (("scorer 'q' took longer than 2 s.", "scorer 'p' fell."),), "and not the name twice"


def test_sum_beyond_a_float_is_no_reward() -> None:
    functions = [RewardFunction(name=name, weight=1e308, **NO_LIMIT) for name in "ab"]
    scores = {name: FunctionScores({name: (1.0, 10.0)}) for name in "ab"}
    found = combine(rule(*functions, **NO_LIMIT), scores, 2)
    assert found.rewards == (None, None)
    assert found.problems[0] == ("the weighted sum of its scores is too large for a float.",)


@given(
    values=st.lists(st.floats(-100, 100), min_size=1, max_size=5),
    bounds=st.tuples(st.floats(-10, 10), st.floats(-10, 10)).map(sorted),
    weight=st.floats(-3, 3).filter(bool),
)
def test_reward_stays_within_the_bounds(values: list[float], bounds: list[float], weight: float) -> None:
    made = rule(RewardFunction(name="q", weight=weight), clip_min=bounds[0], clip_max=bounds[1])
    found = combine(made, {"q": FunctionScores({"q": tuple(values)})}, len(values))
    assert all(reward is not None and bounds[0] <= reward <= bounds[1] for reward in found.rewards)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": ""}, "neither may be empty"),
        ({"name": "q", "score_key": "a+"}, "the key 'a\\+'; neither may be empty"),
        ({"name": "q", "weight": math.inf}, "the weight of 'q' is inf; give a finite number"),
        ({"name": "q", "clip_min": 1.0, "clip_max": 0.0}, "the bounds of 'q' are 1.0 and 0.0"),
        ({"name": "q", "clip_min": math.nan}, "the bounds of 'q'"),
    ],
)
def test_functions_that_cannot_be_used_are_refused(fields: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RewardFunction(**fields)  # type: ignore[arg-type]


def test_rules_that_cannot_be_used_are_refused() -> None:
    one = RewardFunction(name="q")
    with pytest.raises(ConfigError, match=r"'q' is given twice; add its keys: score_key = 'a\+b'"):
        rule(one, one)
    with pytest.raises(ConfigError, match="have the weight 0; give one of them another"):
        rule(RewardFunction(name="q", weight=0.0))
    with pytest.raises(ConfigError, match="scale is nan"):
        RewardRule(scale=math.nan)
    with pytest.raises(ConfigError, match="the bounds of the sum are"):
        RewardRule(clip_min=2.0, clip_max=1.0)
