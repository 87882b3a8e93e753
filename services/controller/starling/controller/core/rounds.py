"""Stops 9 and 10: one publication of one version, and who has it.

The policy offers a version; each rollout gets a plan and pulls for itself; only a rollout whose attested root equals
the offer's counts as holding the version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starling.common.errors import WeightsError
from starling.weightsync.layout import decode_layout
from starling.weightsync.layout import encode as encode_weights
from starling.weightsync.offer import decode_offer
from starling.weightsync.plan import make_plan

RETRY_S = 1.0
"""A failed adoption is tried again after so long."""
KEPT_ROOTS = 1000
"""A rollout that adopts a version older than this many publications is not believed."""


@dataclass
class Rounds:
    """The newest publication, and the plans by which replicas pull it."""

    version: int = -1
    offer: bytes = b""
    size_bytes: int = 0
    roots: dict[int, str] = field(default_factory=dict)
    """The root digest of each version that may still be adopted."""
    not_before: dict[str, float] = field(default_factory=dict)
    _plans: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)

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

    def plan(self, source: bytes, destination: bytes) -> bytes:
        """Return the plan between two encoded layouts; each pair is planned once.

        Raises:
            WeightsError: as `decode_layout` and `make_plan`.
        """
        key = (source, destination)
        if key not in self._plans:
            plan = make_plan(decode_layout(source), decode_layout(destination))
            self._plans[key] = encode_weights(plan)
            self.size_bytes = plan.total_bytes
        return self._plans[key]

    def failed(self, peer: str, now: float) -> None:
        """Let a while pass before `peer` tries again."""
        self.not_before[peer] = now + RETRY_S

    def may_adopt(self, peer: str, version: int, now: float) -> bool:
        """Say whether `peer`, which holds `version`, should pull the newest version now."""
        return self.version > version and now >= self.not_before.get(peer, 0.0)
