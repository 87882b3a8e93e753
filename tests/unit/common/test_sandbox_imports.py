"""Names of libraries in the code of tests, which the program under test must not give."""

from __future__ import annotations

import collections
import copy
import math
from typing import Any

import pytest

from starling.common.sandbox.programs.imports import borrowed_names


@pytest.mark.parametrize(
    ("code", "tested", "found"),
    [
        ("assert math.isclose(area(2), 12.5)", (), {"math": math}),
        ("assert isclose(area(2), 12.5)", (), {"isclose": math.isclose}),
        ("x = [1]\ny = deepcopy(x)\nsort(x)\nassert Counter(x) == Counter(y)", (),
         {"deepcopy": copy.deepcopy, "Counter": collections.Counter}),
        ("import math\nassert math.isclose(area(2), 12.5)", (), {}),
        ("from queue import Queue as math\nassert math.isclose(area(2))", (), {}),
        ("def check(math):\n    assert math.x == area(2)\ncheck(area)", (), {}),
        ("assert area(2) == 12", (), {}),
        ("assert math.fabs(candidate(2)) < 1", ("candidate",), {"math": math}),
        ("assert copy([1]) == [1]", (), {}),  # the name of what is tested
        ("queue.push(1)\nassert queue.pop() == 1", (), {}),
        ("q = queue()\nassert queue.size == solve(q)", (), {}),  # no module is called
        ("assert (math := area)(2) == 1", (), {}),
        ("for math in area(2):\n    assert math.real", (), {}),
        ("class math: pi = 3\nassert area(2) == math.pi", (), {}),
        ("try:\n    area(2)\nexcept ValueError as math:\n    assert math.args", (), {}),
        ("assert (", ("area",), {}),
        ("assert area(" + "-" * 100_000 + "1)", (), {}),
    ],
)  # fmt: skip
def test_names_of_libraries_are_found(code: str, tested: tuple[str, ...], found: dict[str, Any]) -> None:
    assert borrowed_names(code, tested=tested) == found


def test_library_that_is_not_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.common.sandbox.programs.imports._ALIASES", {"np": "no_such_library"})
    with pytest.raises(ImportError):
        borrowed_names("assert np.allclose(area(2), 12.5)")
