"""Torch's profiler and its memory snapshots, in a process that has imported torch already; none is imported here."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Final

CLOCK_MARK: Final = "starling.clock"
"""Name of the span that is in torch's trace at a time that `TorchProfile` knows, by which the trace is aligned."""
MAX_FILE_BYTES: Final = 256 << 20
"""Largest file of a trace; a larger one is removed."""
MAX_ALLOCATIONS: Final = 100_000
"""Newest allocations in a memory snapshot."""


def torch_here() -> Any | None:
    """Return torch, if this process uses it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "profiler") else None


class TorchProfile:
    """One profile by torch, of the thread that makes it: operators, kernels and, on request, allocations."""

    def __init__(self, torch: Any, *, memory: bool) -> None:
        """Start. `memory`: record allocations; on a GPU also for a snapshot of its memory."""
        self._torch = torch
        kinds = torch.profiler.ProfilerActivity
        has_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._snapshots = memory and has_gpu
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, *([kinds.CUDA] if has_gpu else [])], profile_memory=memory, acc_events=True
        )
        self._profiler.start()
        with torch.profiler.record_function(CLOCK_MARK):
            self.mark_ns = time.perf_counter_ns()

    def end(self) -> None:
        """Stop recording; the same thread calls it."""
        self._profiler.stop()

    def write(self, path: Path, memory_path: Path) -> list[str]:
        """Write the trace, and the snapshot of the memory if there is one. Returns the names of the files.

        Raises OSError, or RuntimeError of torch.
        """
        names = []
        for one in (path, memory_path):
            one.unlink(missing_ok=True)  # torch would write through a link
        if self._snapshots:
            memory = self._torch.cuda.memory
            memory._dump_snapshot(str(memory_path))
            memory._record_memory_history(enabled=None)
            names.append(memory_path.name)
        self._profiler.export_chrome_trace(str(path))
        return [*names, path.name]
