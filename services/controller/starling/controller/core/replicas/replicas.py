"""State of the replicas: members, their leases and free slots, time sharing, and expected lengths."""

from __future__ import annotations

from starling.controller.core.plan import RunPlan
from starling.controller.core.records import ReplicasSummary
from starling.controller.core.replicas.leases import Leases
from starling.controller.core.replicas.membership import MAX_INVALID, Member, Membership
from starling.controller.core.replicas.routing.estimates import LengthEstimates
from starling.controller.core.replicas.routing.slots import SlotIndex
from starling.controller.core.replicas.scaling.autoscale import AutoscaleWindow
from starling.controller.core.replicas.scaling.desired import DesiredReplicas
from starling.controller.core.replicas.time_sharing import TimeSharing


class Replicas:
    """The replicas of a run and their work."""

    def __init__(self, plan: RunPlan, initial_version: int) -> None:
        """`initial_version`: see `Membership`."""
        self.membership = Membership(plan.lease_s, initial_version)
        self.leases = Leases()
        self.sharing = TimeSharing(plan.colocate, plan.lease_s, plan.num_policies)
        self.desired = DesiredReplicas()
        self.autoscale = AutoscaleWindow(plan.autoscale) if plan.autoscale is not None else None
        self.slots = SlotIndex(self.leases, self.membership, self.sharing, self.desired.draining)
        self.lengths = LengthEstimates()
        self.had_quorum = False
        """All first replicas were members at once: from then on the run needs only one of each role."""

    def current_policies(self, version: int) -> list[Member]:
        """Return the policies that hold `version`, the newest one, and so can make the next step."""
        return [member for member in self._policies() if member.version == version]

    def outdated_policies(self, version: int) -> list[Member]:
        """Return the policies that hold an older version than `version`."""
        return [member for member in self._policies() if member.version < version]

    def _policies(self) -> list[Member]:
        """Return the policies that are not being drained."""
        policies, draining = self.membership.of("policy"), self.desired.draining
        return [member for member in policies if member.name not in draining] if draining else policies

    def policies_have_devices(self) -> bool:
        """Say whether every policy has its devices."""
        return not self.sharing.shared or all(map(self.sharing.has_devices, self.membership.of("policy")))

    def is_policy_publishing(self) -> bool:
        """Say whether a policy is putting a version on offer. Offers of rollouts do not count."""
        return any(self.leases.num(member.name, "publish") for member in self.membership.of("policy"))

    def summary(self) -> ReplicasSummary:
        """Return what a restarted controller has to know of the replicas; they report the rest."""
        membership = self.membership
        means, lengths = self.lengths.summary()
        return ReplicasSummary(
            awaited=tuple(sorted(membership.members.keys() | membership.awaited)),
            incarnations=membership.known_incarnations(),
            proven=dict(membership.proven),
            gone=membership.names_gone(),
            had_quorum=self.had_quorum or "train" in means,  # only a quorum generates groups to train
            mean_lengths=means,
            lengths=lengths,
            # As in the journal, where more change nothing.
            num_invalid={name: min(num, MAX_INVALID) for name, num in membership.num_invalid.items()},
            accused=tuple(membership.accused),
            accusers=tuple(name for name, is_journaled in membership.accusers.items() if is_journaled),
            desired=dict(self.desired.counts),
            chosen=tuple(self.desired.chosen),
            scale_requests=dict(self.desired.requests),
        )

    def restore(self, summary: ReplicasSummary) -> None:
        """Bring the fresh state of the replicas to that of `summary`."""
        self.membership.restore_all(summary.awaited, summary.incarnations, summary.proven, summary.gone)
        self.membership.num_invalid.update(summary.num_invalid)
        self.membership.accused.update(dict.fromkeys(summary.accused))
        self.membership.accusers.update(dict.fromkeys(summary.accusers, True))
        self.desired.counts.update(summary.desired)
        self.desired.chosen.update(dict.fromkeys(summary.chosen))
        self.desired.requests.update(summary.scale_requests)
        self.had_quorum = summary.had_quorum
        self.lengths.restore(summary.mean_lengths, summary.lengths)
