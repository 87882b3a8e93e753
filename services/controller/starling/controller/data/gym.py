"""Rows of the tasks of reasoning-gym, generated in a process of its own.

The library imports matplotlib and sympy for all of its tasks: 70 MB, which a controller would keep as long as it lives.

    stdin    the request, one JSON object: task, options, size, limit
    stdout   lines of JSON: {"entry": ...} for each row, or at the end {"problem": ...}
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TextIO

from starling.common.errors import ConfigError
from starling.common.raised import plain_text
from starling.controller.data.names import nearest

SILENT_S: Final = 300.0
"""How long nothing may come: the imports take a second, and a row of the slowest tasks some seconds."""
FLUSH_S: Final = 1.0
END_S: Final = 120.0
"""How long its process may take to end, on a machine that has no time for it."""
READ_BYTES: Final = 1 << 20


def read_entries(task: str, options: Mapping[str, Any], size: int, limit: int | None) -> Iterator[dict[str, Any]]:
    """Yield `question`, `answer` and `metadata` of a task's rows, without repeated questions.

    Args:
        task: name of the task.
        options: of the task; `seed` is 0 unless they name one.
        size: number of entries of the task's dataset.
        limit: number of rows at most; None for all.

    Raises:
        ConfigError: there is no such task or option, or the task does not take its value.
    """
    request = json.dumps({"task": task, "options": dict(options), "size": size, "limit": limit}, default=str)
    # -P: a file of the working folder is not to stand in for a module.
    command = [sys.executable, "-P", "-m", "starling.controller.data.gym"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with suppress(BrokenPipeError), process.stdin as stdin:  # it has ended: see below
            stdin.write(request.encode())
        for line in _lines(process.stdout.fileno(), task):
            message = json.loads(line)
            if "problem" in message:
                raise ConfigError(message["problem"])
            yield message["entry"]
        check_end(process, task, END_S)
    finally:
        process.kill()
        process.wait(END_S)
        process.stdout.close()


def check_end(process: subprocess.Popen[bytes], task: str, timeout_s: float) -> None:
    """Raise ConfigError unless the process that has written all rows ends in time, and without an error."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the process that generates rows of reasoning_gym:{task} did not end within {timeout_s:g} s; try again "
            "when the machine has time"
        ) from None
    if code != 0:
        raise ConfigError(f"the process that generates rows of reasoning_gym:{task} ended with {code}")


def _lines(descriptor: int, task: str) -> Iterator[bytes]:
    """Yield the lines that come from a pipe. Raises ConfigError when nothing comes for too long."""
    parts: list[bytes] = []
    while True:
        if not select.select([descriptor], [], [], SILENT_S)[0]:
            raise ConfigError(f"reasoning_gym:{task} has generated no row for {SILENT_S:g} s; try other options")
        data = os.read(descriptor, READ_BYTES)
        if not data:
            return
        *lines, rest = data.split(b"\n")
        if lines:
            yield b"".join([*parts, lines[0]])
            yield from lines[1:]
            parts.clear()
        parts.append(rest)


def _write_entries(out: TextIO, task: str, options: dict[str, Any], size: int, limit: int | None) -> str:
    """Write the rows to `out`; return why there are none, empty if there are some."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if task not in DATASETS:
        return f"reasoning-gym has no task {task!r}; {nearest(task, DATASETS)}"
    known = DATASETS[task][1].__dataclass_fields__.keys() - {"size"}
    for option in options:
        if option not in known:
            remedy = "set data.size instead" if option == "size" else nearest(option, known)
            return f"the reasoning-gym task {task!r} has no option {option!r}; {remedy}"
    questions: set[str] = set()
    flushed_at = time.monotonic()
    try:
        dataset = create_dataset(task, **{"seed": 0, **options, "size": size})
        for index in range(size):
            entry = dataset[index]
            question = str(entry["question"])
            if question not in questions:
                questions.add(question)
                out.write(json.dumps({"entry": entry}, default=str) + "\n")
            if len(questions) == limit:
                break
            if time.monotonic() - flushed_at >= FLUSH_S:
                out.flush()
                flushed_at = time.monotonic()
    except Exception as error:  # noqa: BLE001 - tasks raise arbitrary exceptions for bad options
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return (
            f"the reasoning-gym task {task!r} cannot be created with options = {options} ({plain_text(reason)}): "
            "correct the options"
        )
    return ""


def main() -> None:
    """Answer the request of `read_entries`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that reads, with which this one ends
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a task prints is no row
        problem = _write_entries(out, request["task"], request["options"], request["size"], request["limit"])
        if problem:
            out.write(json.dumps({"problem": problem}) + "\n")


if __name__ == "__main__":
    main()
    os._exit(0)  # the end of an interpreter with so many modules takes seconds, in which the reader would wait
