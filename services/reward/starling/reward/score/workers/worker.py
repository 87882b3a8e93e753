"""Worker process: resolves the scorers, and then makes one call after another.

    python -P -m starling.reward.score.workers.worker FD

It communicates over the socket FD only; what a scorer prints goes to the service's standard error. It reports after
every call, so that the service knows the current one, and may kill the worker at any time.
"""

from __future__ import annotations

import array
import contextlib
import faulthandler
import importlib
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from starling.common.errors import ConfigError
from starling.reward.score.scorers.batch import BatchScores, LoadedScorer, MediaArray
from starling.reward.score.scorers.registry import check_executor, load_scorer
from starling.reward.score.workers.confine import confine
from starling.reward.score.workers.protocol import (
    PROBLEM_CHARS,
    PROBLEMS_CHARS,
    CallChunk,
    CallReport,
    FrameReader,
    FromWorker,
    WorkerReady,
    WorkerSetup,
    WorkerStartFailed,
    decode_to_worker,
    frame,
)
from starling.reward.score.workers.shared import MAX_BUFFERS

_RECEIVE_BYTES: Final = 1 << 18


def main(argv: list[str]) -> None:
    """Serve the service over the socket `argv[1]` until it closes."""
    serve(int(argv[1]), is_confined=False)


def serve(fd: int, *, is_confined: bool) -> None:
    """Serve the service over the socket `fd` until it closes; `is_confined` says whether `confine` has been called."""
    with contextlib.suppress(ImportError):  # a Python environment of a scorer's own may lack it
        from setproctitle import setproctitle

        setproctitle("starling-reward-worker")
    faulthandler.enable()  # prints where a scorer crashes in C
    os.set_inheritable(fd, False)  # what a scorer starts must not keep the socket open
    sys.path.append(os.getcwd())  # last, so that a user's file cannot shadow a library's module
    with socket.socket(fileno=fd) as sock:
        os.register_at_fork(after_in_child=sock.close)  # what a scorer forks does not speak for the worker
        try:
            _serve(sock, is_confined=is_confined)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the service has gone


def _serve(sock: socket.socket, *, is_confined: bool) -> None:
    scorers: dict[int, LoadedScorer] = {}
    receiver = _Receiver(sock)
    for body in receiver.frames():
        message = decode_to_worker.decode(body)
        if isinstance(message, CallChunk):
            if not _run(sock, scorers, message, receiver.take_descriptors(message.num_buffers)):
                return
            continue
        if not is_confined:
            _confine(message)
        reply = _set_up(message, scorers)
        receiver.with_descriptors = any(scorer.form.media != "text" for scorer in scorers.values())
        sock.sendall(frame(reply))
        if isinstance(reply, WorkerStartFailed):
            return


class _Receiver:
    """Frames from the service, and the descriptors of buffers that come with them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._descriptors: deque[int] = deque()
        """In the order of the frames."""
        self.with_descriptors = False
        """Whether any may come; the messages of a worker that reads texts only cost less."""

    def frames(self) -> Iterator[bytes]:
        """Yield frames until the service closes the socket."""
        reader = FrameReader()
        while data := self._receive() if self.with_descriptors else self._sock.recv(_RECEIVE_BYTES):
            yield from reader.feed(data)

    def take_descriptors(self, num: int) -> list[int]:
        """Return the descriptors of the last frame. Raises RuntimeError when this process could not receive them."""
        if len(self._descriptors) < num:
            raise RuntimeError("the media of a sample cannot be received: this worker has too many files open")
        return [self._descriptors.popleft() for _ in range(num)]

    def _receive(self) -> bytes:
        # The kernel ends what it returns before the next frame that has descriptors.
        space = socket.CMSG_SPACE((MAX_BUFFERS + 1) * array.array("i").itemsize)
        data, ancillary, _, _ = self._sock.recvmsg(_RECEIVE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self._descriptors.extend(found)
        return data


def _confine(setup: WorkerSetup) -> None:
    confine(
        setup.mechanism,
        max_tasks=setup.max_tasks,
        data_mb=setup.data_mb,
        runs_programs=setup.runs_programs,
        network=setup.network,
        nice=setup.nice,
    )


def _set_up(setup: WorkerSetup, scorers: dict[int, LoadedScorer]) -> FromWorker:
    try:
        for spec in setup.scorers:
            check_executor(spec.name)
            scorers[spec.index] = load_scorer(spec.name, spec.options)
        if any(scorer.form.media != "text" for scorer in scorers.values()):
            _import_arrays()
    except ConfigError as error:
        return WorkerStartFailed(_bounded(str(error)))
    return WorkerReady(tuple((index, scorer.form) for index, scorer in scorers.items()))


def _run(sock: socket.socket, scorers: dict[int, LoadedScorer], chunk: CallChunk, descriptors: Sequence[int]) -> bool:
    """Make the calls of a chunk; return whether this worker may go on.

    It may not after a call for which memory or processes did not suffice: what took them may still be there.
    """
    pid = os.getpid()
    samples = [(chunk.prompts[prompt], completion) for prompt, completion in chunk.samples]
    array_of = _arrays(chunk, descriptors) if descriptors else None
    for serial, scorer, indices in chunk.calls:
        loaded = scorers[scorer]
        media: tuple[MediaArray, ...] = ()
        if array_of is not None and loaded.form.media != "text":
            media = tuple(map(array_of, indices))
        found = loaded.score([samples[index] for index in indices], media)
        if os.getpid() != pid:
            os._exit(0)  # a process that the scorer has forked has come back from its call
        limit = min(PROBLEM_CHARS, PROBLEMS_CHARS // len(indices))
        problems = tuple([_bounded(one, limit) for one in found.problems])
        scores = BatchScores(found.values, problems, found.is_exhausted)
        sock.sendall(frame(CallReport(serial, scores, time.monotonic())))
        if found.is_exhausted:
            return False
    return True


def _import_arrays() -> None:
    """Import numpy: a start may take longer than the first call. Raises ConfigError."""
    try:
        importlib.import_module("starling.reward.score.workers.arrays")
    except ImportError as error:
        raise ConfigError(
            f"Scorers that read media get them as arrays of numpy, which cannot be imported ({error}): install it in "
            "the Python environment of the scorer."
        ) from None


def _arrays(chunk: CallChunk, descriptors: Sequence[int]) -> Callable[[int], MediaArray]:
    """Return a function from the index of a sample of the chunk to its media."""
    # Workers for texts have no numpy.
    from starling.reward.score.workers.arrays import map_buffers, media_array, open_outputs

    outputs = open_outputs(chunk.outputs, descriptors)
    buffers = map_buffers(descriptors)

    def array_of(index: int) -> MediaArray:
        placed = chunk.media[index]
        assert placed is not None  # the service calls no scorer without the media that it reads
        return media_array(placed, buffers, outputs[index] if outputs else None)

    return array_of


def _bounded(text: str, limit: int = PROBLEM_CHARS) -> str:
    """Limit the text's length, and replace what UTF-8 cannot encode."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    main(sys.argv)
