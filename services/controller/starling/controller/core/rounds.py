"""Stops 9 and 10: one publication of one version, and who has it.

The policy offers a version; each rollout gets a plan and pulls for itself; only a rollout whose attested root equals
the offer's counts as holding the version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starling.common.errors import WeightsError
from starling.weightsync.layout import Layout, encode
from starling.weightsync.offer import decode_offer
from starling.weightsync.replan import Plans

RETRY_S = 1.0
"""A failed adoption is tried again after so long."""
KEPT_ROOTS = 1000
"""A rollout that adopts a version older than this many publications is not believed."""


@dataclass
class Rounds:
    """The newest publication, and the plans by which replicas pull it."""

    version: int = -1
    asked: int = -1
    """The newest version that the policy was told to publish."""
    offer: bytes = b""
    roots: dict[int, str] = field(default_factory=dict)
    """The root digest of each version that may still be adopted."""
    not_before: dict[str, float] = field(default_factory=dict)
    _plans: Plans = field(default_factory=Plans)

    def publish(self, version: int, offer: bytes) -> None:
        """Begin a round. Versions only grow: a repetition of an older one changes nothing.

        Raises:
            WeightsError: `offer` is none, or one of another version.
        """
        if version <= self.version:
            return
        offered = decode_offer(offer)
        if offered.version != version:
            raise WeightsError(f"An offer of version {offered.version} came in the publication of version {version}.")
        self.version, self.offer = version, offer
        self.roots[version] = offered.root
        self.roots.pop(version - KEPT_ROOTS, None)
        self.not_before.clear()

    def plan(self, source: Layout, destination: Layout) -> bytes:
        """Return the encoded plan between two replicas; while neither changes, it is made once.

        Raises:
            WeightsError: as `make_plan`.
        """
        return encode(self._plans.plan(source, destination))

    def failed(self, peer: str, now: float) -> None:
        """Let a while pass before `peer` tries again."""
        self.not_before[peer] = now + RETRY_S

    def may_adopt(self, peer: str, version: int, now: float) -> bool:
        """Say whether `peer`, which holds `version`, should pull the newest version now."""
        return self.version > version and now >= self.not_before.get(peer, 0.0)
