"""Spans of a process's start, which python loads in every process of `bench/timeline.py`: imports and marked functions.

Each span is a JSON line in the file TIMELINE: process id, kind, label, begin and end (seconds since the epoch).
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

MARKED = {
    "starling.controller.data.load": {"load_data": "data"},
    "starling.policy.train.model.load": {"load_model": "model"},
    "starling.rollout.engine.embedded.model": {"build_model": "model"},
    "starling.algo.tokenizer": {"load_tokenizer": "model"},
    "starling.weightsync.publisher.publisher": {"Publisher.__init__": "weights", "Publisher.snapshot": "weights"},
    "starling.rollout.engine.weights": {"LiveWeights.pull": "weights", "LiveWeights.switch": "weights"},
    "starling.rollout.engine.embedded.engine": {"TransformersEngine.step": "step"},
    "starling.policy.train.learner": {"Learner.reinforce": "step"},
    "starling.reward.score.pool.check": {"check_scorers": "scorers"},
    "starling.reward.score.pool.pool": {"ScoringPool.__init__": "scorers"},
}
"""Functions by module, and the kind of their spans."""
SHORTEST_S = 0.002
_depth = threading.local()


@contextmanager
def span(kind: str, label: str) -> Iterator[None]:
    """Write a span, unless it is short or inside another one."""
    depth = getattr(_depth, "value", 0)
    begin, _depth.value = time.time(), depth + 1
    try:
        yield
    finally:
        _depth.value, end = depth, time.time()
        if not depth and end - begin >= SHORTEST_S:
            line = json.dumps([os.getpid(), kind, label, begin, end]) + "\n"
            with open(os.environ["TIMELINE"], "a") as file:
                file.write(line)


def mark(module: ModuleType, path: str, kind: str) -> None:
    """Let the function at `path` in `module` write spans."""
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, module)
    function = getattr(owner, name)

    @functools.wraps(function)
    def spanned(*args: Any, **kwargs: Any) -> Any:
        with span(kind, path):
            return function(*args, **kwargs)

    setattr(owner, name, spanned)


class Finder:
    """Finds modules as the others do, and lets their imports write spans."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of module `name`."""
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with span("imports", name):
                    run(module)
                for function, kind in MARKED.get(name, {}).items():
                    mark(module, function, kind)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "TIMELINE" in os.environ:
    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
