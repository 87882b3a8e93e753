"""The errors of Starling.

    StarlingError
    ├── ConfigError      a setting, recipe, dataset or model folder that cannot be used (also a ValueError)
    ├── WireError        a frame that is not one of ours: counted and dropped, never fatal
    ├── RefusedError     the controller will not have this replica (wrong key, wrong run, wrong protocol version)
    ├── UnreachableError a peer did not answer within a deadline
    └── WeightsError     weights could not be published, read, or proven

Each message is one sentence that names the value at fault and the remedy; `main` prints it without a traceback.
"""

from __future__ import annotations

from typing import Literal


class StarlingError(Exception):
    """Anything that Starling itself reports; its text is meant for the user."""


class ConfigError(StarlingError, ValueError):
    """A setting, recipe, dataset or model folder that cannot be used."""


class WireError(StarlingError):
    """A frame that is not one of ours: too large, not MessagePack, an unknown message, another run or protocol.

    Or one of ours that its sender may not send, or not so often.
    `kind` is one of few words by which such frames are counted; the text may hold what the sender chose.
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


class WeightsError(StarlingError):
    """Weights could not be published, read, or proven equal to what was published."""
