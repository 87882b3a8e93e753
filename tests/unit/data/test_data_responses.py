"""Responses to learn: their text, and the errors of rows without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from starling.common.errors import ConfigError
from starling.common.wire.messages import Prompt
from starling.controller.data.prompts import Needs, load_prompts, make_prompt
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import DataRow

GOOD = {"question": "Why?", "chosen": "So.", "rejected": "No."}
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
COLUMNS = {"reference_column": "chosen", "rejected_column": "rejected"}


def make(columns: dict[str, Any], needs: Needs = "pair", **changes: Any) -> Prompt:
    settings = DataSettings(source="rows.jsonl", **{**COLUMNS, **changes})
    return make_prompt(DataRow({**GOOD, **columns}), 4, settings, needs)


def test_make_prompt_with_a_pair() -> None:
    prompt = make({})
    assert (prompt.messages[0].content, prompt.reference, prompt.rejected) == ("Why?", "So.", "No.")


def test_response_may_be_the_end_of_a_conversation() -> None:
    prompt = make({"chosen": TALK, "rejected": [*TALK[:1], {"role": "assistant", "content": "No."}]})
    assert (prompt.reference, prompt.rejected) == ("So.", "No.")
    assert make({"chosen": TALK}, "response").reference == "So."


def test_make_prompt_ignores_the_rejected_response_by_default() -> None:
    assert make({}, "prompt").rejected == make({}, "response").rejected == ""


@pytest.mark.parametrize(
    ("columns", "needs", "changes", "complaint"),
    [
        ({"question": None}, "pair", {}, "column 'question' of row 4 of 'rows.jsonl' holds None: give a text"),
        ({"question": None}, "pair", {"format": "{question}>"}, "has no value in .question., which format names"),
        ({"question": ""}, "prompt", {"format": "{question}>"}, "gives an empty prompt"),
        ({"chosen": ""}, "pair", {}, "has no response to learn: put a text into its column 'chosen'"),
        ({"chosen": None}, "response", {}, "has no response to learn: put a text into its column 'chosen'"),
        ({"chosen": []}, "response", {}, "has no response to learn"),
        ({"rejected": ""}, "pair", {}, "has no rejected response: put a text into its column 'rejected'"),
        ({}, "pair", {"rejected_column": ""}, "has no rejected response: name its column in rejected_column"),
        ({}, "response", {"reference_column": ""}, "has no response to learn: name its column in reference_column"),
        ({}, "pair", {"rejected_column": "rejcted"}, "has no column 'rejcted', which rejected_column names; nearest"),
        ({"chosen": TALK[:1]}, "pair", {}, "ends with a message of the user: a response is the assistant's"),
        ({"chosen": {"a": 1}}, "pair", {}, "a response is a text, or a list of messages"),
    ],
)
def test_make_prompt_rejects_missing_responses(
    columns: dict[str, Any], needs: Needs, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        make(columns, needs, **changes)
    assert "row 4 of 'rows.jsonl'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "needs", "complaint"),
    [
        (Prompt(id="a", reference="x", rejected="y"), "pair", "is a Prompt without messages and text"),
        (Prompt(id="a", text="q", rejected="y"), "pair", "has no response to learn: .*set reference"),
        (Prompt(id="a", text="q", reference="x"), "pair", "has no rejected response: .*set rejected"),
        (Prompt(id="a", text="q"), "response", "has no response to learn"),
    ],
)
def test_make_prompt_rejects_user_prompts_without_responses(prompt: Prompt, needs: Needs, complaint: str) -> None:
    with pytest.raises(ConfigError, match=f"row 7 of 'own.py:rows' {complaint}"):
        make_prompt(prompt, 7, DataSettings(source="own.py:rows", reference_column=""), needs)


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return str(folder / "rows.jsonl")


def as_parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def as_dataset(folder: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "rows"))
    return f"hf:{folder / 'rows'}"


def as_function(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "own.py").write_text(f"def rows():\n    return {rows!r}\n")
    return f"{folder / 'own.py'}:rows"


@pytest.mark.parametrize("kind", [as_jsonl, as_parquet, as_dataset, as_function])
@pytest.mark.parametrize("lacking", ["question", "chosen", "rejected"])
def test_load_prompts_names_the_row_without_response(kind: Any, lacking: str, tmp_path: Path) -> None:
    source = kind(tmp_path, [GOOD, GOOD, {**GOOD, lacking: None}])
    with pytest.raises(ConfigError, match=f"row 2 of '{source}'") as caught:
        load_prompts(DataSettings(source=source, **COLUMNS), "pair")
    assert lacking in str(caught.value)
    assert "\n" not in str(caught.value)
