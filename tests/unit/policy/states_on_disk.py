"""Saving a learner's state in a folder, and resuming another learner from it."""

from __future__ import annotations

from pathlib import Path

from starling.policy.train.checkpoint.header import newest_state
from starling.policy.train.checkpoint.state import SavedState, StateStore
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.learner import Learner


def save(learner: Learner, folder: Path, version: int) -> Path:
    """Write the state of `learner` as `version` in `folder`. Returns its path."""
    return Path(StateStore(Storage(str(folder))).write(learner.take_state(version)))


def resume(learner: Learner, folder: Path) -> int:
    """Resume `learner` from the newest state in `folder`. Returns its version, 0 if there is none."""
    found = newest_state(Storage(str(folder)))
    return 0 if found is None else learner.resume(SavedState.of(found))
