"""Pull messages from vLLM's workers to the replica: what they serve, progress, and how each worker's pull ended.

Workers send them unasked, one datagram each, to a Unix socket of the replica: a worker that were polled over vLLM's RPC
could not generate meanwhile. Those on other hosts send them to their own parent, which passes them on (`nodes`).
`await_workers` joins the messages of all workers into one pull.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec.structs import replace

from starling.common.errors import WeightsError
from starling.common.wire.messages import MAX_READS
from starling.weightsync.offers.offer import Offer, make_offer
from starling.weightsync.puller.report import PullProgress, PullReport

CANCEL_CHECK_S: Final = 0.25
"""Interval at which `cancelled` is polled."""
GRACE_S: Final = 15.0
"""Extra time after the deadline, which the workers themselves enforce."""
SEND_S: Final = 10.0
"""How long a worker tries to send the message that ends its pull."""
MAX_MESSAGE_BYTES: Final = 1 << 16
MAX_PROBLEM_CHARACTERS: Final = 8000
"""Of a message, which may hold what each source of a pull has said."""

log = structlog.get_logger(__name__)


class PullMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pull of one worker its progress, its offer as a relay, or its end: a `report`, or a `problem`."""

    pull: int
    """Number of the pull."""
    rank: int
    progress: PullProgress | None = None
    offer: Offer | None = None
    report: PullReport | None = None
    problem: str = ""


class PullMessageSender:
    """The worker's side of the socket."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def send(self, message: PullMessage) -> None:
        """Send `message`, as far as it fits into a datagram.

        Progress is dropped if the socket is full; the end of a pull is retried for `SEND_S`.
        """
        message = replace(message, problem=message.problem[:MAX_PROBLEM_CHARACTERS])
        if message.report is not None:
            message = replace(message, report=shortened(message.report))
        ends = message.progress is None  # or begins: others wait for the offer
        self._socket.settimeout(SEND_S if ends else 0.0)
        try:
            self._socket.sendto(msgspec.msgpack.encode(message), self._path)
        except OSError:
            pass  # the replica has closed its socket, so it has given up the pull

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class PullMessageReceiver:
    """The replica's side of the socket."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "pulls")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._decoder = msgspec.msgpack.Decoder(PullMessage)

    def next(self, timeout_s: float) -> PullMessage | None:
        """Return the next message, or None after `timeout_s` or for one that is none."""
        self._socket.settimeout(timeout_s)
        try:
            return self._decoder.decode(self._socket.recv(MAX_MESSAGE_BYTES))
        except TimeoutError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.warning("pull_message_dropped", reason=str(error))
            return None

    def pass_on(self, message: bytes) -> None:
        """Take a message that arrived otherwise, from a worker on another host. Any thread may call this."""
        with closing(PullMessageSender(self.path)) as sender:
            sender.send(msgspec.msgpack.decode(message, type=PullMessage))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def await_workers(
    receiver: PullMessageReceiver,
    number: int,
    num_workers: int,
    deadline_s: float,
    cancelled: Callable[[], bool],
    progress: Callable[[PullProgress], None],
    announce: Callable[[Offer], None] | None = None,
) -> PullReport:
    """Wait until all workers have ended pull `number`; return their joined report.

    `announce` is called once, when all of them serve what arrives.

    Raises:
        WeightsError: a worker failed, the pull was cancelled, or a worker sent no end of it until after the deadline.
    """
    end = time.monotonic() + deadline_s + GRACE_S
    reports: dict[int, PullReport] = {}
    progress_by_rank: dict[int, PullProgress] = {}
    offers: list[Offer] = []
    while len(reports) < num_workers:
        if cancelled():
            raise WeightsError("The pull was cancelled.")
        left = end - time.monotonic()
        if left <= 0:
            raise WeightsError(f"{num_workers - len(reports)} workers did not end the pull within {deadline_s:g} s.")
        message = receiver.next(min(CANCEL_CHECK_S, left))
        if message is None or message.pull != number:
            continue
        if message.problem:
            raise WeightsError(f"Worker {message.rank}: {message.problem}")
        if message.offer is not None:
            offers.append(message.offer)
            if len(offers) == num_workers and announce is not None:
                announce(make_offer(message.offer.version, [rank for offer in offers for rank in offer.ranks]))
        elif message.report is not None:
            reports[message.rank] = message.report
        elif message.progress is not None:
            progress_by_rank[message.rank] = message.progress
            progress(join_progress(list(progress_by_rank.values())))
    return join_reports(list(reports.values()))


def shortened(report: PullReport) -> PullReport:
    """Return the report of one worker with its largest reads, and with the bytes of all its sources together: a policy
    may have thousands of ranks."""
    largest = sorted(report.reads, key=lambda read: -read.num_bytes)[:MAX_READS]
    return replace(report, reads=tuple(largest), bytes_by_source={"": sum(report.bytes_by_source.values())})


def join_progress(parts: Sequence[PullProgress]) -> PullProgress:
    """Return the progress over all workers that have sent some."""
    return PullProgress(
        bytes_done=sum(part.bytes_done for part in parts),
        bytes_total=sum(part.bytes_total for part in parts),
        seconds_left=max(part.seconds_left for part in parts),
    )


def join_reports(reports: Sequence[PullReport]) -> PullReport:
    """Return one report for workers that pulled in parallel: summed sizes, and the times of the slowest."""
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
        buffer_bytes=sum(report.buffer_bytes for report in reports),
        bytes_by_source=sent,
        seconds=slowest.seconds,
        prepare_s=slowest.prepare_s,
        read_s=slowest.read_s,
        unpack_s=slowest.unpack_s,
        digest_s=slowest.digest_s,
        wait_s=slowest.wait_s,
        confirm_s=slowest.confirm_s,
        reads=tuple(read for report in reports for read in report.reads),
    )
