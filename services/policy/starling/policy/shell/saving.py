"""When a policy saves: as it is told, on an interval, on SIGUSR1, and before it leaves on SIGTERM.

To take a state holds the steps up for a copy into the host's memory; a thread of its own writes that, and then
answers whoever asked. One thing is written at a time: see `starling.policy.train.checkpoint.writer`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType

import structlog

from starling.common.errors import ConfigError, StarlingError
from starling.common.offers import AnswerLease, lease_failure
from starling.common.wire import messages as wire
from starling.policy.settings.saving import SavingSettings
from starling.policy.train.checkpoint.header import STATES, find_state, newest_state
from starling.policy.train.checkpoint.huggingface import Saveable, export_hf
from starling.policy.train.checkpoint.state import SavedState, StateStore
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.checkpoint.writer import BackgroundWriter, WriteOutcome
from starling.policy.train.learner import Learner

log = structlog.get_logger(__name__)

CHECKPOINTS = "checkpoints"
"""Where in a run's folder its exports are."""
LEAVE_S = 20.0
"""How long who was told to leave waits for what is written, all in all: less than `STOP_S`, after which it is ended."""


class PolicySaver:
    """All that one policy saves."""

    def __init__(
        self,
        learner: Learner,
        tokenizer: Saveable,
        settings: SavingSettings,
        run: str,
        folder: Path,
        *,
        merged: bool = False,
    ) -> None:
        """Prepare to save what `learner` makes in `run`, whose files are in `folder`; exports are `merged` or adapters.

        Raises:
            ConfigError: one cannot write where the settings say.
        """
        self._learner, self._tokenizer, self._settings, self._run = learner, tokenizer, settings, run
        home = Storage(str(folder.absolute()))
        if settings.folder:
            home = Storage(settings.folder, settings.storage_options).below(*run.split("/"))
            home.check()
        self._states = StateStore(home.below(STATES), max_keep=settings.max_keep, best=settings.best)
        self._exports, self._merged = home.below(CHECKPOINTS), merged
        self._wished = threading.Event()
        self._saved = -1
        """The newest version of which there is a state, or is one being written."""

    def connect(
        self, answer: AnswerLease, broken: Callable[[Future[None]], None], changed: Callable[[], None] = lambda: None
    ) -> None:
        """Answer leases by `answer`; see `BackgroundWriter` for the others."""
        self._answer = answer
        self._saver = BackgroundWriter(self._settings.patience_s, broken, changed)

    def listen(self, wake: Callable[[], None]) -> None:
        """Save at the next occasion when SIGUSR1 comes; `wake` makes it come soon, and is called by the handler."""

        def wish(number: int, frame: FrameType | None) -> None:
            self._wished.set()
            wake()

        signal.signal(signal.SIGUSR1, wish)

    def resume(self) -> int:
        """Have the learner take up the newest state: of this run, or before there is one of that which it goes on from.

        Returns its version, 0 when there is none. Raises ConfigError when it is of another model.
        """
        found, next_kind = newest_state(self._states.storage), None
        if found is None and self._settings.begin_from:
            found = find_state(self._settings.begin_from, self._settings.storage_options)
            next_kind = self._settings.begin_kind
        elif found is not None:
            self._saved = found.state.version
        if found is None:
            return 0
        version = self._learner.resume(SavedState.of(found), next_kind=next_kind)
        log.info("resumed", version=version, state=found.url)
        return version

    def save(self, message: wire.SaveCheckpoint) -> None:
        """Take what is to be saved, and answer when it is durable. Raises ConfigError when the save before hangs."""
        done = partial(self._done, message)
        if message.state:
            self._save_state(message.step, message.metrics, done)
        else:
            self._export(message.step, done)

    def export_if_due(self, version: int) -> None:
        """Export the version that a step has made, if it is one of the interval."""
        every = self._settings.hf_every
        if every and version % every == 0:
            try:
                self._export(version, partial(_tell, "export", version))
            except ConfigError as error:
                _tell("export", version, error)

    def keep_wish(self, version: int) -> None:
        """Save the state, if a signal has come that asks for it."""
        if self._wished.is_set():
            self._wished.clear()
            try:
                self._save_state(version, {}, partial(_tell, "state", version))
            except ConfigError as error:
                _tell("state", version, error)

    def leave(self, version: int) -> None:
        """Save the state before the process ends, if that is done in time; what was saved before stays anyhow."""
        until = time.monotonic() + LEAVE_S
        try:
            if version > max(self._saved, 0):
                self._save_state(version, {}, partial(_tell, "state", version), LEAVE_S)
        except ConfigError as error:
            _tell("state", version, error)
        self.finish(max(0.0, until - time.monotonic()))

    def finish(self, timeout_s: float = LEAVE_S) -> None:
        """Wait for what is being written, before the process ends."""
        try:
            self._saver.wait(timeout_s)
        except ConfigError as error:
            log.warning("not waited for any longer", reason=str(error))

    def waits(self, now: float) -> tuple[wire.Wait, ...]:
        """Return what holds the steps up at `now` (monotonic seconds)."""
        return self._saver.waits(now)

    def _save_state(
        self,
        version: int,
        metrics: dict[str, float],
        done: Callable[[WriteOutcome], None],
        patience_s: float | None = None,
    ) -> None:
        self._saver.wait(patience_s)
        taken = self._learner.take_state(version, run=self._run, metrics=metrics)
        self._saved = version

        def after(outcome: WriteOutcome) -> None:
            if isinstance(outcome, StarlingError):
                self._saved = -1
            done(outcome)

        self._saver.begin(f"the state of version {version}", lambda: self._states.write(taken), after)

    def _export(self, version: int, done: Callable[[WriteOutcome], None]) -> None:
        self._saver.wait()
        weights = self._learner.exported(merged=self._merged)
        self._saver.begin(
            f"the checkpoint of version {version}",
            lambda: export_hf(
                self._learner.model,
                self._tokenizer,
                self._exports,
                f"step-{version}",
                weights=weights,
                shard_mb=self._settings.shard_mb,
            ),
            done,
        )

    def _done(self, message: wire.SaveCheckpoint, outcome: WriteOutcome) -> None:
        if isinstance(outcome, StarlingError):
            self._answer(message.lease, lease_failure(message.lease, outcome, message.step), ())
        else:
            saved = wire.CheckpointSaved(lease=message.lease, step=message.step, path=outcome, state=message.state)
            self._answer(message.lease, saved, ())


def _tell(what: str, version: int, outcome: WriteOutcome) -> None:
    """Say what became of a save that nobody waits for."""
    if isinstance(outcome, StarlingError):
        log.warning("not saved", what=what, version=version, reason=str(outcome))
    else:
        log.info("saved", what=what, version=version, path=outcome)
