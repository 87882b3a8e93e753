"""Names of Python's libraries in the code of tests, which data sets leave to the imports of the program under test.

Such a name must not be the program's: its `math.isclose`, or its `Counter`, could say that any two values are equal.
It imports only the standard library.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

_ALIASES: Final = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas"}
_PARTS: Final = {
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **dict.fromkeys(("isclose", "inf", "nan"), "math"),
    **dict.fromkeys(("copy", "deepcopy"), "copy"),
    "Decimal": "decimal",
    "Fraction": "fractions",
}
"""Parts of modules that are used without the module's name, and that no one asks a model to write."""


def borrowed_names(*codes: str, tested: Collection[str] = ()) -> dict[str, Any]:
    """Return what the names of libraries mean in code of tests that does not import them.

    A name that such code only takes attributes of is that of a module, if there is a module of this name. Where all
    names that are left to the program are names of libraries, one of them is what is tested, and none is returned.

    Args:
        codes: parts of the tests; one that is no Python is skipped.
        tested: names of what is tested, if they are known.

    Raises:
        ImportError: there is no such library here.
    """
    used = _Used()
    for code in codes:
        try:
            used.visit(ast.parse(code))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    left = {name for name in used.read - used.bound - set(tested) if not hasattr(builtins, name)}
    found = {name: place for name in left if (place := _place_of(name, is_base=name not in used.plain)) is not None}
    if not tested and len(found) == len(left):
        return {}
    return {name: _imported(*place) for name, place in found.items()}


def _place_of(name: str, *, is_base: bool) -> tuple[str, str] | None:
    """Return the module and, in it, the name of what a name means; None if it is not known as one of a library."""
    if is_base and (module := _ALIASES.get(name) or (name if name in sys.stdlib_module_names else "")):
        return module, ""
    return (_PARTS[name], name) if name in _PARTS else None


def _imported(module: str, name: str) -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


@dataclass
class _Used(ast.NodeVisitor):
    """Names in code."""

    read: set[str] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)
    """Read otherwise than to take an attribute."""
    bound: set[str] = field(default_factory=set)
    """Given a meaning by the code itself."""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.read.add(node.value.id)
        else:
            self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        (self.plain if isinstance(node.ctx, ast.Load) else self.bound).add(node.id)
        if isinstance(node.ctx, ast.Load):
            self.read.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.bound.add(node.arg)
        self.generic_visit(node)

    def visit_alias(self, node: ast.alias) -> None:
        self.bound.add(node.asname or node.name.partition(".")[0])

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self.bound.add(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self.bound.add(node.name or "")
        self.generic_visit(node)
