"""The order that the journal imposes: what follows from a record is done after the record is on disk.

Commands are taken in their order. Up to the first record they are carried out at once; from then on they wait for the
next `flush`, which makes all records durable in one transaction: that of one event alone, or of as many as came
meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from starling.controller.core.events import Command, Prune, Write
from starling.controller.shell.journal.journal import Journal, JournalFullError

log = structlog.get_logger(__name__)

RETRY_S: Final = 0.5
"""A full disk is tried again after so long."""


class CommitQueue:
    """Carries out commands, each not before the records that came before it are durable.

    Args:
        journal: takes the records.
        act: carries out any other command; gets it with the id of the event that caused it.
        patience_s: how long a full disk may stay full.
        stalled: told for how many more seconds a full disk will be tried, each time that it was in vain.
    """

    def __init__(
        self,
        journal: Journal,
        act: Callable[[Command, str], None],
        *,
        patience_s: float,
        stalled: Callable[[float], None],
    ) -> None:
        self._journal, self._act, self._patience_s, self._stalled = journal, act, patience_s, stalled
        self._held: deque[tuple[Command, str]] = deque()

    @property
    def is_pending(self) -> bool:
        """Say whether anything waits for `flush`."""
        return bool(self._held) or self._journal.num_pending > 0

    def take(self, command: Command, cause: str) -> None:
        """Carry out `command`, or hold it back until what came before it is durable."""
        match command:
            case Write(record=record, payload=payload):
                self._journal.append(record, payload)
            case Prune(step=step):
                self._journal.prune(step)
            case _ if self.is_pending:
                self._held.append((command, cause))
            case _:
                self._act(command, cause)

    def flush(self) -> None:
        """Make durable what was appended, then carry out what waited for it. Raises JournalError."""
        self._commit()
        while self._held:
            self._act(*self._held.popleft())

    def _commit(self) -> None:
        deadline, told = time.monotonic() + self._patience_s, False
        while True:
            try:
                self._journal.commit()
            except JournalFullError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                if not told:
                    told = True
                    log.error("journal_full", reason=str(error), gives_up_in_s=round(left, 1))
                self._stalled(left)
                time.sleep(min(RETRY_S, left))
            else:
                if told:
                    log.info("journal_goes_on")
                return
