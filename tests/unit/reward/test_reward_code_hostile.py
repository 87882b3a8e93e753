"""The scorer `code` on programs that a model wrote to have a reward without passing the tests, or none at all."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from code_judge import Judge, pool_of
from sandbox_levels import STRONG

from starling.common.sandbox.launch import Mechanism


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
