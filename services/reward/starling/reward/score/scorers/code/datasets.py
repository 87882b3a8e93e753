"""Tests of a program in the forms of known data sets, from the columns that a prompt has as metadata.

tests                                        a list of {"input": ..., "output": ...}
input_output                                 APPS, TACO: {"inputs": [...], "outputs": [...], "fn_name": ...}
public_test_cases, private_test_cases        LiveCodeBench; `metadata` has the function's name
test, entry_point                            HumanEval; `prompt` has what precedes the completion
test_list                                    MBPP, with `test_setup_code` or `test_imports`
(none of these)                              the reference: Python code that raises if the program is wrong
"""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

PRIVATE_BYTES: Final = 256 << 20
"""Limit on the private tests of one row of LiveCodeBench, decompressed."""
_TEXT_OPCODES: Final = frozenset(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"))
_HARMLESS_OPCODES: Final = frozenset(("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"))


@dataclass(frozen=True, slots=True)
class OutputTest:
    """What the program must print when it reads `input`."""

    input: str
    output: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """What a function must return, one of `outputs`."""

    function: str
    arguments: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class CodeTest:
    """Python code that raises if the program is wrong."""

    code: str
    setup: str = ""
    entry_points: tuple[str, ...] = ()
    prompt: str = ""
    """Beginning of the program, which the completion goes on with."""


Test = OutputTest | CallTest | CodeTest


@dataclass(frozen=True, slots=True)
class _Row:
    """One row, and its columns that hold JSON."""

    columns: dict[str, Any]
    reference: str = ""
    decoded: dict[str, Any] = field(default_factory=dict)

    def json(self, name: str) -> Any:
        """Return a column that is JSON, or its text. Raises ValueError."""
        value = self.columns[name]
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name!r} of the row is no JSON: {error}") from None


def read_tests(metadata: dict[str, Any], reference: str) -> tuple[Test, ...]:
    """Return the tests of a prompt.

    Raises:
        ValueError: its row has none, or they are malformed.
    """
    row = _Row(metadata, reference)
    try:
        found = _read(row)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the tests of the row are malformed: {type(error).__name__}: {error}") from None
    if not found:
        raise ValueError("the row has no test")
    return found


def _read(row: _Row) -> tuple[Test, ...]:
    columns = row.columns
    if columns.get("tests") is not None:
        return tuple(OutputTest(_text(one["input"]), _text(one["output"])) for one in row.json("tests"))
    if columns.get("input_output"):
        return _of_apps(row.json("input_output"))
    if columns.get("public_test_cases") or columns.get("private_test_cases"):
        return _of_live_code_bench(row)
    if columns.get("test") and columns.get("entry_point"):
        name, prompt = columns["entry_point"], columns.get("prompt") or ""
        return (CodeTest(f"{columns['test']}\ncheck({name})\n", prompt, (name,), prompt),)
    if columns.get("test_list"):
        return _of_mbpp(row)
    return (CodeTest(row.reference),) if row.reference.strip() else ()


def _text(value: Any) -> str:
    """Return what a program reads or prints: a text, or lines."""
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _of_apps(found: dict[str, Any]) -> tuple[Test, ...]:
    pairs = list(zip(found["inputs"], found["outputs"], strict=True))
    function = found.get("fn_name")
    if not function:
        return tuple(OutputTest(_text(given), _text(expected)) for given, expected in pairs)
    return tuple(
        # The data set has what a function returns as it is, or in a list of its own.
        CallTest(function, tuple(given), (expected, *(expected if _is_single(expected) else ())))
        for given, expected in pairs
    )


def _is_single(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _of_live_code_bench(row: _Row) -> tuple[Test, ...]:
    cases = list(row.json("public_test_cases") or ()) if row.columns.get("public_test_cases") else []
    private = row.columns.get("private_test_cases")
    if private:
        cases += _private_cases(private)
    tests = list[Test]()
    for case in cases:
        if case["testtype"] == "stdin":
            tests.append(OutputTest(case["input"], case["output"]))
        elif case["testtype"] == "functional":
            arguments = tuple(json.loads(line) for line in case["input"].split("\n") if line.strip())
            tests.append(CallTest(_function_of(row), arguments, (json.loads(case["output"]),)))
        else:
            raise ValueError(f"a test of the row has the testtype {case['testtype']!r}, not 'stdin' or 'functional'")
    return tuple(tests)


def _function_of(row: _Row) -> str:
    about = row.json("metadata") if row.columns.get("metadata") else row.columns
    function = about.get("func_name")
    if not isinstance(function, str) or not function:
        raise ValueError("the row has functional tests and no 'func_name' in its 'metadata'")
    return function


def _private_cases(private: Any) -> list[Any]:
    """Return private tests: a list, JSON, or base64 of zlib of a pickle of JSON, of which no object is made."""
    if not isinstance(private, str):
        return list(private)
    if private.lstrip().startswith("["):
        return list(json.loads(private))
    try:
        stream = zlib.decompressobj()
        pickled = stream.decompress(base64.b64decode(private, validate=True), PRIVATE_BYTES)
    except (ValueError, zlib.error) as error:
        raise ValueError(f"'private_test_cases' of the row cannot be decoded: {error}") from None
    if not stream.eof:
        raise ValueError(f"'private_test_cases' of the row is longer than {PRIVATE_BYTES} bytes, or has no end")
    return list(json.loads(text_of_pickle(pickled)))


def text_of_pickle(pickled: bytes) -> str:
    """Return the text that a pickle consists of, without unpickling. Raises ValueError if it is anything else."""
    texts = list[str]()
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _TEXT_OPCODES:
            texts.append(str(argument))
        elif opcode.name not in _HARMLESS_OPCODES:
            raise ValueError(f"the pickle is no text: it has the opcode {opcode.name}")
    if len(texts) != 1:
        raise ValueError(f"the pickle is no text: it has {len(texts)} of them")
    return texts[0]


def _of_mbpp(row: _Row) -> tuple[Test, ...]:
    columns, listed = row.columns, list(map(str, row.json("test_list")))
    setup = "\n".join([*map(str, columns.get("test_imports") or ()), str(columns.get("test_setup_code") or "")])
    entry_points = _builtin_entry_points(listed)
    return tuple(CodeTest(code, setup, entry_points) for code in listed)


def _builtin_entry_points(tests: list[str]) -> tuple[str, ...]:
    """Return the name of the function under test if Python has a function of that name, as `sum`, too.

    That is where tests call nothing else; the outermost call of the first one is meant then. The program has no say in
    it: it could otherwise replace what the tests take from Python.
    """
    try:
        trees = [ast.parse(test) for test in tests]
    except (SyntaxError, ValueError, RecursionError):
        return ()
    names = [
        node.func.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return (names[0],) if names and all(hasattr(builtins, name) for name in names) else ()
