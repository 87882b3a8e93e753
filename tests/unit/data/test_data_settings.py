"""Validation of DataSettings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from starling.common.setting_docs import setting_texts
from starling.controller.data.settings import DataSettings


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": "{question"}, "not a format string"),
        ({"format": "{}"}, "a field without a column"),
        ({"format": "{0}"}, "a field without a column"),
        ({"format": "{question}", "system": "Be brief."}, "put the text into format"),
        ({"limit": -1}, "limit"),
        ({"held_out": -1}, "held_out"),
        ({"size": 0}, "size"),
        ({"prompt_colum": "question"}, "prompt_colum"),
    ],
)
def test_data_settings_reject_invalid_formats(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        DataSettings.model_validate({"source": "rows.jsonl", **changes})


@pytest.mark.parametrize("format_", ["", "{question}\n", "{metadata[word]}>", "{{literal}} {question!r:>8}"])
def test_data_settings_accept_a_format(format_: str) -> None:
    assert DataSettings(source="rows.jsonl", format=format_).format == format_


def test_data_settings_fields_are_described_and_frozen() -> None:
    settings = DataSettings(source="rows.jsonl")
    assert all(setting_texts(DataSettings).values())
    with pytest.raises(ValidationError, match="frozen"):
        settings.source = "other.jsonl"


def test_data_settings_reject_images_with_a_format() -> None:
    with pytest.raises(ValidationError, match="format makes plain text, and images"):
        DataSettings(source="rows.jsonl", format="{question}", image_column="image")
