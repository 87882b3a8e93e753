"""Worker process: resolves the scorers, and then makes one call after another.

    python -P -m starling.reward.score.workers.worker FD

It communicates over the socket FD only; what a scorer prints goes to the service's standard error. It reports after
every call, so that the service knows the current one, and may kill the worker at any time.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Final

from setproctitle import setproctitle

from starling.common.errors import ConfigError
from starling.common.sandbox.execution import start_executor
from starling.common.sandbox.inside import give_up_privileges, settle
from starling.reward.score.scorers.batch import BatchScores, LoadedScorer
from starling.reward.score.scorers.registry import check_executor, load_scorer
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

_RECEIVE_BYTES: Final = 1 << 18


def main(argv: list[str]) -> None:
    """Serve the service over the socket `argv[1]` until it closes."""
    fd = int(argv[1])
    setproctitle("starling-reward-worker")
    faulthandler.enable()  # prints where a scorer crashes in C
    os.set_inheritable(fd, False)  # what a scorer starts must not keep the socket open
    sys.path.append(os.getcwd())  # last, so that a user's file cannot shadow a library's module
    with socket.socket(fileno=fd) as sock:
        try:
            _serve(sock)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the service has gone


def _serve(sock: socket.socket) -> None:
    scorers: dict[int, LoadedScorer] = {}
    for body in _frames(sock):
        message = decode_to_worker.decode(body)
        if isinstance(message, CallChunk):
            _run(sock, scorers, message)
            continue
        reply = _set_up(message, scorers)
        sock.sendall(frame(reply))
        if isinstance(reply, WorkerStartFailed):
            return


def _frames(sock: socket.socket) -> Iterator[bytes]:
    reader = FrameReader()
    while data := sock.recv(_RECEIVE_BYTES):
        yield from reader.feed(data)


def _set_up(setup: WorkerSetup, scorers: dict[int, LoadedScorer]) -> FromWorker:
    settle(setup.mechanism, max_tasks=setup.max_tasks)
    if setup.runs_programs:
        start_executor(setup.mechanism)
    give_up_privileges(setup.mechanism, network=setup.network)
    try:
        for spec in setup.scorers:
            check_executor(spec.name)
            scorers[spec.index] = load_scorer(spec.name, spec.options)
    except ConfigError as error:
        return WorkerStartFailed(_bounded(str(error)))
    return WorkerReady(tuple((index, scorer.form) for index, scorer in scorers.items()))


def _run(sock: socket.socket, scorers: dict[int, LoadedScorer], chunk: CallChunk) -> None:
    samples = [(chunk.prompts[prompt], completion) for prompt, completion in chunk.samples]
    for serial, scorer, indices in chunk.calls:
        found = scorers[scorer].score([samples[index] for index in indices])
        limit = min(PROBLEM_CHARS, PROBLEMS_CHARS // len(indices))
        scores = BatchScores(found.values, tuple([_bounded(one, limit) for one in found.problems]))
        sock.sendall(frame(CallReport(serial, scores, time.monotonic())))


def _bounded(text: str, limit: int = PROBLEM_CHARS) -> str:
    """Limit the text's length, and replace what UTF-8 cannot encode."""
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    main(sys.argv)
