"""Recipes whose algorithm takes the scores of each scorer: what follows for the controller, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from starling.cli.recipe.arithmetic import describe_arithmetic
from starling.cli.recipe.schema import Recipe, load_recipe, to_toml
from starling.common.errors import ConfigError
from starling.controller.core.groups.validation.scores import TrainedScorer
from starling.controller.settings import ControllerProcess

RECIPE = Path(__file__).parents[3] / "tests/system/recipes/tiny.toml"
MATH, FORMAT = '{ name = "math", clip_max = 0.5 }', '{ name = "format", label = "form", weight = 0.2 }'
OBSERVED = '{ name = "regex", weight = 0, options = { pattern = "x" } }'


def recipe(*scorers: str, name: str = "gdpo", flags: tuple[str, ...] = ()) -> Recipe:
    return load_recipe(
        [RECIPE], ["--policy.algorithm.name", name, "--reward.scorers", f"[{', '.join(scorers)}]", *flags]
    )


def test_controller_gets_the_scorers_that_count(tmp_path: Path) -> None:
    """Also when it reads the resolved recipe."""
    found = recipe(MATH, OBSERVED, FORMAT)
    expected = (TrainedScorer("math", 1.0, clip_max=0.5), TrainedScorer("form", 0.2))
    assert (found.plan().scorers, found.plan().compares_scores) == (expected, True)
    read = ControllerProcess.model_validate(
        {name: tomllib.loads(to_toml(found))[name] for name in ("run", "data", "rl", "sampling", "controller")}
    )
    assert read.plan().scorers == expected


@pytest.mark.parametrize(("name", "num"), [("grpo", 0), ("own.py:algorithm", 2)])
def test_scores_are_sent_where_the_algorithm_may_take_them(name: str, num: int) -> None:
    plan = recipe(MATH, FORMAT, name=name).plan()
    assert (len(plan.scorers), plan.compares_scores) == (num, False)


@pytest.mark.parametrize(
    ("scorers", "flags", "complaint"),
    [
        ([MATH], (), r"two of \[\[reward.scorers\]\] must score the same prompts .* of this recipe \(math\) do not"),
        ([MATH, OBSERVED], (), r"those of this recipe \(math\) do not; add one, or choose 'grpo'"),
        (
            ['{ name = "math", tasks = ["math"] }', '{ name = "code", tasks = ["code"] }'],
            (),
            r"those of this recipe \(math, code\) do not",
        ),
        ([MATH, FORMAT], ("--reward.clip-max", "1"), "would bound nothing; set clip_min and clip_max of the scorers"),
        ([MATH, FORMAT], ("--policy.algorithm.advantage-scale", "none"), "there is no option 'advantage_scale'"),
        (
            [f'{{ name = "math", label = "{number:04}" }}' for number in range(1000)],
            ("--rl.prompts-per-step", "500", "--rl.group-size", "16"),
            "rl.prompts_per_step = 500 with rl.group_size = 16 does not fit into a message",
        ),
    ],
)
def test_recipe_without_scores_to_compare_is_refused(
    scorers: list[str], flags: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        describe_arithmetic(recipe(*scorers, flags=flags))


def test_scorers_of_tasks_may_score_the_same_prompts() -> None:
    tasks = '{ name = "code", tasks = ["code"] }'
    assert len(recipe(MATH, tasks).plan().scorers) == 2


def test_evaluation_scorers_are_no_scorers_to_compare() -> None:
    judge = '{ name = "gsm8k", label = "judge", use = "evaluation" }'
    plan = recipe(MATH, FORMAT, judge, flags=("--evaluation.training-share", "0.5")).plan()
    assert [scorer.label for scorer in plan.scorers] == ["math", "form"]
    assert (plan.evaluation_scorers, plan.evaluated_share, plan.num_scorers) == (("judge",), 0.5, 3)
    lines = describe_arithmetic(recipe(MATH, judge, name="grpo"))
    assert "evaluation scorers: judge, in no reward; of 10% of the groups, and of all held-out prompts" in lines
    with pytest.raises(ConfigError, match=r"those of this recipe \(math\) do not"):
        recipe(MATH, judge)


def test_run_without_steps_of_groups_needs_no_scorers() -> None:
    assert not recipe(MATH, flags=("--rl.num-steps", "0", "--evaluation.at-end", "false")).plan().num_steps


def test_dry_run_says_what_is_normalised() -> None:
    lines = describe_arithmetic(recipe(MATH, FORMAT, flags=("--rl.dynamic-sampling", "true")))
    assert "advantages: each scorer normalised by itself, then 1 x math, 0.2 x form" in lines
    assert any(
        line.startswith("dynamic sampling: groups with equal scores of each scorer are replaced") for line in lines
    )
