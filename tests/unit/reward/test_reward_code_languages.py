"""The scorer `code` on tests of data sets, in Python and C++, with honest and hostile programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from code_judge import Judge, Judges, pool_of
from sandbox_levels import STRONG

from starling.common.sandbox.launch import Mechanism, problem_of
from starling.common.wire.messages import Status

SEARCH = Path(__file__).parents[1] / "memory_search.py"


@pytest.fixture(scope="module")
def judges() -> Iterator[Judges]:
    with closing(Judges(timeout_s=2.0, partial=True, tolerance=1e-6)) as judges:
        yield judges


@pytest.fixture(params=STRONG)
def judge(request: pytest.FixtureRequest, judges: Judges) -> Judge:
    return judges.of(request.param)


def cpp(body: str) -> str:
    return f"```cpp\n#include <bits/stdc++.h>\nusing namespace std;\n{body}\n```"


@pytest.mark.sample(1)
def test_cpp_is_compiled_and_judged_by_its_output(judge: Judge) -> None:
    tests = [{"input": "3 4\n", "output": "7\n"}, {"input": "1 1", "output": "2"}]
    programs = {
        cpp("int main() { int a, b; cin >> a >> b; cout << a + b << endl; }"): 1.0,
        cpp("int main() { cout << 7; }"): 0.5,
        cpp("int main() { cout << 7; return 1; }"): 0.0,
        cpp("int main() { abort(); }"): 0.0,
        cpp("int main() { syntax error }"): 0.0,
        cpp("int main() { for (;;) ; }"): 0.0,
        cpp("int main() { for (;;) cout << 7; }"): 0.0,
        cpp("int main() { vector<char> x(4ll << 30); cout << 7; }"): 0.0,
        cpp("int f(int n) { volatile char x[1000]; x[0] = 1; return n ? f(n - 1) + x[0] : 0; }\n"
            "int main() { int a, b; cin >> a >> b; if (f(100000) == 100000) cout << a + b; }"): 1.0,
    }  # fmt: skip
    scores = judge.score(*programs, tests=tests)
    assert [score.value for score in scores] == list(programs.values()), scores


def test_cpp_that_reads_what_its_compiler_or_earlier_tests_left_finds_nothing(judge: Judge) -> None:
    """It runs in another session than the compiler, and each test in one of its own."""
    leaves = cpp(
        "#include <filesystem>\nint main() { string n; cin >> n; int count = 0;\n"
        "for (auto& e : filesystem::directory_iterator(getenv(\"TMPDIR\"))) \n"
        "{ string name = e.path().filename(); count += !name.find(\"left-\") || !name.find(\"tmp\"); }\n"
        "ofstream(string(getenv(\"TMPDIR\")) + \"/left-\" + n) << n; cout << count << endl; }"
    )  # fmt: skip
    tests = [{"input": str(number), "output": "0"} for number in range(3)]
    assert judge.values(leaves, tests=tests) == [1.0]


def test_cpp_passes_no_test_of_a_python_function(judge: Judge) -> None:
    assert judge.values(cpp("int f() { return 1; }\nint main() {}"), test_list=["assert f() == 1"]) == [0.0]


APPS = json.dumps({"fn_name": "spread", "inputs": [[[3, 1]], [[5]]], "outputs": [[2], 0]})


@pytest.mark.sample(1)
def test_functions_are_judged_by_what_they_return(judge: Judge) -> None:
    programs = {
        "def spread(xs):\n    return max(xs) - min(xs)": 1.0,
        "class Solution:\n    def spread(self, xs):\n        print('debug')\n        return max(xs) - min(xs)": 1.0,
        "def spread(xs):\n    return 2": 0.5,
        "def spread(xs):\n    return (max(xs) - min(xs),)": 0.5,  # [2] is right in this data set, and [0] is not 0
        "import numpy as np\ndef spread(xs):\n    return np.max(xs) - np.min(xs) + 1e-9": 1.0,
        "def spread(xs):\n    return object()": 0.0,
        "def other(xs):\n    return 2": 0.0,
        "import os\ndef spread(xs):\n    os._exit(0)": 0.0,
        "class Any:\n    def __eq__(self, other): return True\ndef spread(xs):\n    return Any()": 0.0,
        "def spread(xs):\n    x = []\n    x.append(x)\n    return x": 0.0,
        "def spread(xs):\n    while True: pass": 0.0,
    }
    scores = judge.score(*programs, input_output=APPS)
    assert [score.value for score in scores] == list(programs.values()), scores


def test_live_code_bench_has_both_kinds_of_tests(judge: Judge) -> None:
    tests = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
    row = {"public_test_cases": json.dumps(tests), "metadata": json.dumps({"func_name": "shift"})}
    program = "class Solution:\n    def shift(self, xs, by):\n        return [x + by for x in xs]"
    assert judge.values(program, "def shift(xs, by): return xs", **row) == [1.0, 0.0]


HUMAN_EVAL = {
    "prompt": (
        "import math\n\ndef poly(xs, x):\n    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n"
        'def find_zero(xs):\n    """Return an x where poly is 0."""\n'
    ),
    "test": (
        "METADATA = {}\n\ndef check(candidate):\n    import math\n    for c in ([-6, 3], [10, 5]):\n"
        "        assert math.fabs(poly(c, candidate(c))) < 1e-4, 'the-expected-value'\n"
    ),
    "entry_point": "find_zero",
}


@pytest.mark.sample(1)
def test_human_eval_goes_on_from_the_prompt_or_repeats_it(judge: Judge) -> None:
    programs = {
        "    return -xs[0] / xs[1]\n": 1.0,
        "```python\ndef find_zero(xs):\n    return -xs[0] / xs[1]\n```": 1.0,
        "    return 0\n": 0.0,
        "    return 0\ndef poly(xs, x):\n    return 0\n": 0.0,  # what the tests use is of the data set
        "    raise SystemExit(0)\n": 0.0,
        "    return 0\nimport os\nos._exit(0)\n": 0.0,
        "    return 0\nimport builtins, math\nbuiltins.AssertionError = ValueError\nmath.fabs = lambda x: 0\n": 0.0,
    }
    scores = judge.score(*programs, **HUMAN_EVAL)
    assert [score.value for score in scores] == list(programs.values()), scores


MBPP = {
    "test_list": ["assert top([3, 1, 2], 2) == [2, 3]", "assert set(top([5], 1)) == {5}", "assert top([], 0) == []"]
}


@pytest.mark.sample(1)
def test_mbpp_gives_the_share_of_its_assertions(judge: Judge) -> None:
    programs = {
        "def top(xs, n):\n    return sorted(xs)[len(xs) - n:]": 1.0,
        "def top(xs, n):\n    return []": 1 / 3,
        "def top(xs, n):\n    return {5}": 1 / 3,
        "set = lambda x: 0\nsorted = None\ndef top(xs, n):\n    return [7]": 0.0,
        "while True: pass": 0.0,
        "1 / 0": 0.0,
        "def top(xs, n:": 0.0,
    }
    scores = judge.score(*programs, **MBPP)
    assert [score.value for score in scores] == list(programs.values()), scores


def test_function_with_the_name_of_a_builtin_is_the_program_s(judge: Judge) -> None:
    row = {"test_list": ["assert sum(10, 15) == 6", "assert sum(100, 150) == 93"]}
    right = "import math\ndef sum(a, b):\n    n = math.gcd(a, b)\n    return n + (1 if n == 5 else 43)"
    assert judge.values(right, "def sum(a, b):\n    return 6", **row) == [1.0, 0.5]


REMOTE = """
stack = Stack()
stack.push(3)
stack.push((1, 2))
assert len(stack) == 2 and stack.size == 2
assert stack.pop() == (1, 2)
assert [one for one in stack] == [3]
assert apply(lambda x: x + 1, 4) == 5
xs = [3, 1, 2]
assert arrange(xs) is None and xs == [1, 2, 3]
assert list(count(3)) == [0, 1, 2]
assert big() == 10 ** 5000 and limits() == {(1, 2): {3}, 'x': b'y', None: 1j, 2.5: frozenset([1])}
try:
    fails()
except KeyError as error:
    assert 'why' in str(error)
else:
    raise AssertionError
try:
    fails_otherwise()
except Exception:
    pass
assert total == 0
arrange([1])
assert total == 1
assert same(stack) is stack
"""
SOLUTION = """
total = -1
class Stack:
    def __init__(self): self.items, self.size = [], 0
    def push(self, item): self.items.append(item); self.size += 1
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
def apply(f, x): return f(x)
def arrange(xs):
    global total
    total += 1
    xs.sort()
def count(n): yield from range(n)
def big(): return 10 ** 5000
def limits(): return {(1, 2): {3}, 'x': b'y', None: 1j, 2.5: frozenset([1])}
def fails(): raise KeyError('why')
class Own(Exception): pass
def fails_otherwise(): raise Own('x')
def same(x): return x
"""


def test_reference_may_use_objects_of_the_program(judge: Judge) -> None:
    (score,) = judge.score(SOLUTION, reference=REMOTE)
    assert score.value == 1.0, score
    assert judge.values(SOLUTION.replace("+= 1\n    xs", "+= 2\n    xs"), reference=REMOTE) == [0.0]


HOSTILE = {
    "equals everything": "class Any:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "def secret(): return Any()",
    "exits": "import sys\ndef secret(): sys.exit(0)",
    "exits at once": "import os\nos._exit(0)",
    "writes to all descriptors": (
        "import os\nfor fd in range(3, 256):\n    try: os.write(fd, b'b' + bytes(64))\n    except OSError: pass\n"
        "def secret(): return 0"
    ),
    "answers nonsense": (
        "import socket, json\nfound = None\ndef secret(): return 0\n"
        "import gc\nfor one in gc.get_objects():\n    if isinstance(one, socket.socket): found = one\n"
        "body = json.dumps(['ok', ['mine', 0], [[0, 'x'], [9, 'y']]]).encode()\n"
        "found.sendall((len(body).to_bytes(8, 'little') + body) * 50)"
    ),
    "sends an endless message": (
        "import socket, gc\nfor one in gc.get_objects():\n"
        "    if isinstance(one, socket.socket): one.sendall((1 << 62).to_bytes(8, 'little'))\n"
    ),
    "patches what could report": (
        "import builtins, sys, os, json\nbuiltins.print = sys.exit = os._exit = lambda *a, **k: None\n"
        "builtins.AssertionError = type('No', (), {})\njson.dumps = lambda *a, **k: '[\"ok\", 123456789, []]'\n"
        "def secret(): return 0"
    ),
    "looks for what is expected": SEARCH.read_text() + (
        "\nfound = find_in_process('9876[5][0-9]+')\ndef secret():\n"
        "    again = find_in_process('9876[5][0-9]+') + found\n"
        "    return int(again[0].partition(': ')[2]) if again else 0"
    ),
    "kills all": (
        "import os, signal\nfor pid in range(2, 400):\n    if pid != os.getpid():\n"
        "        try: os.kill(pid, 9)\n        except OSError: pass\ndef secret(): return 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_hostile_program_passes_no_test(judge: Judge, program: str) -> None:
    if judge.level == "landlock" and program == HOSTILE["kills all"]:
        pytest.skip("without namespaces it may reach its own sandbox")
    row = {"test_list": ["assert secret() == 987654321", "assert not secret() != 987654321"]}
    (score,) = judge.score(program, **row)
    assert (score.value, score.status) == (0.0, Status.OK), score
    assert judge.values("def secret(): return 987654321", **row) == [1.0]


MANY_IN_PYTHON = """
import os, time
for _ in range(900):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
print("done")
"""
MANY_IN_CPP = cpp(
    "#include <unistd.h>\n#include <cstdlib>\nint main() { for (int i = 0; i < 900; i++) {\n"
    'int child = fork(); if (child < 0) return 1; if (!child) { sleep(60); _exit(0); } } cout << "done"; }'
)


@pytest.mark.parametrize("level", ["bubblewrap", "namespaces"])
def test_program_starts_no_more_processes_than_max_tasks(level: Mechanism) -> None:
    """The number that it tries to start is bounded, so that the machine stands it where the limit does not hold."""
    if problem := problem_of(level):
        pytest.skip(f"this machine does not offer the level {level}: {problem}")
    with pool_of(level, timeout_s=10.0) as pool:
        judge, tests = Judge(pool), [{"input": "", "output": "done"}]
        assert judge.values(MANY_IN_PYTHON, MANY_IN_CPP, "print('done')", tests=tests) == [0.0, 0.0, 1.0]


def test_callback_gives_the_program_nothing_of_the_tests(judge: Judge) -> None:
    """It may call what a test passes, and cannot look into it."""
    looks = "def use(f):\n    return [f.__globals__, f.__class__.__mro__, getattr(f, 'expected', 0)]"
    test = "expected = 'abc'\ndef f(): return 1\nassert use(f) is not None\nassert 'abc' in str(use(f))"
    assert judge.values(looks, "def use(f): return ['abc', f()]", reference=test) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [({"tests": []}, "the row has no test"), ({"input_output": "{"}, "'input_output' of the row is no JSON")],
)
def test_row_without_tests_has_no_reward(judge: Judge, metadata: dict[str, Any], problem: str) -> None:
    (score,) = judge.score("print(1)", **metadata)
    assert (score.value, score.status) == (None, Status.REWARD_ERROR)
    assert problem in score.problem


def test_all_tests_must_pass_without_partial() -> None:
    with pool_of(STRONG[0], timeout_s=4.0) as pool:
        right = "def top(xs, n):\n    return sorted(xs)[len(xs) - n:]"
        assert Judge(pool).values(right, "def top(xs, n):\n    return []", **MBPP) == [1.0, 0.0]
