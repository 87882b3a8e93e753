"""What a worker tells its replica of a pull, without being asked: an engine that answers cannot generate meanwhile.

One datagram for each; the replica listens at a path, so all workers are on its host.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.puller.fetch import PullProgress
from starling.weightsync.puller.puller import PullReport

SEND_S: Final = 10.0
"""How long a worker tries to tell how a pull ended."""
MOST_BYTES: Final = 1 << 16


class PullMessage(msgspec.Struct, frozen=True, kw_only=True):
    """How far the pull of one worker is, or how it ended."""

    pull: int
    """Number of the pull."""
    rank: int
    progress: PullProgress | None = None
    report: PullReport | None = None
    problem: str = ""


class PullMessageSender:
    """A worker's end."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(self, news: PullMessage) -> None:
        """Send `news`. Progress that nobody reads is dropped; an end is tried for a while."""
        ends = news.progress is None
        self._socket.settimeout(SEND_S if ends else 0.0)
        try:
            self._socket.sendto(msgspec.msgpack.encode(news), self._path)
        except OSError:
            pass  # nobody listens any more: the replica has given the pull up

    def close(self) -> None:
        """Tell nothing more."""
        self._socket.close()


class PullMessageReceiver:
    """The replica's end."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "news")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._decoder = msgspec.msgpack.Decoder(PullMessage)

    def next(self, timeout_s: float) -> PullMessage | None:
        """Return the next news, or None after `timeout_s`."""
        self._socket.settimeout(timeout_s)
        try:
            return self._decoder.decode(self._socket.recv(MOST_BYTES))
        except TimeoutError:
            return None

    def close(self) -> None:
        """Hear nothing more."""
        self._socket.close()


# JOINED from starling.rollout.engine.vllm.pulls: The pull of one version by several workers, as one: how far
# they are together, and what they did.


CANCEL_CHECK_S: Final = 0.25
"""How often it is asked whether to go on."""
GRACE_S: Final = 15.0
"""How long after the deadline, which they keep themselves, workers are waited for."""


def await_workers(
    listener: PullMessageReceiver,
    number: int,
    num_workers: int,
    deadline_s: float,
    cancelled: Callable[[], bool],
    progress: Callable[[PullProgress], None],
) -> PullReport:
    """Wait until all workers have ended pull `number`; return what they did together.

    Raises:
        WeightsError: a worker failed, it was cancelled, or a worker said nothing until some time after the deadline.
    """
    end = time.monotonic() + deadline_s + GRACE_S
    reports: dict[int, PullReport] = {}
    under_way: dict[int, PullProgress] = {}
    while len(reports) < num_workers:
        if cancelled():
            raise WeightsError("The pull was cancelled.")
        left = end - time.monotonic()
        if left <= 0:
            raise WeightsError(f"{num_workers - len(reports)} workers said nothing of the pull for {deadline_s:g} s.")
        news = listener.next(min(CANCEL_CHECK_S, left))
        if news is None or news.pull != number:
            continue
        if news.problem:
            raise WeightsError(f"Worker {news.rank}: {news.problem}")
        if news.report is not None:
            reports[news.rank] = news.report
        elif news.progress is not None:
            under_way[news.rank] = news.progress
            progress(join_progress(list(under_way.values())))
    return join_reports(list(reports.values()))


def join_progress(parts: Sequence[PullProgress]) -> PullProgress:
    """Return how far workers are together; those that have said nothing yet are not counted."""
    return PullProgress(
        bytes_done=sum(part.bytes_done for part in parts),
        bytes_total=sum(part.bytes_total for part in parts),
        seconds_left=max(part.seconds_left for part in parts),
    )


def join_reports(reports: Sequence[PullReport]) -> PullReport:
    """Return one report of workers that pulled side by side: sums, and the times of the slowest."""
    slowest = max(reports, key=lambda report: report.seconds)
    sent: dict[str, int] = {}
    for report in reports:
        for address, size in report.bytes_by_source.items():
            sent[address] = sent.get(address, 0) + size
    return PullReport(
        version=slowest.version,
        transport="+".join(sorted({name for report in reports for name in report.transport.split("+") if name})),
        lanes=tuple(sorted({lane for report in reports for lane in report.lanes})),
        num_buckets=sum(report.num_buckets for report in reports),
        num_retries=sum(report.num_retries for report in reports),
        num_deltas=sum(report.num_deltas for report in reports),
        size_bytes=sum(report.size_bytes for report in reports),
        scratch_bytes=sum(report.scratch_bytes for report in reports),
        bytes_by_source=sent,
        seconds=slowest.seconds,
        prepare_s=slowest.prepare_s,
        read_s=slowest.read_s,
        unpack_s=slowest.unpack_s,
        digest_s=slowest.digest_s,
        wait_s=slowest.wait_s,
        confirm_s=slowest.confirm_s,
    )
