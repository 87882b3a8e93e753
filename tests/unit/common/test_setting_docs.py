"""Texts of settings: of the class or of the one that it extends, and as they are written in the source."""

from __future__ import annotations

from pydantic import BaseModel, Field

from starling.common.setting_docs import setting_texts


class Base(BaseModel):
    """A section."""

    inherited: int = 1
    """Of the base."""
    changed: int = 2
    """No longer."""


class Section(Base):
    """Another one."""

    class Nested(BaseModel):
        """A section within it."""

        depth: int = 0
        """Of the nested class."""

    changed: int = 3
    """Of the section,
    in two lines."""
    bare: int = 4
    given: int = Field(5, description="As a description.")
    """Not this."""


def test_texts_are_those_of_the_fields() -> None:
    assert setting_texts(Section) == {
        "inherited": "Of the base.",
        "changed": "Of the section,\nin two lines.",
        "bare": "",
        "given": "As a description.",
    }
    assert setting_texts(Section.Nested) == {"depth": "Of the nested class."}


def test_class_without_source_has_no_texts() -> None:
    made: type[BaseModel] = type("Made", (BaseModel,), {"__annotations__": {"one": int}, "__module__": "nowhere"})
    assert setting_texts(made) == {"one": ""}
