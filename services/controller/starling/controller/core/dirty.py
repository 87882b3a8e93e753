"""Dirty flags: which derivations an event makes due."""

from __future__ import annotations

from typing import Final


class Dirty:
    """Derivations as bits. To run one without need costs only time, and every tick runs them all.

    Plain integers: operations on members of an enumeration take longer than most of the decisions.
    """

    NONE: Final = 0
    EVALUATE: Final = 1
    PUBLISH: Final = 2
    CATCH_UP: Final = 4
    ADOPT: Final = 8
    ADMIT: Final = 16
    DISPATCH: Final = 32
    SCORE: Final = 64
    TRAIN: Final = 128
    END: Final = 256
    PIN: Final = 512
    ALL: Final = 1023
