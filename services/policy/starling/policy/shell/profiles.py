"""Profiles of a policy: those of its own process, and those of its other ranks, which their processes record."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from starling.common.errors import StarlingError
from starling.common.observe.profiling.limits import FOLDER
from starling.common.observe.profiling.profiler import ActiveProfile
from starling.common.observe.terminal import one_line
from starling.common.service import ServiceArguments
from starling.common.wire import messages as wire
from starling.policy.shell.commands import RankProfiled

if TYPE_CHECKING:  # it imports torch
    from starling.policy.shell.rank import PolicyRank

log = structlog.get_logger(__name__)

RANKS_WRITE_S: Final = 90.0
"""How long the other ranks may take to write their files."""


class RankProfiles:
    """The profiles of a rank that is not rank 0. Its methods belong to the thread that makes the steps."""

    def __init__(self, arguments: ServiceArguments, rank: int) -> None:
        self._name, self._folder, self._rank = arguments.name, arguments.folder / FOLDER, rank
        self._active: ActiveProfile | None = None
        self._ended = RankProfiled()

    def start(self, rank: PolicyRank, order: wire.Profile) -> None:
        """Start to record, if this rank is to; where it cannot, `end` says why."""
        self._ended = RankProfiled()
        if self._active is not None or (order.ranks and self._rank not in order.ranks):
            return
        name, folder = f"{self._name}.rank-{self._rank}", self._folder / order.profile
        try:
            self._active = ActiveProfile(order, folder, name, order.num_steps, order.limit_s, rank=self._rank)
        except (OSError, RuntimeError) as error:
            self._ended = RankProfiled(text=f"rank {self._rank}: {one_line(str(error))}")
            return
        rank.clock.watch = self._active.enter

    def step(self, rank: PolicyRank, message: wire.TrainStep, buffers: tuple[bytes, ...]) -> None:
        """Make a step, and end a profile that has all of its steps."""
        active = self._active
        if active is None:
            rank.train(message, buffers)
            return
        with active.span(f"step {message.step}"):
            rank.train(message, buffers)
        active.count()
        if active.is_over(time.monotonic()):
            self._end(active, rank)

    def end(self, rank: PolicyRank) -> bytes:
        """End a profile that is still being recorded, and return a `RankProfiled`."""
        if self._active is not None:
            self._end(self._active, rank)
        return msgspec.msgpack.encode(self._ended)

    def _end(self, active: ActiveProfile, rank: PolicyRank) -> None:
        self._active = rank.clock.watch = None
        try:
            text = active.end()
        except (OSError, RuntimeError, ValueError) as error:
            text = one_line(str(error))
        self._ended = RankProfiled(text=f"rank {self._rank}: {text}", files=tuple(active.files))


def results_of_ranks(futures: list[Future[bytes]], timeout_s: float = RANKS_WRITE_S) -> tuple[str, list[str]]:
    """Return what the other ranks have recorded, in words, and their files."""
    texts: list[str] = []
    files: list[str] = []
    deadline = time.monotonic() + timeout_s
    for rank, future in enumerate(futures, start=1):
        try:
            reply = msgspec.msgpack.decode(future.result(max(0.0, deadline - time.monotonic())), type=RankProfiled)
        except (FutureTimeoutError, StarlingError) as error:
            texts.append(f"rank {rank} has not written its profile ({one_line(str(error)) or 'it took too long'})")
            continue
        texts += [reply.text] if reply.text else []
        files += reply.files
    return "; ".join(texts), files
