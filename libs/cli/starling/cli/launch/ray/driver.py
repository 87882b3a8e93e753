"""The driver of Ray: a process beside the supervisor that holds the placement groups and actors of a run's replicas.

    supervisor (launcher) -> driver -> actors, one on each node of a replica

It is a process of its own because Ray ends the process that uses it when the cluster is gone, and answers when it
likes; the supervisor, the controller and the journal go on meanwhile. Launcher and driver exchange lines of JSON over
stdin and stdout:

| to the driver | meaning |
|---|---|
| `start` | place a replica: its name, the needs (`needs.py`), an order for the agent of each node, the interpreter |
| `stop` | ask a replica to end |
| `close` | end all replicas, and exit; the end of stdin means the same |

| from the driver | meaning |
|---|---|
| `ready` | Ray is there, with these nodes |
| `failed` | it is not, in a sentence |
| `waits` | a replica has no nodes yet |
| `placed` | it has these nodes, and its processes this niceness |
| `lines` | its output, on node number `node` |
| `ended` | its end: exit code as a shell has it, or why it was lost |
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import sys
import threading
import time
from typing import IO, Any, Final

from starling.cli.launch.ray import actor as actor_module
from starling.cli.launch.ray.replica import RayReplica

LOOK_S: Final = 0.2
"""How long the driver waits for answers of actors before it reads its own commands."""
CLOSE_S: Final = 26.0
"""Longest time in which all replicas end; their agents kill them after 20 s."""
STDIN: Final = 0


def main(arguments: list[str]) -> int:
    """Serve one run; the only argument is the address of the cluster."""
    told = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no line of ours
    ray = importlib.import_module("ray")
    try:
        ray.init(address=arguments[0], namespace="starling", log_to_driver=False)
    # What Ray raises for a wrong address, another version, or a wrong token.
    except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
        tell(told, "failed", text=": ".join(first_line(one) for one in (error, error.__cause__) if one is not None))
        return 1
    importlib.import_module("ray.cloudpickle").register_pickle_by_value(actor_module)
    tell(told, "ready", nodes=sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}))
    try:
        Driver(ray, told).run()
    finally:
        ray.shutdown()
    return 0


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def tell(told: IO[str], kind: str, **fields: Any) -> None:
    """Write a line for the launcher; without one this process ends by the end of its stdin."""
    try:
        told.write(json.dumps({"kind": kind, **fields}) + "\n")
    except OSError:
        return


class Driver:
    """Obeys the launcher, and looks after the replicas."""

    def __init__(self, ray: Any, told: IO[str]) -> None:
        """`ray`: the module, connected. `told`: the stream to the launcher."""
        self._ray, self._told = ray, told
        self._commands: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._replicas: dict[str, RayReplica] = {}
        self._close_by: float | None = None
        threading.Thread(target=self._read, name="stdin", daemon=True).start()

    def run(self) -> None:
        """Run until the launcher closes this driver and all replicas have ended, or `CLOSE_S` have passed."""
        while self._close_by is None or (self._replicas and time.monotonic() < self._close_by):
            while not self._commands.empty():
                self._obey(self._commands.get())
            for name, replica in list(self._replicas.items()):
                for kind, fields in replica.advance(time.monotonic()):
                    tell(self._told, kind, name=name, **fields)
                if replica.is_over:
                    del self._replicas[name]
            asked = [one for replica in self._replicas.values() for one in replica.asked()]
            if asked:
                self._ray.wait(asked, num_returns=1, timeout=LOOK_S)
            time.sleep(LOOK_S / 2)
        for replica in self._replicas.values():
            replica.release()

    def _obey(self, command: dict[str, Any] | None) -> None:
        """Carry out a command; None is the end of stdin."""
        kind = "close" if command is None else command["kind"]
        if kind == "close" or command is None:
            self._close_by = self._close_by or time.monotonic() + CLOSE_S
            for replica in self._replicas.values():
                replica.close()
        elif kind == "start":
            self._replicas[command["name"]] = RayReplica(self._ray, command)
        elif command["name"] in self._replicas:
            self._replicas[command["name"]].stop()

    def _read(self) -> None:
        """Queue the commands on stdin. By the descriptor: a lock of `sys.stdin` would outlive this thread."""
        rest = b""
        while data := os.read(STDIN, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._commands.put(json.loads(line))
        self._commands.put(None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
