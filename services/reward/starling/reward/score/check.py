"""Can these scorers be used? Asked at start, so that no sample has to find out."""

from __future__ import annotations

import select
import time

from starling.common.errors import ConfigError
from starling.reward.score.pool import setup_of
from starling.reward.score.process import WorkerProcess
from starling.reward.score.protocol import Ready, StartFailed
from starling.reward.settings import RewardSettings


def check(settings: RewardSettings) -> None:
    """Resolve every scorer in a worker process, as the service will. ConfigError when one cannot be used."""
    process = WorkerProcess(setup_of(settings))
    try:
        _await_ready(process, settings.start_timeout_s)
    finally:
        process.end()


def _await_ready(process: WorkerProcess, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    poller.register(process, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        poller.poll(left_s * 1000)
        process.flush()
        for message in process.receive():
            if isinstance(message, StartFailed):
                raise ConfigError(message.problem)
            if isinstance(message, Ready):
                return
        if process.over:
            raise ConfigError(f"Importing the scorers ended their process ({process.last_words()}).")
    raise ConfigError(
        f"Importing the scorers took longer than {timeout_s:g} s: make their modules import faster, or raise "
        "start_timeout_s."
    )
