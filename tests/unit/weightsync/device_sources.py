"""Sources whose snapshots stay in memory of a device, which is that of a CPU."""

from __future__ import annotations

from transport_peers import ServedSource, piece

from starling.weightsync.memory.protected_pages import SharedPages
from starling.weightsync.offers.offer import RankOffer, Transport

SIZE = 8 << 20
PIECES = (piece("w", "uint8", (0, SIZE)), piece("x", "uint8", (0, 300), (0, 64)))
EXTENT = SIZE + 300 * 64


class DeviceSource(ServedSource):
    """A source whose snapshots are on a device, too, with other bits: what is sent from there shows."""

    def __init__(self, transport: Transport) -> None:
        self.memory = SharedPages(EXTENT)
        with self.memory.opened() as flat:
            flat[:] = 2
        super().__init__(transport, PIECES)
        self.source.device_memory = lambda _: self.memory

    def publish(self) -> RankOffer:
        slot = self.arena.claim(0.0)
        self.arena.slots[slot][:EXTENT] = 1
        snapshot, secret = self.arena.commit(slot, self.memory.handle)
        return self.serving.offer(rank=0, snapshot=snapshot, secret=secret, holds="", root="")

    def close(self) -> None:
        super().close()
        self.memory.free()
