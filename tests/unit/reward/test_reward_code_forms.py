"""Blocks of code, tests of data sets and comparison of outputs of the scorer `code`: pure, without running anything."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from starling.common.errors import ConfigError
from starling.reward.score.scorers.code.blocks import program_of
from starling.reward.score.scorers.code.compare import same_output, same_value
from starling.reward.score.scorers.code.datasets import CallTest, CodeTest, OutputTest, read_tests, text_of_pickle
from starling.reward.score.scorers.registry import resolve_scorer


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("print(1)", ("python", "print(1)")),
        ("a\n```python\nprint(1)\n```\nb\n```py\nprint(2)\n```\n", ("python", "print(2)\n")),
        ("```\nprint(1)\n", ("python", "print(1)\n")),
        ("", ("python", "")),
        ("```cpp\nint main() {}\n```", ("cpp", "int main() {}\n")),
        ("```C++17\nint main() {}\n```\nIt prints\n```text\n7\n```", ("cpp", "int main() {}\n")),
        ("```\n#include <cstdio>\nint main() {}\n```", ("cpp", "#include <cstdio>\nint main() {}\n")),
        ("#include <cstdio>\nint main() {}", ("cpp", "#include <cstdio>\nint main() {}")),
        ("````python\ns = '''\n```\n'''\n````", ("python", "s = '''\n```\n'''\n")),
        ("~~~py\nprint(3)\n~~~", ("python", "print(3)\n")),
        ("```python\r\nprint(4)\r\n```\r\n", ("python", "print(4)\r\n")),
        ("```rust\nfn main() {}\n```", None),
    ],
)
def test_last_block_is_the_program(completion: str, program: tuple[str, str] | None) -> None:
    assert program_of(completion) == program


def test_wanted_language_chooses_the_block() -> None:
    both = "```cpp\nint main() {}\n```\n```python\nprint(1)\n```\n"
    assert program_of(both, "cpp") == ("cpp", "int main() {}\n")
    assert program_of(both, "python") == ("python", "print(1)\n")
    assert program_of("```python\nprint(1)\n```", "cpp") is None
    assert program_of("```\nx\n```", "cpp") == ("cpp", "x\n")


@given(st.text())
def test_every_completion_has_at_most_one_program(completion: str) -> None:
    found = program_of(completion)
    assert found is None or found.text in completion or "\n" in completion


APPS = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7", "8"]]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [[1], "x"]], "outputs": [[3], {"a": 1}]}
PUBLIC = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
PRIVATE = [{"input": '[1, 2]\n"a"', "output": "[2]", "testtype": "functional"}]
COMPRESSED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(PRIVATE)))).decode()


@pytest.mark.parametrize(
    ("metadata", "tests"),
    [
        ({"tests": [{"input": "a", "output": 1}]}, (OutputTest("a", "1"),)),
        ({"input_output": json.dumps(APPS)}, (OutputTest("1 2\n", "3\n"), OutputTest("3\n4", "7\n8"))),
        (
            {"input_output": CALLS},
            (CallTest("add", (1, 2), ([3], 3)), CallTest("add", ([1], "x"), ({"a": 1},))),
        ),
        (
            {
                "public_test_cases": json.dumps(PUBLIC),
                "private_test_cases": COMPRESSED,
                "metadata": '{"func_name": "shift"}',
            },
            (OutputTest("1\n", "2\n"), CallTest("shift", ([1, 2], "a"), ([2],))),
        ),
        ({"private_test_cases": json.dumps(PUBLIC)}, (OutputTest("1\n", "2\n"),)),
        (
            {"test": "def check(f): pass", "entry_point": "inc", "prompt": "def inc(x):\n"},
            (CodeTest("def check(f): pass\ncheck(inc)\n", "def inc(x):\n", ("inc",), "def inc(x):\n"),),
        ),
        (
            {"test_list": ["assert f(1) == set([1])"], "test_setup_code": "import math", "test_imports": ["import re"]},
            (CodeTest("assert f(1) == set([1])", "import re\nimport math"),),
        ),
        ({"test_list": ["assert sum(10, 15) == 25"]}, (CodeTest("assert sum(10, 15) == 25", "", ("sum",)),)),
        ({}, (CodeTest("assert f() == 1"),)),
    ],
)  # fmt: skip
def test_tests_of_data_sets_are_read(metadata: dict[str, Any], tests: tuple[Any, ...]) -> None:
    assert read_tests(metadata, "assert f() == 1") == tests


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "the row has no test"),
        ({"tests": []}, "the row has no test"),
        ({"tests": [{"input": "a"}]}, "malformed: KeyError: 'output'"),
        ({"input_output": "{"}, "'input_output' of the row is no JSON"),
        ({"input_output": {"inputs": ["a"], "outputs": []}}, "shorter"),
        ({"private_test_cases": "AAAA"}, "'private_test_cases' of the row cannot be decoded"),
        ({"public_test_cases": [{**PUBLIC[0], "testtype": "x"}]}, "the testtype 'x'"),
        ({"private_test_cases": COMPRESSED}, "no 'func_name'"),
    ],
)
def test_malformed_tests_are_refused(metadata: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(metadata, " ")


@given(st.text(), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_text_of_a_pickle_is_read_without_unpickling(text: str, protocol: int) -> None:
    assert text_of_pickle(pickle.dumps(text, protocol)) == text


def test_long_text_of_a_pickle_is_read() -> None:
    assert text_of_pickle(pickle.dumps("x" * (1 << 20))) == "x" * (1 << 20)


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(7)",)


@pytest.mark.parametrize("evil", [Evil(), ["a"], ("a", "b"), 7, [Evil()]])
def test_pickle_of_anything_but_a_text_is_refused(evil: Any) -> None:
    with pytest.raises(ValueError, match="the pickle is no text"):
        text_of_pickle(pickle.dumps(evil))


def test_private_tests_that_decompress_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.reward.score.scorers.code.datasets.PRIVATE_BYTES", 10)
    with pytest.raises(ValueError, match="longer than 10 bytes"):
        read_tests({"private_test_cases": COMPRESSED}, "")


@pytest.mark.parametrize(
    ("printed", "expected", "rule", "tolerance", "same"),
    [
        ("a \nb\n\n", "a\nb", "lines", 0.0, True),
        (" a", "a", "lines", 0.0, False),
        ("a b", "a\nb", "lines", 0.0, False),
        ("a  b", "a\nb", "tokens", 0.0, True),
        ("a b", "a", "tokens", 0.0, False),
        ("a\n", "a", "exact", 0.0, False),
        ("0.3000001 x", "0.3 x", "lines", 1e-6, True),
        ("0.3000001 x", "0.3 x", "lines", 0.0, False),
        ("1000001\n2", "1000000\n2", "tokens", 1e-5, True),
        ("0.3 y", "0.3 x", "lines", 1e-6, False),
        ("nan", "0", "tokens", 0.5, False),
        ("1_0", "10", "tokens", 0.5, False),
        ("1e999", "1", "tokens", 0.5, False),
        ("", "", "exact", 0.0, True),
    ],
)
def test_outputs_are_compared_by_a_rule(printed: str, expected: str, rule: Any, tolerance: float, same: bool) -> None:
    assert same_output(printed, expected, rule=rule, tolerance=tolerance) is same


@given(st.text(st.characters(codec="utf-8"), max_size=40), st.sampled_from(["lines", "tokens", "exact"]))
def test_output_is_the_same_as_itself(text: str, rule: Any) -> None:
    assert same_output(text, text, rule=rule, tolerance=0.1)


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "same"),
    [
        ([1, [2.0, "a"]], [1, [2, "a"]], 0.0, True),
        ([1.0000001], [1], 0.0, False),
        ([1.0000001], [1], 1e-6, True),
        ([1, 2], [1], 1e-6, False),
        ({"a": 1.0}, {"a": 1.0000001}, 1e-6, True),
        ({"a": 1}, {"b": 1}, 0.0, False),
        (True, "True", 0.1, False),
        (10**400, 1.0, 0.1, False),
        (None, None, 0.0, True),
    ],
)
def test_values_are_compared(value: Any, expected: Any, tolerance: float, same: bool) -> None:
    assert same_value(value, expected, tolerance=tolerance) is same


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"memory_mb": -1}, "memory_mb must be a number above 0, not -1"),
        ({"language": "rust"}, "language must be one of auto, python, cpp, not 'rust'"),
        ({"compare": "fuzzy"}, "compare must be one of lines, tokens, exact, not 'fuzzy'"),
        ({"tolerance": 1}, "tolerance must be a number from 0 to below 1, not 1"),
        ({"cpp_standard": "-o/x"}, r"cpp_standard must be one of gnu\+\+11, .* not '-o/x'"),
    ],
)
def test_options_are_checked(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        resolve_scorer("code", options)
