"""Thread that computes the digest of the checkpoint of a run without a policy, where the controller can read it.

A rollout's digest is computed in the same way. With its own, the controller believes no rollout which is right.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from starling.common.errors import ConfigError
from starling.common.folder_digests import model_digest
from starling.controller.settings import ControllerProcess

log = structlog.get_logger(__name__)


class CheckpointReader:
    """Reads a model's folder in a thread, which takes as long as an engine takes to load it."""

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        """Begin to read; `wake` is called in the thread when `take` has something to return or to raise."""
        self._folder, self._wake = folder, wake
        self._digests: deque[str] = deque()
        # A daemon: the end of the process does not wait for it.
        threading.Thread(target=self._read, name="digest", daemon=True).start()

    def take(self, journaled: str) -> str | None:
        """Return the digest when it is known, empty if a file cannot be read; None before, and from then on.

        Raises ConfigError when it is another one than `journaled`, with which the run began; empty if it begins now.
        """
        digest = self._digests.popleft() if self._digests else None
        if digest and journaled and digest != journaled:
            raise ConfigError(
                f"the checkpoint in {self._folder} is not that of this run: its digest is {digest}, and the run began "
                f"with {journaled}; restore it, or begin a new run"
            )
        return digest

    def _read(self) -> None:
        digest = ""
        try:
            digest = model_digest(self._folder)
        except ConfigError as error:
            log.warning("checkpoint_not_read", reason=str(error))
        self._digests.append(digest)
        self._wake()


def read_checkpoint(settings: ControllerProcess, wake: Callable[[], None]) -> CheckpointReader | None:
    """Begin to read the checkpoint of a run without a policy; None with a policy, or without a model folder here."""
    path = settings.controller.model_path
    folder = Path(path)
    try:
        is_here = path != "" and not settings.kind.trains and (folder / "config.json").is_file()
    except OSError as error:
        log.warning("checkpoint_not_read", reason=f"the model folder {folder} cannot be read ({error.strerror})")
        return None
    return CheckpointReader(folder, wake) if is_here else None
