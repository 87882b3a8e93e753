"""Save a learner's state in a folder, and have another one take it up."""

from __future__ import annotations

from pathlib import Path

from starling.policy.train.header import newest
from starling.policy.train.learner import Learner
from starling.policy.train.state import SavedState, States
from starling.policy.train.storage import Storage


def save(learner: Learner, folder: Path, version: int) -> Path:
    """Write the state of `learner` as `version` below `folder`. Returns where it is."""
    return Path(States(Storage(str(folder))).write(learner.take_state(version)))


def resume(learner: Learner, folder: Path) -> int:
    """Have `learner` take up the newest state below `folder`. Returns its version, 0 when there is none."""
    found = newest(Storage(str(folder)))
    return 0 if found is None else learner.resume(SavedState.of(found))
