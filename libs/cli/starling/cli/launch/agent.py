"""Process on another machine that runs one replica for the launcher `ssh`, and leaves nothing behind.

It is started as ``python -m starling.cli.launch.agent`` by sshd, reads one line of JSON from stdin, and writes the
files in it (the run's configuration and the replica's key) to a private temporary folder. Then it runs the service as
its child, with its own stdout and stderr. Stdin stays open as long as the run needs the replica: the line ``stop`` asks
the service to end, and the end of stdin means that the supervisor is gone, or does not want it any more. The kernel
kills the service when this process dies.

Its exit code is that of the service; 128 + n when signal n has killed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

from starling.cli.services import SERVICES
from starling.common.observe.parent import die_with_parent
from starling.common.settings import child_environment

STOP: Final = "stop"
GRACE_S: Final = 20.0
"""How long a service may take to end when it is asked to, before it is killed."""
FOLDER: Final = "{folder}"
"""In arguments: the temporary folder."""
MAX_ORDER_BYTES: Final = 16 << 20
STDIN: Final = 0


def main() -> int:
    """Run the service of the order on stdin. Returns its exit code."""
    lines = _lines()
    order = json.loads(next(lines, "{}"))
    folder = Path(tempfile.mkdtemp(prefix=f"starling-{order['name']}-"))
    try:
        return _run(order, folder, lines)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(order: dict[str, Any], folder: Path, lines: Iterator[str]) -> int:
    for name, content in order["files"].items():
        path = folder / Path(name).name
        path.touch(mode=0o600)
        path.write_text(content)
    arguments = [argument.replace(FOLDER, str(folder)) for argument in order["arguments"]]
    service = subprocess.Popen(
        [sys.executable, "-m", SERVICES[order["role"]], *arguments],
        stdin=subprocess.DEVNULL,
        env=child_environment(**order["environment"]),
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    end = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        end.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    threading.Thread(target=_follow, args=(service, lines, end), name="stdin", daemon=True).start()
    try:
        code = _wait(service, end)
    finally:
        _kill_group(service.pid)
    return code if code >= 0 else 128 - code


def _follow(service: subprocess.Popen[bytes], lines: Iterator[str], end: threading.Event) -> None:
    """Ask the service to end at a line `stop`, and at the end of stdin."""
    for line in lines:
        if line == STOP and service.poll() is None:
            service.terminate()
    end.set()


def _lines() -> Iterator[str]:
    """Yield the lines of stdin. The connection's end may also be an error.

    Not by `sys.stdin`: a thread that waits there holds its lock, without which the interpreter cannot end.
    """
    rest = b""
    with contextlib.suppress(OSError):
        while (data := os.read(STDIN, 1 << 16)) and len(rest) < MAX_ORDER_BYTES:
            *whole, rest = (rest + data).split(b"\n")
            yield from (line.decode("utf-8", "replace").strip() for line in whole)


def _wait(service: subprocess.Popen[bytes], end: threading.Event) -> int:
    """Wait for the service; once `end` is set, only for `GRACE_S`. Returns its exit code."""
    deadline = None
    while True:
        try:
            return service.wait(0.2)
        except subprocess.TimeoutExpired:
            pass
        if end.is_set() and deadline is None:
            deadline = time.monotonic() + GRACE_S
            service.terminate()
        if deadline is not None and time.monotonic() > deadline:
            service.kill()


def _kill_group(group: int) -> None:
    """Kill what the service has left of its session."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


if __name__ == "__main__":
    sys.exit(main())
