"""Texts of settings: the docstrings of their fields, read from the source when help or documentation shows them.

pydantic can read them, too (`use_attribute_docstrings`), but does so in every process that defines the classes, and
parsing their source is a measurable part of a start.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic import BaseModel

Texts = dict[str, str]
"""The docstring of each field, by its name."""


@cache
def setting_texts(section: type[BaseModel]) -> Texts:
    """Return the text of each setting of a section; empty for one that has none."""
    found: Texts = {}
    for base in reversed(section.__mro__):
        found |= _texts_of_module(base.__module__).get(base.__qualname__, {}) if issubclass(base, BaseModel) else {}
    return {name: field.description or found.get(name, "") for name, field in section.model_fields.items()}


@cache
def _texts_of_module(name: str) -> dict[str, Texts]:
    """Return the docstrings of the fields of all classes of a module, by the qualified name of the class."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not file.endswith(".py"):
        return {}
    found: dict[str, Texts] = {}

    def visit(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = _texts_of_class(node)
                visit(node, f"{prefix}{node.name}.")

    visit(ast.parse(Path(file).read_bytes()), "")
    return found


def _texts_of_class(node: ast.ClassDef) -> Texts:
    texts: Texts = {}
    for field, behind in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = behind.value if isinstance(behind, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[field.target.id] = inspect.cleandoc(value.value)
    return texts
