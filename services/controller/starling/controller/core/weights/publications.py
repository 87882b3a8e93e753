"""Publications of weight versions: the newest, and the replicas that offer, hold or still need a version.

Stops 9 and 10 of the walk. A policy offers a version, and computes its layout root for each distinct layout of the
rollouts. Each rollout gets a plan and pulls for itself. Only a rollout that attests the layout root of its own layout
counts as holding the version, wherever it pulled from. A rollout that holds a version can offer it to others, too: its
bytes are used, and nothing that it says about them. Where a layout root is not known, the rollout pulls from a policy,
whose own root then counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from starling.common.errors import WeightsError
from starling.controller.core.records import WeightsSummary
from starling.controller.core.replicas.membership import Member
from starling.controller.core.weights.plans import LayoutPlans
from starling.controller.core.weights.relays import Relays
from starling.weightsync.offers.offer import Offer, decode_offer
from starling.weightsync.plan.layout import Layout

RETRY_S = 1.0
"""Seconds after which a failed adoption is retried the first time; each further failure in a row doubles them."""
MAX_RETRY_S = 60.0
"""Most seconds between two tries."""
MAX_FAILED_ADOPTIONS = 8
"""Failed adoptions in a row, over about three minutes, after which a rollout counts as useless if others adopt. After
half as many a new version is no reason to try again at once."""
MAX_VERSIONS = 1000
"""Number of publications whose roots are remembered: the adoption of an older version is not accepted."""
MAX_LAYOUTS = 16
"""Number of distinct layouts of rollouts whose roots a policy computes: those of most rollouts. Each may take a pass
over the weights; rollouts of further layouts pull from policies only."""


@dataclass(frozen=True)
class PublishedOffer:
    """The offer of one replica."""

    holder: str
    host: str
    is_policy: bool
    version: int
    root: str
    offer: Offer
    """With the secrets of its snapshots: a reader gets tickets instead."""
    layout: Layout | None
    """Of the holder."""


@dataclass
class Publications:
    """The newest publication, the offers, and the versions that rollouts hold and need."""

    version: int = -1
    """The newest version that was ever on offer."""
    published_at: float = float("-inf")
    """When this incarnation of the controller saw it on offer."""
    plans: LayoutPlans = field(default_factory=LayoutPlans)
    requested: int = -1
    """The newest version that a policy has the command to publish."""
    roots: dict[int, set[str]] = field(default_factory=dict)
    """The root digests under which policies put each version on offer that may still be adopted. There may be several:
    of policies that split tensors otherwise, and of one that made the version again."""
    layout_roots: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    """By version, and by key of the policy's and the rollout's layout: the layout roots that policies computed."""
    checkpoint: str = ""
    """The digest of the model folder of a run without a policy: as the controller has read it, or the first rollout."""
    is_reading_checkpoint: bool = False
    """The controller is reading that folder."""
    checkpoint_deadline: float = float("inf")
    """When the run fails if it still is; set once all replicas are there."""
    policy_layout: Layout | None = None
    """Layout of the policy that joined or published last; None before any has."""
    offers: dict[str, PublishedOffer] = field(default_factory=dict)
    """By holder."""
    holders: dict[tuple[int, str], dict[str, None]] = field(default_factory=dict)
    """Rollouts by the version that they hold and their host."""
    relays: Relays = field(default_factory=Relays)
    outdated: dict[str, None] = field(default_factory=dict)
    """Rollouts that need another version and do not pull it yet."""
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)
    """By replica: its failures in a row to adopt or to offer weights, and why the last one was."""
    failing_since: dict[str, float] = field(default_factory=dict)
    """Since when a replica has failed repeatedly to adopt or to offer weights."""
    num_bad_pulls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By rollout and reader, and by rollout with an empty reader for all of them: pulls in a row that failed. Of a
    rollout also after it left: it would leave in time, and begin again."""
    suspects: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By rollout: the rollout, and its incarnation, from which it pulled something else than was published."""
    _requested_roots: tuple[int, set[str]] = field(default_factory=lambda: (-1, set()))
    """A version, and the keys of layouts whose roots a policy was asked for since it published it."""
    _retry_at: dict[str, float] = field(default_factory=dict)
    _places: dict[int, dict[str, dict[str, PublishedOffer]]] = field(default_factory=dict)
    """The offers by version, host and holder: the time to find the nearest must not grow with their number."""
    _of_policies: dict[str, PublishedOffer] = field(default_factory=dict)

    @property
    def awaits_checkpoint(self) -> bool:
        """Whether no rollout may get work yet, because the digest of the checkpoint is not known."""
        return self.is_reading_checkpoint and not self.checkpoint

    # --- offers -----------------------------------------------------------------------------------------------------

    def publish(
        self, member: Member, version: int, encoded: bytes, layout_roots: Mapping[str, str]
    ) -> tuple[str, bool]:
        """Add the offer of a replica; one of a policy of a new version is a new publication.

        Returns its root, and whether that, or a layout root, is new.

        Raises:
            WeightsError: the offer cannot be decoded, or is of another version.
        """
        offered = decode_offer(encoded)
        if offered.version != version:
            raise WeightsError(f"An offer of version {offered.version} came in the publication of version {version}.")
        if member.role != "policy" and version not in self.roots:
            raise WeightsError(f"No policy has published version {version}.")
        self.withdraw(member.name)
        is_policy = member.role == "policy"
        published = PublishedOffer(member.name, member.host, is_policy, version, offered.root, offered, member.layout)
        self.offers[member.name] = published
        self._places.setdefault(version, {}).setdefault(member.host, {})[member.name] = published
        if not published.is_policy:
            return offered.root, False
        known = self.layout_roots.get(version, {})
        is_new = not self.is_root(version, offered.root) or any(
            root not in known.get(key, ()) for key, root in layout_roots.items()
        )
        self._of_policies[member.name] = published
        self.policy_layout = member.layout
        self.add_roots(version, offered.root, layout_roots)
        return offered.root, is_new

    def add_roots(self, version: int, root: str, layout_roots: Mapping[str, str]) -> None:
        """Note that a policy put a version on offer under these roots."""
        self.roots.setdefault(version, set()).add(root)
        for key, one in layout_roots.items():
            self.layout_roots.setdefault(version, {}).setdefault(key, set()).add(one)
        if version > self.version:
            self.version, self.requested = version, max(self.requested, version)
            while (oldest := next(iter(self.roots))) <= version - MAX_VERSIONS:
                del self.roots[oldest]
                self.layout_roots.pop(oldest, None)
            for name in list(self._retry_at):
                if self.failures.get(name, (0, ""))[0] < MAX_FAILED_ADOPTIONS // 2:
                    del self._retry_at[name]

    def is_root(self, version: int, root: str) -> bool:
        """Say whether a policy offered `version` under `root`: a replica that pulled it from a policy holds it."""
        return root in self.roots.get(version, ())

    def known_layout_roots(self, version: int, key: str) -> tuple[str, ...]:
        """Return the layout roots that policies computed for this version and key.

        Empty if one of them did not: where arithmetic is not deterministic, a policy that made the version again holds
        other bits than the rollouts that adopted it before.
        """
        by_key = self.layout_roots.get(version)
        roots = by_key.get(key) if by_key is not None else None
        return tuple(sorted(roots)) if roots and len(roots) >= len(self.roots.get(version, ())) else ()

    def request_layout_root(self, version: int, key: str) -> bool:
        """Note that a policy is asked for the layout root of this key. Returns False if one was asked before."""
        if self._requested_roots[0] != version:
            self._requested_roots = version, set()
        keys = self._requested_roots[1]
        if key in keys or len(keys) >= MAX_LAYOUTS:
            return False
        keys.add(key)
        return True

    def can_prove(self, destination: Member, version: int) -> bool:
        """Say whether `destination` can prove `version` without its source: whether it may pull from a rollout."""
        return bool(self.known_layout_roots(version, self.plans.key(self.policy_layout, destination.layout)))

    def is_offered_by_policy(self, version: int) -> bool:
        """Say whether a policy offers `version` now."""
        return any(offer.version == version for offer in self._of_policies.values())

    def summary(self) -> WeightsSummary:
        """Return the newest publication and the known roots, which no replica can report."""
        return WeightsSummary(
            version=self.version,
            roots=tuple((version, tuple(sorted(roots))) for version, roots in self.roots.items()),
            layout_roots=tuple(
                (version, {key: tuple(sorted(roots)) for key, roots in sorted(by_key.items())})
                for version, by_key in self.layout_roots.items()
            ),
            checkpoint=self.checkpoint,
        )

    def restore(self, summary: WeightsSummary) -> None:
        """Take over the publications of `summary`."""
        if summary.roots:
            self.version, self.requested = summary.version, max(self.requested, summary.version)
        self.checkpoint = summary.checkpoint
        self.roots = {version: set(roots) for version, roots in summary.roots}
        self.layout_roots = {
            version: {key: set(roots) for key, roots in by_key.items()} for version, by_key in summary.layout_roots
        }

    def source(self, destination: Member, version: int, *, of_policies_only: bool = False) -> PublishedOffer | None:
        """Return the offer of `version` that is nearest to `destination`: of its host, else of a policy, else any.

        Only of a rollout from which there is a plan. Where there is none from a policy, the destination is at fault.
        """
        hosts = self._places.get(version, {})
        near = hosts.get(destination.host)
        if near is not None and (found := self._preferred(near.values(), destination, of_policies_only)):
            return found
        of_policies = [offer for offer in self._of_policies.values() if offer.version == version]
        if of_policies and (found := self._preferred(of_policies, destination, of_policies_only)):
            return found
        if of_policies_only:
            return None
        everywhere = (offer for at_host in hosts.values() for offer in at_host.values())
        return next((offer for offer in everywhere if self._serves(offer, destination)), None)

    def _preferred(
        self, offers: Iterable[PublishedOffer], destination: Member, of_policies_only: bool
    ) -> PublishedOffer | None:
        """Return the offer that `destination` should pull from: of a policy if there is one; names break ties."""
        fit = [one for one in offers if one.is_policy or not of_policies_only]
        if len(fit) > 1:
            fit.sort(key=lambda offer: (not offer.is_policy, offer.holder))
        return next((one for one in fit if self._serves(one, destination)), None)

    def _serves(self, offer: PublishedOffer, destination: Member) -> bool:
        if offer.holder == destination.name:
            return False
        return offer.is_policy or self.plans.exists(offer.layout, destination.layout)

    def root_plans(self, source: Layout, destinations: Iterable[Layout]) -> dict[str, bytes]:
        """Return the encoded plans from `source` to the most frequent layouts of `destinations`, by key.

        A layout to which there is no plan is left out.
        """
        examples: dict[str, Layout] = {}
        numbers: Counter[str] = Counter()
        for layout in destinations:
            key = self.plans.key(source, layout)
            examples.setdefault(key, layout)
            numbers[key] += 1
        plans: dict[str, bytes] = {}
        for key, _ in numbers.most_common(MAX_LAYOUTS):
            with suppress(WeightsError):
                plans[key] = self.plans.pair(source, examples[key]).plan
        return plans

    # --- holders ----------------------------------------------------------------------------------------------------

    def add_holder(self, member: Member) -> None:
        """Note the version that a rollout holds."""
        if member.version >= 0:
            self.holders.setdefault((member.version, member.host), {})[member.name] = None

    def remove_holder(self, member: Member) -> None:
        """Note that a rollout no longer holds its version."""
        held = self.holders.get((member.version, member.host))
        if held is not None:
            held.pop(member.name, None)
            if not held:
                del self.holders[member.version, member.host]

    def wait(self, peer: str, now: float) -> None:
        """Let `peer` wait for a moment before it tries again, after a failure that may be that of another replica."""
        self._retry_at[peer] = now + RETRY_S

    def back_off(self, peer: str, now: float, reason: str) -> int:
        """Let `peer` wait ever longer before it tries again, after a failure. Returns its failures in a row."""
        num = self.failures.get(peer, (0, ""))[0] + 1
        self.failures[peer] = num, reason
        self._retry_at[peer] = now + min(RETRY_S * 2.0 ** min(num - 1, 16), MAX_RETRY_S)
        return num

    def note_success(self, peer: str) -> None:
        """Note that `peer` has adopted a version, or offers one."""
        self.failures.pop(peer, None)
        self.failing_since.pop(peer, None)
        self._retry_at.pop(peer, None)

    def retry_in_s(self, peer: str, now: float) -> float:
        """Return how long `peer` still waits before it tries again."""
        return max(0.0, self._retry_at.get(peer, 0.0) - now)

    def may_try(self, peer: str, now: float) -> bool:
        """Say whether `peer` has not failed just now."""
        return now >= self._retry_at.get(peer, 0.0)

    def forget(self, name: str, layout: Layout | None) -> None:
        """Remove a replica that left: its offer, and what is known of pulls from and to its layout."""
        self.outdated.pop(name, None)
        self.note_success(name)
        self.suspects.pop(name, None)
        for pair in [pair for pair in self.num_bad_pulls if name == pair[1]]:
            del self.num_bad_pulls[pair]
        self.withdraw(name)
        self.relays.forget(name)
        self.plans.forget(layout, is_in_use=layout is self.policy_layout)

    def withdraw(self, name: str) -> None:
        """Remove the offer of a replica."""
        offered = self.offers.pop(name, None)
        if offered is not None:
            self._of_policies.pop(name, None)
            hosts = self._places[offered.version]
            del hosts[offered.host][name]
            if not hosts[offered.host]:
                del hosts[offered.host]
            if not hosts:
                del self._places[offered.version]
