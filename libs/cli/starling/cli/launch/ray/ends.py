"""How a replica under Ray has ended, from what its actors and Ray say."""

from __future__ import annotations

import signal
from typing import Final

from starling.cli.launch.interface import Ended
from starling.common.observe.process import EXIT_USAGE

NOT_FOUND: Final = (126, 127)
"""Exit codes of a shell that cannot run a command."""
BY_SIGNAL: Final = 128
"""Base of the exit codes of an agent, or of its shell, whose process was killed by a signal."""


def exited(name: str, code: int, node: str, last_line: str) -> Ended:
    """Return the end of the replica `name` whose agent exited with `code`.

    Args:
        name: of the replica.
        code: as a shell has it: 128 + n for signal n.
        node: address of the node that it was on.
        last_line: the last that it wrote; empty for none.
    """
    said = f" ({last_line})" if last_line else ""
    if code in NOT_FOUND:
        return Ended(name, EXIT_USAGE, f"could not be started on {node}{said}; set launch.ray.python")
    if code > BY_SIGNAL:
        return Ended(name, BY_SIGNAL - code, f"was killed by {_signal_name(code - BY_SIGNAL)} on {node}")
    return Ended(name, code, f"exited with code {code} on {node}{said if code else ''}")


def lost(name: str, node: str, reason: str) -> Ended:
    """Return the end of a replica that Ray lost; `node` is empty where it had none yet."""
    return Ended(name, None, f"was lost {f'on {node} ' if node else ''}({reason})")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
