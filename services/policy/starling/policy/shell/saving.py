"""Saving of states and exports: on command, at an interval, on SIGUSR1, and before leaving on SIGTERM.

Taking a state pauses the steps for a copy into host memory; a background thread writes the copy and then answers the
command. One thing is written at a time: see `starling.policy.train.checkpoint.writer`.
"""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Protocol

import structlog

from starling.common.errors import ConfigError, StarlingError
from starling.common.ids import TrainerKind
from starling.common.offers import AnswerLease, lease_failure
from starling.common.wire import messages as wire
from starling.policy.settings.saving import SavingSettings
from starling.policy.train.checkpoint.header import CHECKPOINTS, STATES, find_state, newest_state
from starling.policy.train.checkpoint.huggingface import CHECKPOINT, Saveable, export_hf
from starling.policy.train.checkpoint.shared_export import ExportedWeights
from starling.policy.train.checkpoint.state import SavedState, StateSnapshot, StateStore
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.checkpoint.writer import BackgroundWriter, WriteOutcome

log = structlog.get_logger(__name__)

STATE_FORMAT: Final = "starling.policy.train.checkpoint.dcp"
"""The module that writes states."""


class SavedModel(Protocol):
    """Everything that is saved: a learner, or the learners of all ranks of a replica, whose methods these are."""

    @property
    def model(self) -> Any:
        """The model, for its architecture."""

    def take_state(self, version: int, *, run: str = "", metrics: Mapping[str, float] | None = None) -> StateSnapshot:
        """Copy the present state into host memory."""

    def resume(self, saved: SavedState, *, next_kind: TrainerKind | None = None) -> int:
        """Restore a saved state. Returns its version."""

    def exported(self, *, merged: bool = False) -> ExportedWeights:
        """Copy the tensors of an export into host memory."""


class PolicySaver:
    """Saves the states and exports of one policy."""

    def __init__(
        self,
        learner: SavedModel,
        tokenizer: Saveable,
        settings: SavingSettings,
        run: str,
        home: Storage,
        *,
        merged: bool = False,
        shared: Path | None = None,
    ) -> None:
        """Prepare to save the versions of `learner` for `run`, in `home`.

        Args:
            merged: export a model with adapters merged, instead of the adapters.
            shared: a folder that all hosts of the policy see, for exports to other storage; None for one host.
        """
        self._learner, self._tokenizer, self._settings, self._run = learner, tokenizer, settings, run
        self._states = StateStore(home.below(STATES), max_keep=settings.max_keep, best=settings.best)
        self._exports, self._merged, self._shared = home.below(CHECKPOINTS), merged, shared
        self._requested = threading.Event()
        self._saved = -1
        """Newest version with a state, complete or being written."""

    def connect(
        self, answer: AnswerLease, broken: Callable[[Future[None]], None], changed: Callable[[], None] = lambda: None
    ) -> None:
        """Answer leases with `answer`; see `BackgroundWriter` for the other arguments."""
        self._answer = answer
        self._writer = BackgroundWriter(self._settings.patience_s, broken, changed)

    def listen(self, wake: Callable[[], None]) -> None:
        """Save after the present command when SIGUSR1 arrives; its handler calls `wake` to end the wait for one."""

        def request(number: int, frame: FrameType | None) -> None:
            self._requested.set()
            wake()

        signal.signal(signal.SIGUSR1, request)

    def resume(self) -> int:
        """Restore the newest state of this run, or, if it has none, the state that the run starts from.

        Returns its version, 0 without a state. Raises ConfigError if it is of another model.
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
        """Save a state or an export, and answer once it is durable. Raises ConfigError if the save before it hangs."""
        done = partial(self._done, message)
        if message.state:
            self._save_state(message.step, message.metrics, done)
        else:
            self._export(message.step, done)

    def export_if_due(self, version: int) -> None:
        """Export the version of a step, if the interval says so."""
        every = self._settings.hf_every
        if every and version % every == 0:
            try:
                self._export(version, partial(_log_outcome, "export", version))
            except ConfigError as error:
                _log_outcome("export", version, error)

    def save_if_requested(self, version: int) -> None:
        """Save the state, if a signal has requested it."""
        if self._requested.is_set():
            self._requested.clear()
            try:
                self._save_state(version, {}, partial(_log_outcome, "state", version))
            except ConfigError as error:
                _log_outcome("state", version, error)

    def leave(self, version: int) -> None:
        """Save the state before the process ends on a signal, if time permits; earlier states are kept in any case.

        `version`: of the weights; -1 for none that can be saved.
        """
        until = time.monotonic() + self._settings.leave_s
        try:
            if version > max(self._saved, 0):
                self._save_state(version, {}, partial(_log_outcome, "state", version), self._settings.leave_s)
        except ConfigError as error:
            _log_outcome("state", version, error)
        self.finish(max(0.0, until - time.monotonic()))

    def finish(self, timeout_s: float | None = None) -> None:
        """Wait for the write in progress, before the process ends: `timeout_s`, by default `patience_s`."""
        try:
            self._writer.wait(timeout_s)
        except ConfigError as error:
            log.warning("not waited for any longer", reason=str(error))

    @property
    def is_writing(self) -> bool:
        """Whether a state or an export is being written."""
        return self._writer.is_writing

    def waits(self, now: float) -> tuple[wire.Wait, ...]:
        """Return the waits that delay the steps at `now` (monotonic seconds)."""
        return self._writer.waits(now)

    def _save_state(
        self,
        version: int,
        metrics: dict[str, float],
        done: Callable[[WriteOutcome], None],
        patience_s: float | None = None,
    ) -> None:
        self._writer.wait(patience_s)
        importlib.import_module(STATE_FORMAT)  # once; in the writer it would keep later states waiting

        def copy() -> Callable[[], str]:
            snapshot = self._learner.take_state(version, run=self._run, metrics=metrics)
            self._saved = version
            return lambda: self._states.write(snapshot)

        def after(outcome: WriteOutcome) -> None:
            if isinstance(outcome, StarlingError):
                self._saved = -1
            done(outcome)

        self._writer.begin(f"the state of version {version}", copy, after)

    def _export(self, version: int, done: Callable[[WriteOutcome], None]) -> None:
        self._writer.wait()

        def copy() -> Callable[[], str]:
            return partial(
                export_hf,
                self._learner.model,
                self._tokenizer,
                self._exports,
                f"{CHECKPOINT}{version}",
                weights=self._learner.exported(merged=self._merged),
                shard_mb=self._settings.shard_mb,
                temporary=self._shared,
            )

        self._writer.begin(f"the checkpoint of version {version}", copy, done)

    def _done(self, message: wire.SaveCheckpoint, outcome: WriteOutcome) -> None:
        if isinstance(outcome, StarlingError):
            self._answer(message.lease, lease_failure(message.lease, outcome, message.step), ())
        else:
            saved = wire.CheckpointSaved(lease=message.lease, step=message.step, path=outcome, state=message.state)
            self._answer(message.lease, saved, ())


def _log_outcome(what: str, version: int, outcome: WriteOutcome) -> None:
    """Log the outcome of a save that no command waits for."""
    if isinstance(outcome, StarlingError):
        log.warning("not saved", what=what, version=version, reason=str(outcome))
    else:
        log.info("saved", what=what, version=version, path=outcome)
