"""Exception hierarchy of Starling.

    StarlingError
    ├── ConfigError      a setting, recipe, dataset or model folder that cannot be used (also a ValueError)
    ├── WireError        a frame that is not a valid message: counted and dropped, never fatal
    ├── RefusedError     the controller refuses this replica (wrong key, wrong run, wrong protocol version)
    ├── UnreachableError a peer did not answer within a deadline
    ├── RestartError     this process cannot go on, and another start of it can
    │   └── DiskFaultError   a file or folder cannot be written, and an operator has to see to its disk
    ├── StoppedError     a signal has stopped the run, and that has an exit code of its own
    └── WeightsError     weights could not be published, read, or proven

Each message is one sentence that names the value at fault and the remedy; `main` prints it without a traceback.
"""

from __future__ import annotations

from typing import Literal


class StarlingError(Exception):
    """Any error that Starling itself reports; its text is meant for the user."""


class ConfigError(StarlingError, ValueError):
    """A setting, recipe, dataset or model folder that cannot be used."""


class WireError(StarlingError):
    """A frame that is not a valid message: too large, not MessagePack, an unknown tag, another run or protocol.

    Or a message that its sender may not send, or not at this rate. `kind` is the label under which such frames are
    counted; the text may contain data of the sender.
    """

    def __init__(
        self,
        text: str,
        kind: Literal["size", "form", "buffers", "protocol", "run", "key", "epoch", "role", "rate"] = "form",
    ) -> None:
        super().__init__(text)
        self.kind = kind


class RefusedError(StarlingError):
    """The controller refuses this replica."""


class UnreachableError(StarlingError):
    """A peer did not answer within its deadline."""


class RestartError(StarlingError):
    """This process cannot go on, for example after an I/O error; another start of it can, from what is on disk."""


class DiskFaultError(RestartError):
    """A file or folder cannot be written: its disk is full, or read-only. An operator has to mend that."""


class StoppedError(StarlingError):
    """A signal has stopped the run before its end, where `exit_code` says so."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class WeightsError(StarlingError):
    """Weights could not be published, read, or proven equal to what was published."""
