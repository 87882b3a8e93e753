"""Ids of traces and spans, derived from the run and the prompt alone: no message carries a context.

Every process that works on a group knows the id of its prompt, which is unique in the run, and computes the same trace
from it; the id of a span follows from the trace and the name of the work, so that a span names its parent although
another process exports that. No peer can put spans into the trace of another run: it does not say which trace it is.
"""

from __future__ import annotations

import hashlib
from typing import Final

ROOT: Final = "group"
"""Name of the span that all others of a trace descend from."""


def trace_id(run: str, prompt: str) -> int:
    """Return the id of the trace of a group, of 128 bits and not 0."""
    digest = hashlib.sha256(f"starling/{len(run)}/{run}/{prompt}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:16]) or 1


def span_id(trace: int, work: str) -> int:
    """Return the id of the span of `work` in a trace, of 64 bits and not 0."""
    digest = hashlib.sha256(f"{trace:032x}/{work}".encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8]) or 1


def is_sampled(trace: int, share: float) -> bool:
    """Say whether a trace is among the `share` that is kept; all processes with the same share say the same."""
    return (trace & 0xFFFFFFFF) < share * (1 << 32)


def step_work(version: int) -> str:
    """Return the name of the work of the step that makes `version`."""
    return f"step/{version}"


def publish_work(version: int) -> str:
    """Return the name of the work of publishing `version`."""
    return f"publish/{version}"
