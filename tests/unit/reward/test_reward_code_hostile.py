"""The scorer `code` on programs that a model wrote to have a reward without passing the tests, or none at all."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from code_judge import Judge, pool_of
from sandbox_levels import STRONG

from starling.common.sandbox.launch import Mechanism
from starling.reward.score.workers.kinds import kinds_of
from starling.reward.settings import RewardSettings


@pytest.fixture(scope="module", params=STRONG)
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    level: Mechanism = request.param
    with pool_of(level, timeout_s=5.0) as pool:
        yield Judge(pool)


FAKES = {
    "class": "class {0}:\n    def __getattr__(self, name): return lambda *_, **__: True\n{0} = {0}()",
    "module": "import types\n{0} = types.SimpleNamespace(isclose=lambda *_, **__: True, fabs=lambda _: 0.0)",
}


@pytest.mark.parametrize("fake", FAKES.values(), ids=FAKES)
def test_code_of_tests_has_modules_of_python_and_not_those_of_the_program(judge: Judge, fake: str) -> None:
    """Data sets have tests that take `math` from the program, which imports it."""
    honest = "import math\ndef area(r): return math.pi * r * r"
    wrong = f"{fake.format('math')}\ndef area(r): return 1.0"
    for reference in ("assert math.isclose(area(2), 12.566370614359172)", "assert math.fabs(area(1) - 3.14159) < 1e-3"):
        assert judge.values(honest, wrong, reference=reference) == [1.0, 0.0]
    rows = ["assert math.isclose(area(1), 3.141592653589793)"]
    assert judge.values(honest, wrong, test_list=json.dumps(rows)) == [1.0, 0.0]


def test_function_under_test_may_have_the_name_of_a_module(judge: Judge) -> None:
    programs = ("def bisect(x): return x // 2", "import bisect", "class bisect:\n    half = staticmethod(lambda x: 2)")
    assert judge.values(*programs, reference="assert bisect(5) == 2") == [1.0, 0.0, 0.0]


def test_completed_function_gives_its_tests_no_module(judge: Judge) -> None:
    row = {
        "prompt": "def area(r):\n    'The area of a circle.'\n", "entry_point": "area",
        "test": "def check(candidate):\n    assert math.fabs(candidate(1) - 3.14159) < 1e-3\n",
    }  # fmt: skip
    honest = "import math\ndef area(r): return math.pi * r * r"
    wrong = f"{FAKES['module'].format('math')}\ndef area(r): return 1.0"
    assert judge.values(honest, wrong, **row) == [1.0, 0.0]


COMPILES_FOR_EVER = """```cpp
#include <iostream>
template <int N, int M> struct F { static constexpr long v = F<N - 1, M>::v + F<N - 1, M + 1>::v; };
template <int M> struct F<0, M> { static constexpr long v = M; };
int main() { std::cout << F<850, 1>::v; }
```"""
HANGS_AFTER_TWO = "import time\nif int(input()) > 1: time.sleep(1000)\nprint(7)"


def hurried(level: Mechanism, **options: object) -> Judge:
    """Return a judge whose time for all tests is far below its worker's, so that a busy machine changes nothing."""
    return Judge(pool_of(level, timeout_s=60.0, time_limit_s=4.0, **options))


@pytest.mark.parametrize("level", STRONG)
def test_program_that_takes_all_time_has_a_reward_of_0_and_not_none(level: Mechanism) -> None:
    """Its group would be discarded, so that the model would learn nothing from it."""
    judge, tests = hurried(level), [{"input": "", "output": str(number)} for number in range(20)]
    with judge.pool:
        scores = judge.score(COMPILES_FOR_EVER, "while True: pass", tests=tests)
        assert [(score.value, score.problem) for score in scores] == [(0.0, "")] * 2
        assert not judge.pool.take_lost()


@pytest.mark.parametrize("level", STRONG)
def test_tests_that_are_left_at_the_end_of_the_time_are_not_passed(level: Mechanism) -> None:
    judge, tests = hurried(level, partial=True), [{"input": str(number), "output": "7"} for number in range(10)]
    with judge.pool:
        assert judge.values(HANGS_AFTER_TWO, tests=tests) == [0.2]


def test_time_of_all_tests_is_below_that_of_the_worker() -> None:
    scorers = [{"name": "code"}, {"name": "code", "label": "slow", "timeout_s": 100.0}]
    (kind,) = kinds_of(RewardSettings.model_validate({"scorers": scorers, "timeout_s": 20.0}))
    assert [spec.options["time_limit_s"] for spec in kind.scorers] == [18.0, 90.0]
