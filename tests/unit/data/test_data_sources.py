"""Rows of real files, folders, tasks and functions, and the error of each unusable source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.controller.data import gym
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import DataRow, load_rows

ROWS = [{"question": f"{number} + 1?", "answer": number + 1} for number in range(5)]


def load_columns(source: str | Path, **changes: Any) -> list[dict[str, Any]]:
    rows = load_rows(DataSettings(source=str(source), **changes)).rows
    assert all(isinstance(row, DataRow) for row in rows)
    return [dict(row.columns) for row in rows if isinstance(row, DataRow)]


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path) -> Path:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 3, 99])
def test_jsonl_and_parquet_give_the_same_rows(tmp_path: Path, limit: int) -> None:
    expected = ROWS[: limit or None]
    assert load_columns(write_jsonl(tmp_path / "rows.jsonl"), limit=limit) == expected
    assert load_columns(write_parquet(tmp_path / "rows.parquet"), limit=limit) == expected


def test_jsonl_skips_blank_lines_and_stops_at_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"question": "é"}\n  \n{"question": "b"}\nnot json\n', encoding="utf-8")
    assert load_columns(path, limit=2) == [{"question": "é"}, {"question": "b"}]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("rows.jsonl", b'{"a": 1}\n{"a": \n', "line 2 of .* is not JSON"),
        ("rows.jsonl", b'\n\n["a"]\n', r'line 3 of .* holds \["a"\]: write a JSON object'),
        ("rows.jsonl", b'{"a": "\xff"}\n', "line 1 of .* is not JSON"),
        ("rows.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 1 of .* is not JSON"),
        ("rows.jsonl", b"\n", "is empty: give one with at least one row"),
        ("rows.parquet", b"PAR2", "cannot be read as Parquet"),
        ("rows.csv", b"a,b\n", "ends in '.csv': give a file that ends in .jsonl"),
    ],
)
def test_load_rows_rejects_a_file(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        load_columns(tmp_path / name)


@pytest.mark.parametrize("what", [b"question", b"a long text"])
def test_parquet_with_texts_that_are_no_utf8_is_refused(what: bytes, tmp_path: Path) -> None:
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a long text"]}), path, use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(what, b"\xff" + what[1:]))
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        load_columns(path)


def test_line_without_end_is_not_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("starling.controller.data.sources.LINE_BYTES", 1000)
    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"line 2 of .* is longer than 1000 bytes"):
        load_columns(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{folder}/trian.jsonl", r"does not exist; in its folder, nearest: train\.jsonl"),
        ("{folder}/nowhere/train.jsonl", "nor does its folder"),
        ("{folder}", "is a folder: name a file in it, or write hf:"),
        ("hf:{folder}/set", "does not exist; in its folder, there are: train.jsonl"),
        ("gsm8k", "neither a file nor another known source: give a path to a .jsonl"),
        ("reasoning-gym:spell_backward", "neither a file nor another known source"),
    ],
)
def test_load_rows_names_missing_files(tmp_path: Path, source: str, complaint: str) -> None:
    write_jsonl(tmp_path / "train.jsonl")
    with pytest.raises(ConfigError, match=complaint):
        load_columns(source.format(folder=tmp_path))


# --- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.fixture
def hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the cache of the library in the test's folder, and the library off the network."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_hugging_face_folder_of_files(hugging_face: Path) -> None:
    folder = hugging_face / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl")
    write_jsonl(folder / "test.jsonl", ROWS[:2])
    assert load_columns(f"hf:{folder}") == ROWS
    assert load_columns(f"hf:{folder}", split="test", limit=1) == ROWS[:1]
    with pytest.raises(ConfigError, match=r"cannot be loaded .*split = 'tset'"):
        load_columns(f"hf:{folder}", split="tset")


def test_hugging_face_folder_saved_to_disk(hugging_face: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(hugging_face / "one"))
    datasets.DatasetDict({"train": one}).save_to_disk(str(hugging_face / "many"))
    assert load_columns(f"hf:{hugging_face / 'one'}") == ROWS
    assert load_columns(f"hf:{hugging_face / 'many'}") == ROWS
    with pytest.raises(ConfigError, match="no split 'trian'; nearest: train"):
        load_columns(f"hf:{hugging_face / 'many'}", split="trian")


def test_load_rows_rejects_an_unknown_hugging_face_dataset(hugging_face: Path) -> None:
    with pytest.raises(ConfigError, match=r"'nobody/nothing' cannot be loaded .*check its name"):
        load_columns("hf:nobody/nothing")


# --- reasoning-gym -------------------------------------------------------------------------------------------------

SHORT = {"min_word_len": 3, "max_word_len": 3}


def test_reasoning_gym_questions_are_distinct_and_follow_the_options() -> None:
    columns = load_columns("reasoning_gym:spell_backward", size=3000, options=SHORT)
    questions = [row["question"] for row in columns]
    assert len(set(questions)) == len(questions) < 1371
    assert {len(row["metadata"]["word"]) for row in columns} == {3}
    assert all(row["answer"] == row["metadata"]["word"][::-1] for row in columns)
    assert load_columns("reasoning_gym:spell_backward", size=3000, options=SHORT, seed=5) == columns
    assert load_columns("reasoning_gym:spell_backward", size=3000, options={**SHORT, "seed": 99_999}) != columns
    assert load_columns("reasoning_gym:spell_backward", size=3000, options=SHORT, limit=7) == columns[:7]


@pytest.mark.parametrize(
    "task", ["spell_backward", "basic_arithmetic", "countdown", "knights_knaves", "word_ladder", "n_queens"]
)
def test_reasoning_gym_metadata_suffices_for_the_scorer(task: str) -> None:
    from reasoning_gym.factory import create_dataset

    rows = load_rows(DataSettings(source=f"reasoning_gym:{task}", size=3)).rows
    for row in rows:
        assert isinstance(row, DataRow)
        metadata = json.loads(json.dumps(row.metadata))["reasoning_gym"]
        scorer = create_dataset(metadata["task"], **metadata.get("options", {}))
        assert scorer.score_answer(row.columns["answer"], metadata["entry"]) == 1.0
        assert scorer.score_answer("no such answer", metadata["entry"]) < 1.0


@pytest.mark.parametrize(
    ("task", "options", "complaint"),
    [
        ("spell_backwards", {}, "no task 'spell_backwards'; nearest: spell_backward"),
        ("spell_backward", {"min_wordlen": 3}, "no option 'min_wordlen'; nearest: min_word_len"),
        ("spell_backward", {"size": 3}, "no option 'size'; set data.size instead"),
        ("spell_backward", {"min_word_len": 9, "max_word_len": 3}, "max_word_len must be >= min_word_len"),
        ("spell_backward", {"min_word_len": 30, "max_word_len": 30}, "correct the options"),
    ],
)
def test_load_rows_rejects_a_reasoning_gym_task(task: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_columns(f"reasoning_gym:{task}", options=options)


def test_process_that_generates_rows_has_a_deadline_and_its_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gym, "SILENT_S", 0.0)
    with pytest.raises(ConfigError, match="reasoning_gym:countdown has generated no row for 0 s"):
        list(gym.read_entries("countdown", {}, 3, None))
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(ConfigError, match="the process that generates rows of reasoning_gym:countdown ended with 1"):
        list(gym.read_entries("countdown", {}, 3, None))


PRINTING_TASK = """
import os
from dataclasses import dataclass

@dataclass
class Options:
    size: int = 1

class Task(list):
    pass

def create_dataset(name, seed, size):
    print("loaded")
    os.write(1, b"from a library in C")
    return Task([{"question": "q", "answer": "a", "metadata": {}}] * size)

DATASETS = {"loud": (Task, Options)}
"""


def test_what_a_task_prints_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").touch()
    (tmp_path / "reasoning_gym/factory.py").write_text(PRINTING_TASK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert list(gym.read_entries("loud", {}, 3, None)) == [{"question": "q", "answer": "a", "metadata": {}}]


# --- functions -----------------------------------------------------------------------------------------------------

FACTORIES = """number = 7

from itertools import count
from dataclasses import dataclass
from starling.common.wire.messages import Prompt

@dataclass
class Holder:
    value: int

def rows():
    return [{"question": "a", "answer": "b"}, Prompt(id="mine", text="c", reference="d")]

def endless():
    return ({"question": str(number)} for number in count())

def nothing():
    pass

def none_left():
    return iter(())

def text():
    return "abc"

def broken():
    raise RuntimeError("no disk\\nno luck")

def odd():
    return [{"question": "a"}, 7]
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "json.py"  # has the name of a module, which must not be shadowed
    path.write_text(FACTORIES, encoding="utf-8")
    return path


def test_load_rows_calls_a_function_of_a_file(factories: Path) -> None:
    assert load_rows(DataSettings(source=f"{factories}:rows")).rows == [
        DataRow({"question": "a", "answer": "b"}),
        Prompt(id="mine", text="c", reference="d"),
    ]
    assert [row["question"] for row in load_columns(f"{factories}:endless", limit=3)] == ["0", "1", "2"]
    assert sys.modules["json"] is json


def test_load_rows_calls_a_function_of_a_module(factories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factories.rename(factories.with_name("rows_of_a_test.py"))
    monkeypatch.syspath_prepend(factories.parent)
    assert len(load_rows(DataSettings(source="rows_of_a_test:rows")).rows) == 2


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("row", "no 'row' in there; did you mean 'rows'"),
        ("nothing", "returned None: return a sequence of rows"),
        ("none_left", "is empty"),
        ("text", "returned 'abc': return a sequence"),
        ("broken", r"raised RuntimeError: no disk no luck \(.*/json.py:\d+\); correct the function"),
        ("number", "is of type int: name a function"),
        ("odd", "row 1 of .* is 7: return dicts"),
    ],
)
def test_load_rows_rejects_a_function(factories: Path, name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_columns(f"{factories}:{name}")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("no_such_module_anywhere:rows", "cannot be imported: .*No module named"),
        ("{folder}/other.py:rows", "there is no file '.*other.py'"),
        ("{folder}/bad.py:rows", "cannot be imported: SyntaxError"),
    ],
)
def test_load_rows_rejects_a_module(tmp_path: Path, source: str, complaint: str) -> None:
    (tmp_path / "bad.py").write_text("def rows(:\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        load_columns(source.format(folder=tmp_path))


# --- imports -------------------------------------------------------------------------------------------------------


def test_heavy_libraries_are_imported_only_when_needed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl")
    program = (
        "import sys\n"
        "from starling.controller.data.prompts import load_prompts\n"
        "from starling.controller.data.settings import DataSettings\n"
        f"assert len(load_prompts(DataSettings(source={str(path)!r}))) == 5\n"
        "assert len(load_prompts(DataSettings(source='reasoning_gym:spell_backward', size=5))) == 5\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'reasoning_gym', 'matplotlib', 'sympy'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(("command", "problem"), [("exec sleep 600", "did not end within 0.1 s"), ("exit 3", "with 3")])
def test_process_of_rows_that_does_not_end_well_is_one_sentence(command: str, problem: str) -> None:
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as process:
        try:
            with pytest.raises(ConfigError, match=problem):
                gym.check_end(process, "spell_backward", 0.1 if "sleep" in command else 60.0)
        finally:
            process.kill()
