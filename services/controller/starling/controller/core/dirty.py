"""What an event makes the controller look at again."""

from __future__ import annotations

from typing import Final


class Dirty:
    """What may follow from an event, as bits. To derive one in vain costs time only; every tick derives them all.

    Plain numbers: an operation on members of an enumeration takes longer than most of what they decide about.
    """

    NOTHING: Final = 0
    EVALUATE: Final = 1
    PUBLISH: Final = 2
    CATCH_UP: Final = 4
    ADOPT: Final = 8
    ADMIT: Final = 16
    DISPATCH: Final = 32
    SCORE: Final = 64
    TRAIN: Final = 128
    END: Final = 256
    BIND: Final = 512
    ALL: Final = 1023
