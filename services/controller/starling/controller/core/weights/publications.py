"""Stops 9 and 10: publications of versions, who has one on offer, who pulls it from whom, and who has proven it.

A policy offers a version; each rollout gets a plan and pulls for itself; only a replica whose attested root equals that
of an offer counts as holding the version. A rollout that holds a version can put it on offer to others, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starling.common.errors import WeightsError
from starling.controller.core.replicas.membership import Member
from starling.weightsync.plan.layout import Layout, encode
from starling.weightsync.plan.offer import decode_offer
from starling.weightsync.plan.planner import PlanCache

RETRY_S = 1.0
"""A failed adoption, or one without a source, is tried again after so long."""
KEPT_VERSIONS = 1000
"""A rollout that adopts a version older than this many publications is not believed."""


@dataclass(frozen=True)
class PublishedOffer:
    """What one replica has on offer."""

    holder: str
    host: str
    is_policy: bool
    version: int
    offer: bytes


@dataclass
class Publications:
    """The newest publication, who offers what, and the plans by which replicas pull it."""

    version: int = -1
    """The newest version that was ever on offer."""
    asked: int = -1
    """The newest version that a policy was told to publish."""
    roots: dict[int, set[str]] = field(default_factory=dict)
    """The root digests under which each version that may still be adopted was on offer. Holders that cut the boxes
    otherwise have another one, and so may have a policy that made the version again."""
    not_before: dict[str, float] = field(default_factory=dict)
    offers: dict[str, PublishedOffer] = field(default_factory=dict)
    """By holder."""
    _places: dict[int, dict[str, dict[str, PublishedOffer]]] = field(default_factory=dict)
    """The same by version, host and holder: to find the nearest must not take longer the more there are."""
    _of_policies: dict[str, PublishedOffer] = field(default_factory=dict)
    _plans: PlanCache = field(default_factory=PlanCache)
    _encoded: dict[int, dict[int, tuple[Layout, Layout, bytes]]] = field(default_factory=dict)
    """By the identities of the destination's layout and of the source's, which the entry keeps alive."""

    def publish(self, member: Member, version: int, offer: bytes) -> tuple[str, bool]:
        """Note what a replica has on offer; a new version begins a round. Returns its root, and whether that is new.

        Raises:
            WeightsError: `offer` is none, or one of another version.
        """
        offered = decode_offer(offer)
        if offered.version != version:
            raise WeightsError(f"An offer of version {offered.version} came in the publication of version {version}.")
        self._withdraw(member.name)
        found = PublishedOffer(member.name, member.host, member.role == "policy", version, offer)
        self.offers[member.name] = found
        self._places.setdefault(version, {}).setdefault(member.host, {})[member.name] = found
        if found.is_policy:
            self._of_policies[member.name] = found
        is_new = not self.proves(version, offered.root)
        self.note(version, offered.root)
        return offered.root, is_new

    def note(self, version: int, root: str) -> None:
        """Note that a version was on offer."""
        self.roots.setdefault(version, set()).add(root)
        if version > self.version:
            self.version, self.asked = version, max(self.asked, version)
            while (oldest := next(iter(self.roots))) <= version - KEPT_VERSIONS:
                del self.roots[oldest]
            self.not_before.clear()

    def forget(self, name: str, layout: Layout | None) -> None:
        """A replica is gone, and with it what it had on offer, and the plans from and to its layout."""
        offered = self._withdraw(name)
        self.not_before.pop(name, None)
        self._encoded.pop(id(layout), None)
        if offered is not None:
            for plans in self._encoded.values():
                plans.pop(id(layout), None)

    def _withdraw(self, name: str) -> PublishedOffer | None:
        offered = self.offers.pop(name, None)
        if offered is not None:
            self._of_policies.pop(name, None)
            hosts = self._places[offered.version]
            del hosts[offered.host][name]
            if not hosts[offered.host]:
                del hosts[offered.host]
            if not hosts:
                del self._places[offered.version]
        return offered

    def is_offered(self, version: int) -> bool:
        """Say whether anybody has `version` on offer."""
        return version in self._places

    def source(self, destination: Member, version: int, *, with_state: bool = False) -> PublishedOffer | None:
        """Return the offer of `version` that is nearest to `destination`: of its host, else a policy's, else any.

        `with_state`: of policies alone; a rollout has no state of an optimizer to give.
        """
        hosts = self._places.get(version, {})
        of_policies = [offered for offered in self._of_policies.values() if offered.version == version]
        near = hosts.get(destination.host, {}).values()
        for among in (near, of_policies):
            fit = [one for one in among if one.holder != destination.name and (one.is_policy or not with_state)]
            if fit:
                return min(fit, key=lambda one: (not one.is_policy, one.holder))
        if with_state:
            return None
        others = (one for at_host in hosts.values() for one in at_host.values())
        return next((one for one in others if one.holder != destination.name), None)

    def plan(self, source: Layout, destination: Layout) -> bytes:
        """Return the encoded plan between two replicas; while neither changes, it is made once.

        Raises:
            WeightsError: as `make_plan`.
        """
        plans = self._encoded.setdefault(id(destination), {})
        found = plans.get(id(source))
        if found is None or found[0] is not source or found[1] is not destination:
            found = plans[id(source)] = (source, destination, encode(self._plans.plan(source, destination)))
        return found[2]

    def failed(self, peer: str, now: float) -> None:
        """Let a while pass before `peer` tries again."""
        self.not_before[peer] = now + RETRY_S

    def may_try(self, peer: str, now: float) -> bool:
        """Say whether `peer` need not wait after a failure."""
        return now >= self.not_before.get(peer, 0.0)

    def proves(self, version: int, root: str) -> bool:
        """Say whether `root` is that of an offer of `version`."""
        return root in self.roots.get(version, ())
