"""Imports of torch and transformers without the parts that the services do not use.

Three things that transformers does at its import take a third of the time to import torch and transformers together:

- It marks functions for torch's compiler, and therefore imports the compiler and sympy. Here it gets the marks from a
  small module that stands for the compiler, which is imported when something else of it is used.
- It imports torch's distributed tensors for its own tensor parallelism. Here it finds that torch has none, as in a
  build of torch without them; the services hold whole models, or leave their distribution to vLLM.
- It reads the metadata of all installed distributions, to know the versions of a few. Here it gets a mapping that reads
  all of them only if the name of a module is not also that of a distribution.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final

_COMPILER: Final = "torch._dynamo"
_TRACING: Final = "torch._dynamo._trace_wrapped_higher_order_op"


@contextmanager
def lean_transformers() -> Iterator[None]:
    """Import transformers leanly inside; what was imported before stays as it is. Imports torch, if it is installed.

    No other thread may import torch's compiler or transformers meanwhile.
    """
    read_all = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: Distributions(read_all)
    try:
        with suppress(ImportError):  # not installed: the service that needs it reports that
            _stand_in_for_compiler()
            _without_distributed_tensors()
        yield
    finally:
        _remove_stand_ins()
        importlib.metadata.packages_distributions = read_all


class Distributions(Mapping[str, list[str]]):
    """Names of the distributions that provide a top-level module, as `importlib.metadata.packages_distributions`.

    A module with the name of an installed distribution is taken to come from that one alone.
    """

    def __init__(self, read_all: Callable[[], Mapping[str, list[str]]]) -> None:
        """Use `read_all`, which is slow, for names that need it."""
        self._read_all = read_all
        self._all: Mapping[str, list[str]] | None = None

    def __getitem__(self, name: str) -> list[str]:
        if self._all is None:
            if importlib.util.find_spec(name) is None:
                raise KeyError(name)
            try:
                return [importlib.metadata.distribution(name).metadata["Name"]]
            except importlib.metadata.PackageNotFoundError:
                pass
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __len__(self) -> int:
        return len(self._whole)

    @property
    def _whole(self) -> Mapping[str, list[str]]:
        if self._all is None:
            self._all = self._read_all()
        return self._all


class _StandIn(ModuleType):
    """Stands for a module, with a few of its names; any other use imports the module itself."""

    def __init__(self, name: str, **names: Any) -> None:
        super().__init__(name)
        vars(self).update(names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _stand_in_for_compiler() -> None:
    torch = importlib.import_module("torch")
    if _COMPILER in sys.modules:
        return
    marks = {"disable": _disable, "assume_constant_result": _assume_constant_result, "allow_in_graph": _allow_in_graph}
    compiler = _StandIn(_COMPILER, **marks)
    tracing = _StandIn(_TRACING, TransformGetItemToIndex=_TransformGetItemToIndex)
    sys.modules.update({_COMPILER: compiler, _TRACING: tracing})
    vars(torch)["_dynamo"] = compiler


def _remove_stand_ins() -> None:
    for name in (_COMPILER, _TRACING):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(vars(torch).get("_dynamo"), _StandIn):
        del vars(torch)["_dynamo"]


def _disable(function: Any = None, recursive: bool = True, **_: Any) -> Any:
    """Exclude `function` from compilation, for which its first call imports the compiler."""
    return importlib.import_module("torch")._disable_dynamo(function, recursive)


def _assume_constant_result(function: Any) -> Any:
    function._dynamo_marked_constant = True
    return function


def _allow_in_graph(function: Any) -> Any:
    return function  # a loader of kernels for FP8, at which a compiled function is then split


class _TransformGetItemToIndex:
    """Becomes the class of this name of the compiler, a context manager for masks, when it is called."""

    def __new__(cls) -> Any:
        return importlib.import_module(_TRACING).TransformGetItemToIndex()


def _without_distributed_tensors() -> None:
    """Make transformers find torch without distributed tensors."""
    for name in ("transformers.utils.import_utils", "transformers.utils"):
        vars(importlib.import_module(name))["is_torch_distributed_available"] = lambda: False
