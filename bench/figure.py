"""Output of every benchmark: one JSON object per figure and line, and nothing else on standard output.

    {"bench": "wire", "figure": "...", "value": 0.8, "unit": "ratio", "goal": 0.7, "better": "higher", "detail": {...}}

A figure that could not be measured has the value null and the reason in `detail.reason`. Progress is printed to
standard error.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Literal


def print_figure(
    bench: str,
    figure: str,
    value: float | None,
    *,
    unit: str,
    goal: float | None,
    better: Literal["higher", "lower"],
    detail: Mapping[str, Any],
) -> None:
    """Print one figure; `detail` holds the raw medians, sizes and versions (JSON values)."""
    line = {
        "bench": bench,
        "figure": figure,
        "value": None if value is None else rounded(value),
        "unit": unit,
        "goal": goal,
        "better": better,
        "detail": detail,
    }
    print(json.dumps(line, allow_nan=False), flush=True)


def progress(text: str) -> None:
    """Print the progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def rounded(value: float, digits: int = 4) -> float:
    """Return `value` rounded to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def quantile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def versions(*packages: str) -> dict[str, str]:
    """Return the installed version of each package, and Python's."""
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in packages}}


def machine() -> dict[str, Any]:
    """Return the number of cores and the load of the machine, on which figures depend."""
    return {"num_cores": len(os.sched_getaffinity(0)), "load_1m": round(os.getloadavg()[0], 2)}
