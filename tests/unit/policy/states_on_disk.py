"""Save a learner's state in a folder, and have another one take it up."""

from __future__ import annotations

from pathlib import Path

from starling.policy.train.checkpoint.header import newest_state
from starling.policy.train.checkpoint.state import SavedState, StateStore
from starling.policy.train.checkpoint.storage import Storage
from starling.policy.train.learner import Learner


def save(learner: Learner, folder: Path, version: int) -> Path:
    """Write the state of `learner` as `version` below `folder`. Returns where it is."""
    return Path(StateStore(Storage(str(folder))).write(learner.take_state(version)))


def resume(learner: Learner, folder: Path) -> int:
    """Have `learner` take up the newest state below `folder`. Returns its version, 0 when there is none."""
    found = newest_state(Storage(str(folder)))
    return 0 if found is None else learner.resume(SavedState.of(found))
