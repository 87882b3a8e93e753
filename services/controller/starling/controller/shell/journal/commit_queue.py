"""Group commit: commands that follow a record are carried out after the record is durable.

Commands keep their order. Up to the first record they are carried out at once; from then on they wait for the next
`flush`, which commits the records of one or many events in one transaction.

Rewards need not be committed at once. Nothing depends on them but the release of their lease, which only ends their
resending: until then the replica that computed them keeps them. So they may share the transaction of a later event.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from starling.common.wire.messages import ReleaseLeases
from starling.controller.core.events import Command, Prune, Send, Write
from starling.controller.core.records import RewardsStored
from starling.controller.shell.journal.journal import Journal, JournalFullError

log = structlog.get_logger(__name__)

RETRY_S: Final = 0.5
"""Interval between attempts to write to a full disk."""


class CommitQueue:
    """Carries out commands in order, each after the records before it are durable.

    Args:
        journal: stores the records.
        execute: carries out a command that is not for the journal, given with the id of the event that caused it.
        full_timeout_s: longest time that the disk may stay full.
        on_full: called after each attempt to write to a full disk, with the seconds that are left of the timeout.
    """

    def __init__(
        self,
        journal: Journal,
        execute: Callable[[Command, str], None],
        *,
        full_timeout_s: float,
        on_full: Callable[[float], None],
    ) -> None:
        self._journal, self._execute = journal, execute
        self._full_timeout_s, self._on_full = full_timeout_s, on_full
        self._held: deque[tuple[Command, str]] = deque()
        self._is_urgent = False
        self.on_commit: Callable[[float], None] | None = None
        """Called after a commit with the seconds that its oldest record has waited; None where that is not measured."""
        self._since: float | None = None
        """When the oldest record was added that is not durable, in monotonic seconds, if that is measured."""

    @property
    def waiting_s(self) -> float:
        """Seconds that the oldest record waits to be durable, with `on_commit`; 0 if none waits."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    @property
    def is_pending(self) -> bool:
        """Return whether anything waits for `flush`."""
        return bool(self._held) or self._journal.num_pending > 0

    @property
    def is_urgent(self) -> bool:
        """Return whether anything waits for `flush` but rewards, and the releases that follow them."""
        return self._is_urgent

    def add(self, command: Command, cause: str) -> None:
        """Carry out `command`, or hold it until the records before it are durable."""
        match command:
            case Write(record=record, payload=payload):
                self._journal.append(record, payload)
                if self.on_commit is not None and self._since is None:
                    self._since = time.monotonic()
                self._is_urgent = self._is_urgent or not isinstance(record, RewardsStored)
            case Prune(step=step):
                self._journal.prune(step)
            case _ if self.is_pending:
                self._held.append((command, cause))
                is_release = isinstance(command, Send) and isinstance(command.message, ReleaseLeases)
                self._is_urgent = self._is_urgent or not is_release
            case _:
                self._execute(command, cause)

    def flush(self) -> None:
        """Commit the pending records, then carry out the commands that wait for them.

        Raises:
            JournalFullError: the disk has been full for too long.
            JournalError: the journal cannot be written, and what is durable is unknown.
        """
        self._commit()
        if self.on_commit is not None and self._since is not None:
            self.on_commit(self.waiting_s)
            self._since = None
        self._is_urgent = False
        while self._held:
            self._execute(*self._held.popleft())

    def _commit(self) -> None:
        deadline, is_reported = time.monotonic() + self._full_timeout_s, False
        while True:
            try:
                self._journal.commit()
            except JournalFullError as error:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                if not is_reported:
                    is_reported = True
                    log.error("journal_full", reason=str(error), gives_up_in_s=round(left, 1))
                self._on_full(left)
                time.sleep(min(RETRY_S, left))
            else:
                if is_reported:
                    log.info("journal_has_space")
                return
