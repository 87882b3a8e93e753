"""No process of an engine outlives its replica, however that ends: vLLM's own process would wait for ever.

What it starts ends with it, but it is a child of the replica's without any code of ours. So each worker watches the
replica, from before it loads anything, and ends the process above it, too.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path
from typing import Final

from starling.common.settings import parent_variable

SHARED_MEMORY: Final = Path("/dev/shm")
REPLICA: Final = "STARLING_VLLM_REPLICA"
"""In the environment of the engine's processes: the process id of the replica."""


def end_with_replica() -> None:
    """Have a thread wait for the end of the replica; returns at once."""
    replica = parent_variable(REPLICA)
    if replica is not None:
        threading.Thread(target=_await_end, args=(int(replica), os.getppid()), name="watch", daemon=True).start()


def _await_end(replica: int, parent: int) -> None:
    try:
        handle = os.pidfd_open(replica)
        select.select([handle], [], [])  # readable once it has ended
    except ProcessLookupError:
        pass
    meeting = parent_variable("VLLM_DIST_IDENT")  # by which workers on CPUs name the memory that they share
    for file in SHARED_MEMORY.glob(f"{meeting}-*") if meeting else ():
        file.unlink(missing_ok=True)
    if parent != replica and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
