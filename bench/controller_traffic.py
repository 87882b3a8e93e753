"""Payloads of both sides of controller_side_by_side.py, and the protocol between the benchmark and their processes.

Runs in the environments of both sides, so it needs the standard library only. Processes get requests on standard input
and answer on standard output, in lines of JSON; all stamps are nanoseconds of CLOCK_MONOTONIC, which the processes of
one host share.
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

POLICY = "policy-0"
GROUP_SIZE = 8
NUM_TOKENS = 256
PROMPT_TOKENS = 64
VOCABULARY = 150_000
WARNING_NS = 5_000_000
"""Delay from the request to the burst, so that the policy listens and all rollouts are awake."""
WARNING_EACH_NS = 200_000
"""Additional delay per rollout."""

_GO = struct.Struct("=q?")
_STAMP = struct.Struct("=iq")


@dataclass(frozen=True)
class Result:
    """The completions of one prompt as an engine has them: lists of numbers."""

    prompt: str
    prompt_ids: list[int]
    texts: list[str]
    token_ids: list[list[int]]
    logprobs: list[list[float]]
    rewards: list[float]


def make_result(number: int) -> Result:
    """Return a result of GROUP_SIZE x NUM_TOKENS tokens; log-probabilities have single precision, as in engines."""
    draw = random.Random(number)
    words = [f"w{draw.randrange(1000):03d}" for _ in range(200)]
    return Result(
        prompt=" ".join(draw.choices(words, k=PROMPT_TOKENS)),
        prompt_ids=[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)],
        texts=[" ".join(draw.choices(words, k=NUM_TOKENS)) for _ in range(GROUP_SIZE)],
        token_ids=[[draw.randrange(VOCABULARY) for _ in range(NUM_TOKENS)] for _ in range(GROUP_SIZE)],
        logprobs=[[_single(-draw.expovariate(2.0)) for _ in range(NUM_TOKENS)] for _ in range(GROUP_SIZE)],
        rewards=[float(number % 2) for number in range(GROUP_SIZE)],
    )


def _single(value: float) -> float:
    return float(struct.unpack("=f", struct.pack("=f", value))[0])


def say(**message: Any) -> None:
    """Send a JSON line to the benchmark."""
    print(json.dumps(message), flush=True)


def hear() -> dict[str, Any]:
    """Return the benchmark's next JSON line; exit this process when the benchmark has ended."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    message: dict[str, Any] = json.loads(line)
    return message


class Rollout(Protocol):
    """One rollout's line to its controller."""

    def acquire(self) -> None:
        """Get the next prompt."""
        ...

    def deliver(self, result: Result, *, tokens: bool) -> None:
        """Deliver a result; without `tokens` only its texts, if the side supports that."""
        ...


def lead_rollouts(num: int, open_line: Callable[[int], Rollout]) -> None:
    """Run `num` rollouts in forked processes, which all have a result at the same instant on request.

    Sends `armed` when each has its next prompt; on ``{"tokens": ...}`` it reports when each result was ready.
    """
    # One pipe for each of the two reports: a fast rollout is armed again before a slow one has delivered.
    (armed, arms), (ready, readies) = os.pipe(), os.pipe()
    words: list[int] = []
    for index in range(num):
        hears, tells = os.pipe()
        if os.fork() == 0:
            for descriptor in (tells, armed, ready, *words):
                os.close(descriptor)
            _be_rollout(index, hears, (arms, readies), open_line)
        os.close(hears)
        words.append(tells)
    for descriptor in (arms, readies):
        os.close(descriptor)
    while True:
        _collect(num, armed)
        say(armed=num)
        told = hear()
        begin = time.monotonic_ns() + WARNING_NS + num * WARNING_EACH_NS
        for tells in words:
            os.write(tells, _GO.pack(begin, told["tokens"]))
        say(ready=_collect(num, ready))


def _be_rollout(index: int, hears: int, reports: tuple[int, int], open_line: Callable[[int], Rollout]) -> None:
    try:
        line, result = open_line(index), make_result(index)
        while True:
            line.acquire()
            os.write(reports[0], _STAMP.pack(index, 0))
            word = os.read(hears, _GO.size)
            if not word:
                break
            begin, tokens = _GO.unpack(word)
            time.sleep(max(0, begin - time.monotonic_ns()) / 1e9)
            ready = time.monotonic_ns()
            line.deliver(result, tokens=tokens)
            os.write(reports[1], _STAMP.pack(index, ready))
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        os._exit(0)  # skip exit handlers in the fork


def _collect(num: int, pipe: int) -> list[int]:
    """Return the stamps of all rollouts, in their order."""
    stamps = [-1] * num
    while -1 in stamps:
        index, stamp = _STAMP.unpack(os.read(pipe, _STAMP.size))
        stamps[index] = stamp
    return stamps
