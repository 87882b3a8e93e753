"""The user's own scorers: `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from starling.common.errors import ConfigError
from starling.reward.score.scorers import Scorer, nearest


def import_scorer(name: str) -> Scorer:
    """Import the function that `name` names. ConfigError when its module, or the function, cannot be had."""
    place, _, function = name.rpartition(":")
    path = Path(place).expanduser()
    if path.suffix == ".py" and not path.is_file():
        raise ConfigError(f"Scorer {name!r}: there is no file {str(path.absolute())!r}.")
    try:
        module = _load_file(path) if path.suffix == ".py" else importlib.import_module(place)
    except BaseException as error:  # a user's module may raise anything while it is imported, even SystemExit
        raise ConfigError(f"Scorer {name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    return _callable_of(name, module, function)


def _load_file(path: Path) -> ModuleType:
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.path.append(str(path.absolute().parent))  # the files beside it may be imported by it
    module = importlib.util.module_from_spec(spec)
    # Known before it runs, as for every module: dataclasses look their own module up. A file that is called like a
    # module in use must not take its place.
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


def _callable_of(name: str, module: ModuleType, function: str) -> Scorer:
    found: Any = module
    for part in function.split("."):
        if not hasattr(found, part):
            functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise ConfigError(f"Scorer {name!r}: no {function!r} in there; {nearest(function, functions)}.")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"Scorer {name!r} is a {type(found).__name__}, not a function.")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigError(f"Scorer {name!r} must be a plain function that returns a number, not async or a generator.")
    scorer: Scorer = found
    return scorer
