"""Files of this package from which jobs are written."""

from __future__ import annotations

from importlib import resources
from typing import Final

SERVICE: Final = "service.sh"
"""Script that runs a service as a task of a scheduler."""


def template(name: str) -> str:
    """Return the text of a file of this package."""
    return resources.files("starling.cli.deploy").joinpath("jobs", name).read_text()


def filled(name: str, values: dict[str, str]) -> str:
    """Return a template with a value for each of its ``@MARKS@``."""
    text = template(name)
    for mark, value in values.items():
        text = text.replace(f"@{mark}@", value)
    return text
