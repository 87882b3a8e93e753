"""State of training: the active step, saved states, alarms, changed settings and metrics.

There is one step at a time. It is dispatched to the policies that are members at its start:

    dispatched -> made -> committed
      ^     |
      +-----+ (a replica died before any policy had made it: dispatched again, with the same groups)

Every policy gets all groups, computes a share of their microbatches, and adds up gradients with the others. A step is
*made* once one policy holds its version: it can only have reached it with the gradients of all others. Policies that do
not hold it are then outdated, and copy their state from one that does.

The controller decides who is out. One that has left, or was lost, is. After one has reported that it cannot make the
step with the others, all of them will, unless they have made it: those that report neither hang.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from starling.common.wire.messages import Alarm, ModelLimits, Sampling
from starling.controller.core.groups.buffer import GroupBuffer
from starling.controller.core.records import JournalEntry, TrainingSummary
from starling.controller.core.training.dynamic_settings import DYNAMIC, SettingChanges
from starling.controller.core.training.metrics import LatestMetrics, MetricNames
from starling.controller.core.training.reward_hacking import EvaluatedSteps


@dataclass
class ActiveStep:
    """The step that is being trained, or the file that is being written."""

    number: int
    is_shared: bool = False
    """It was dispatched to several policies."""
    shares: dict[str, str] = field(default_factory=dict)
    """Lease by policy, of the policies that still work on it."""
    failed_at: float = math.inf
    """When a policy first reported that it cannot make it with the others."""
    failure: str = ""
    """What it reported."""
    made_by: set[str] = field(default_factory=set)
    """Policies that hold its version."""
    broken: bool = False
    """A replica with a share is gone, so the others cannot make the step together."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """By policy."""
    alarms: dict[str, Alarm] = field(default_factory=dict)
    """Alarms that are on, by name, as reported by the policies that made it."""
    digests: dict[str, int] = field(default_factory=dict)
    """Digest of the groups of the step, where a policy has reported one, by policy."""
    leases: set[str] = field(default_factory=set)
    """Those with which it was dispatched."""

    @property
    def is_made(self) -> bool:
        """Whether some policy holds its version, and no other policy can be expected to."""
        return bool(self.made_by) and (self.broken or bool(self.failure) or not self.shares)

    @property
    def has_failed(self) -> bool:
        """Whether no policy can make it as it was dispatched."""
        return not self.made_by and (self.broken or not self.shares)

    @property
    def batch_digest(self) -> str:
        """Digest of its groups, 16 hexadecimal digits; empty when no policy has reported it."""
        return format_digest(next(iter(self.digests.values()))) if self.digests else ""

    @property
    def disagreement(self) -> str:
        """Why its weights are none of this run: the policies trained different groups. Empty when they did not."""
        if len(set(self.digests.values())) < 2:
            return ""
        names = " and ".join(sorted(self.digests))
        return f"{names} trained different groups in step {self.number}: they run different code"

    def note_failure(self, policy: str, reason: str, now: float) -> None:
        """Note that a policy cannot make it with the others, which will notice that, too, unless they hang."""
        self.shares.pop(policy, None)
        if not self.failure:
            self.failed_at, self.failure = now, f"{policy} could not train: {reason}"

    def drop_share(self, policy: str) -> bool:
        """Take the share of a policy that cannot finish it out of the step. Returns False when it had none."""
        if self.shares.pop(policy, None) is None:
            return False
        self.broken = True
        return True


def format_digest(digest: int) -> str:
    """Return the digest of a batch, modulo 2^64, as metrics.jsonl has it."""
    return f"{digest % (1 << 64):016x}"


@dataclass(frozen=True, slots=True)
class PolicyGroup:
    """Policies that have made steps together, and still have the process groups of those."""

    peers: tuple[str, ...]
    name: str
    """That of the lease with which they were told to make the groups."""


@dataclass
class SavedStates:
    """States of the policy that a run can resume from."""

    newest: int
    """The newest version that has a saved state."""
    previous: int
    """The one before. The journal keeps the groups of all later steps, so that a policy that finds the newest state
    damaged can begin from this one."""
    rests_since: float = float("-inf")
    """When this incarnation of the controller saw the last one saved, or before that, when it dispatched a first step.
    """
    not_before: float = 0.0
    """When a failed save may be tried again."""
    asked: int = -1
    """The version of which, or of a newer one, an operator has last asked for a state."""

    def add(self, version: int) -> None:
        """Note that `version` has a saved state."""
        if version > self.newest:
            self.previous, self.newest = self.newest, version


class Training:
    """The active step, and the values that persist from one step to the next."""

    def __init__(
        self, begin_version: int, sampling: Sampling, metric_names: MetricNames, evaluated: EvaluatedSteps
    ) -> None:
        """Begin with the version `begin_version`, which has a saved state.

        Args:
            begin_version: the version.
            sampling: as the recipe says.
            metric_names: none so far.
            evaluated: no steps so far.
        """
        self.step: ActiveStep | None = None
        """The step that makes the next version."""
        self.committed: ActiveStep | None = None
        """The last step that this incarnation of the controller has committed."""
        self.num_failed_together = 0
        """How often policies failed to make a step together since the last one that was made."""
        self.group = PolicyGroup((), "")
        self.fetching = -1
        """The step whose records are being read from the journal; -1 for none."""
        self.fetched: tuple[int, tuple[JournalEntry, ...]] | None = None
        self.saved = SavedStates(begin_version, begin_version)
        self.alarms: dict[str, Alarm] = {}
        """Alarms that are on as of the last step that was made, by name."""
        self.changes = SettingChanges()
        self.sampling = sampling
        """How tokens of training groups are sampled now, with the changes of operators."""
        self.metrics = LatestMetrics()
        self.metric_names, self.evaluated = metric_names, evaluated
        self.limits: ModelLimits | None = None
        """What the model of the policy can read of groups; None until a policy has said it."""

    def change_setting(self, buffer: GroupBuffer, key: str, value: float, step: int, request: str) -> None:
        """Change a setting from `step` on; settings of samples and slots change at once."""
        self.changes.add(key, value, step, request)
        if key == "rl.max_staleness":
            buffer.max_staleness = int(value)
        elif key == "rl.max_tries":
            buffer.max_tries = int(value)
        elif key.startswith("sampling."):
            name = key.removeprefix("sampling.")
            number = int(value) if DYNAMIC[key].is_whole else value
            self.sampling = msgspec.structs.replace(self.sampling, **{name: number})

    def summary(self) -> TrainingSummary:
        """Return what carries over from the steps so far; the active step is dispatched again."""
        of_step, of_evaluation = self.metrics.summary()
        return TrainingSummary(
            saved=self.saved.newest,
            saved_before=self.saved.previous,
            alarms=tuple(self.alarms.values()),
            changes=self.changes.in_order(),
            requests=dict(self.changes.requests),
            step_metrics=of_step,
            evaluation_metrics=of_evaluation,
            limits=self.limits,
            evaluated=self.evaluated.summary(),
            saving_asked=self.saved.asked,
        )

    def restore(self, summary: TrainingSummary, buffer: GroupBuffer) -> None:
        """Bring fresh state to that of `summary`, and `buffer` under the changed settings."""
        self.saved.newest, self.saved.previous = summary.saved, summary.saved_before
        self.saved.asked = summary.saving_asked
        self.alarms = {alarm.name: alarm for alarm in summary.alarms}
        for key, value, step in summary.changes:
            self.change_setting(buffer, key, value, step, "")
        self.changes.requests = dict(summary.requests)
        self.limits = summary.limits
        self.evaluated.restore(summary.evaluated)
        self.metrics.restore(summary.step_metrics, summary.evaluation_metrics)

    def drop_share(self, policy: str) -> None:
        """Take the share of a policy that is gone out of the active step."""
        if self.step is not None:
            self.step.drop_share(policy)
