"""Process that renders chat templates, with limits of time and memory.

A chat template is a program of the model's author. Jinja's sandbox keeps it from files, the network and Python's
internals, and bounds neither time nor memory: nested loops, `10 ** (10 ** 10)` (which its compiler computes already),
`~` of a text with itself, a filter with a large width. Only the kernel bounds all of them, and only for a process. So
each process that renders has one beside it, which runs the renderer of transformers. It starts with the first
conversation, and ends with its parent, whose end of the socket closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

CPU_S: Final = 10
"""Processor time of one rendering, in seconds; a conversation of a million characters takes milliseconds."""
DEADLINE_S: Final = 300.0
"""Limit on one rendering, and on the start of the process, where other processes have the processor."""
MEMORY_BYTES: Final = 1 << 30
"""Memory for a rendering, beside 64 bytes for each character that it is given."""
OUTPUT_CHARACTERS: Final = 1 << 20
"""Limit on the rendered text, beside 8 characters for each that is given: the tokenizer takes minutes for megabytes."""

_SIZE: Final = struct.Struct("!Q")


class TemplateError(Exception):
    """The template cannot be rendered; the text says why, in one line without a full stop."""


def render(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Return `messages` rendered by a chat template, up to the start of the assistant's next turn.

    Args:
        template: Jinja's, with what transformers adds to it.
        messages: in the format of chat templates; only what JSON can express.
        variables: `tools`, and the special tokens by their names.

    Raises:
        TemplateError: the template refuses the messages, or exceeds a limit.
    """
    try:
        given = {"template": template, "messages": list(messages), "variables": dict(variables), "cpu_s": CPU_S}
        request = json.dumps(given).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from error
    with _lock:
        answer = _renderer().answer(request)
    if "text" not in answer:
        raise TemplateError(answer["problem"])
    return str(answer["text"])


class _Renderer:
    """The process, and the socket to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.has_ended = False
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(DEADLINE_S)
        with theirs:
            command = [sys.executable, "-P", "-m", "starling.algo.chat_template", str(theirs.fileno())]
            # In a session of its own: a Ctrl-C in the terminal is for the service, which may still render.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),), start_new_session=True
            )

    def answer(self, request: bytes) -> dict[str, str]:
        """Return the answer to a request: `text`, or `problem`."""
        try:
            _send(self._socket, request)
            answer: dict[str, str] = json.loads(_receive(self._socket))
        except TimeoutError:
            return {"problem": f"it took more than {DEADLINE_S:.0f} s; {self._end()}"}
        except OSError:
            return {"problem": self._end()}
        except BaseException:  # an interrupt between a request and its answer: the next one would get this answer
            self._end()
            raise
        return answer

    def _end(self) -> str:
        """End the process; returns how it ended."""
        self.has_ended = True
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # it has closed its socket and is about to exit, or hangs
        self._process.kill()
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            return f"it took more than {CPU_S} s of processor time"
        return f"the process that renders it ended with status {status}"


_lock = threading.Lock()
_current: _Renderer | None = None


def _renderer() -> _Renderer:
    global _current
    if _current is None or _current.has_ended or _current.owner != os.getpid():  # a forked process starts its own
        _current = _Renderer()
    return _current


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_new_lock)


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(_SIZE.pack(len(body)))
    connection.sendall(body)


def _receive(connection: socket.socket) -> bytes:
    """Return a message. Raises OSError where the other end has closed."""
    (size,) = _SIZE.unpack(_exactly(connection, _SIZE.size))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        num = connection.recv_into(view)
        if not num:
            raise ConnectionResetError("the other process has closed its end")
        view = view[num:]
    return bytes(buffer)


def _serve(connection: socket.socket) -> NoReturn:
    """Render what is asked for until the other end closes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            body = _receive(connection)
        except OSError:
            os._exit(0)
        request = json.loads(body)
        _set_limits(request["cpu_s"], MEMORY_BYTES + 64 * len(body))
        try:
            texts, _ = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=request["template"],
                add_generation_prompt=True,
                **request["variables"],
            )
            answer = _checked(str(texts[0]), OUTPUT_CHARACTERS + 8 * len(body))
        except MemoryError:
            answer = {"problem": f"it took more than {MEMORY_BYTES >> 20} MiB of memory"}
        except Exception as error:  # noqa: BLE001 - a template is a program of the model: it may raise anything
            reason = (str(error).strip() or "no reason given").splitlines()[0]
            answer = {"problem": f"{type(error).__name__}: {reason:.200}"}
        try:
            _send(connection, json.dumps(answer).encode())
        except OSError:
            os._exit(0)


def _set_limits(cpu_s: int, memory_bytes: int) -> None:
    """Limit the processor time and the memory that this process uses from now on; the kernel ends it by SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/statm") as file:
        held_bytes = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")  # data and stack
    limits = {
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + 1 + cpu_s,
        resource.RLIMIT_DATA: held_bytes + memory_bytes,
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _checked(text: str, limit: int) -> dict[str, str]:
    if len(text) > limit:
        return {"problem": f"it wrote {len(text)} characters, and at most {limit} are accepted for this conversation"}
    return {"text": text}


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
