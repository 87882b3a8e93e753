"""What encoding a piece saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from starling.weightsync.delta.header import Form


@dataclass(frozen=True)
class Metrics:
    """Of one piece."""

    form: Form
    num_elements: int
    item_bytes: int
    num_compared: int
    """Fewer than all where the comparison stopped because too much had changed."""
    num_changed: int
    """Of those compared."""
    encoded_bytes: int

    @property
    def dense_bytes(self) -> int:
        """The bytes of the piece."""
        return self.num_elements * self.item_bytes

    @property
    def saved_bytes(self) -> int:
        """How many fewer bytes travel than the piece has; below 0 by the header where it is dense."""
        return self.dense_bytes - self.encoded_bytes

    @property
    def share_changed(self) -> float:
        """The share of the compared elements that changed."""
        return self.num_changed / self.num_compared if self.num_compared else 0.0


@dataclass(frozen=True)
class Total:
    """Of many pieces: what one publication or one pull saved."""

    num_pieces: dict[Form, int]
    """How many took each form."""
    dense_bytes: int
    encoded_bytes: int
    num_compared: int
    num_changed: int

    @property
    def saved_bytes(self) -> int:
        """How many fewer bytes travel than the pieces have."""
        return self.dense_bytes - self.encoded_bytes

    @property
    def share_changed(self) -> float:
        """The share of the compared elements that changed."""
        return self.num_changed / self.num_compared if self.num_compared else 0.0


def total_of(pieces: Iterable[Metrics]) -> Total:
    """Add up the metrics of pieces."""
    num_pieces: dict[Form, int] = {"same": 0, "delta": 0, "dense": 0}
    dense_bytes = encoded_bytes = num_compared = num_changed = 0
    for piece in pieces:
        num_pieces[piece.form] += 1
        dense_bytes += piece.dense_bytes
        encoded_bytes += piece.encoded_bytes
        num_compared += piece.num_compared
        num_changed += piece.num_changed
    return Total(num_pieces, dense_bytes, encoded_bytes, num_compared, num_changed)
