"""The reference of metrics is the one that the services' code has."""

from __future__ import annotations

from pathlib import Path

from starling.cli.metrics_reference import PATH, SECTIONS, reference

ROOT = Path(__file__).parents[3]


def test_page_is_written_from_the_code() -> None:
    assert (ROOT / PATH).read_text() == reference(), "run python -m starling.cli.metrics_reference"


def test_names_are_unique_and_say_their_unit() -> None:
    families = [family for _, _, families in SECTIONS for family in families]
    names = [family.name for family in families]
    assert len(set(names)) == len(names)
    for family in families:
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.kind in ("gauge", "counter", "summary", "histogram"), family.name
        if family.kind in ("summary", "histogram"):
            assert family.name.endswith("_seconds"), family.name
