"""The pull of one version by several workers, as one: how far they are together, and what they did."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from starling.common.errors import WeightsError
from starling.rollout.engine.vllm.news import Listener
from starling.weightsync.execute.pull import PullReport
from starling.weightsync.execute.transfer import Progress

LOOK_EVERY_S: Final = 0.25
"""How often it is asked whether to go on."""
GRACE_S: Final = 15.0
"""How long after the deadline, which they keep themselves, workers are waited for."""


def await_workers(
    listener: Listener,
    number: int,
    num_workers: int,
    deadline_s: float,
    cancelled: Callable[[], bool],
    progress: Callable[[Progress], None],
) -> PullReport:
    """Wait until all workers have ended pull `number`; return what they did together.

    Raises:
        WeightsError: a worker failed, it was cancelled, or a worker said nothing until some time after the deadline.
    """
    end = time.monotonic() + deadline_s + GRACE_S
    reports: dict[int, PullReport] = {}
    under_way: dict[int, Progress] = {}
    while len(reports) < num_workers:
        if cancelled():
            raise WeightsError("The pull was cancelled.")
        left = end - time.monotonic()
        if left <= 0:
            raise WeightsError(f"{num_workers - len(reports)} workers said nothing of the pull for {deadline_s:g} s.")
        news = listener.next(min(LOOK_EVERY_S, left))
        if news is None or news.pull != number:
            continue
        if news.problem:
            raise WeightsError(f"Worker {news.rank}: {news.problem}")
        if news.report is not None:
            reports[news.rank] = news.report
        elif news.progress is not None:
            under_way[news.rank] = news.progress
            progress(joined_progress(list(under_way.values())))
    return joined_report(list(reports.values()))


def joined_progress(parts: Sequence[Progress]) -> Progress:
    """Return how far workers are together; those that have said nothing yet are not counted."""
    return Progress(
        bytes_done=sum(part.bytes_done for part in parts),
        bytes_total=sum(part.bytes_total for part in parts),
        seconds_left=max(part.seconds_left for part in parts),
    )


def joined_report(reports: Sequence[PullReport]) -> PullReport:
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
