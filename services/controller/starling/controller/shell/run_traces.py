"""Spans of the controller in the traces of groups: the whole group, its wait in the buffer, and adoptions.

They follow from the messages that the controller sends and receives, so the core knows nothing of traces. A group
begins when it is first sent to a rollout, and ends when the first rollout has adopted a version that trained it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from starling.common.observe.tracing.ids import ROOT, publish_work
from starling.common.observe.tracing.traces import GroupTraces
from starling.common.wire import messages as wire

MAX_GROUPS: Final = 16_384
"""Groups that are followed at a time; the oldest ones are then no longer."""
MAX_STEPS: Final = 64
"""Newest steps whose adoptions are recorded."""


@dataclass(slots=True)
class _TracedGroup:
    """A group on its way; times are wall-clock nanoseconds."""

    prompt: str
    begun_ns: int
    ready_ns: int = 0
    """When it was last generated or scored."""


class RunTraces:
    """Follows the traced groups of a run. All methods belong to the controller's thread."""

    def __init__(self, traces: GroupTraces) -> None:
        self._traces = traces
        self._groups: OrderedDict[int, _TracedGroup] = OrderedDict()
        """By trace, those that no version has adopted yet."""
        self._leases: OrderedDict[str, tuple[str, int]] = OrderedDict()
        """Work on groups: the replica and the trace, by lease."""
        self._adopting: OrderedDict[str, tuple[str, int, int]] = OrderedDict()
        """Adoptions: replica, version and begin, by lease."""
        self._steps: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Traced groups of the newest steps."""
        self._published: dict[int, int] = {}
        """The version that published each of the newest steps."""
        self._held: dict[str, int] = {}
        """The newest version that each rollout has adopted."""

    def sent(self, peer: str, message: wire.Down) -> None:
        """Note a message that leaves."""
        match message:
            case wire.GenerateGroup(purpose="train", lease=lease, prompt=prompt):
                if trace := self._traces.trace(prompt.id):
                    self._follow(trace, prompt.id, time.time_ns())
                    self._leased(lease, peer, trace)
            case wire.ScoreGroup(lease=lease, prompt=prompt):
                self._leased_if_known(lease, peer, prompt.id)
            case wire.ScoreTokens(lease=lease, prompt_id=prompt_id):
                self._leased_if_known(lease, peer, prompt_id)
            case wire.TrainStep(step=step, groups=groups):
                self._train(step, [group.prompt_id for group in groups])
            case wire.AdoptWeights(lease=lease, version=version) if peer.startswith("rollout-"):
                self._adopting[lease] = (peer, version, time.time_ns())
                if len(self._adopting) > MAX_GROUPS:
                    self._adopting.popitem(last=False)

    def received(self, sender: str, message: wire.Up) -> None:
        """Note a message that has arrived; it counts only for work that its sender has."""
        match message:
            case wire.GroupGenerated(lease=lease) | wire.GroupScored(lease=lease) | wire.TokensScored(lease=lease):
                peer, trace = self._leases.get(lease, ("", 0))
                if peer == sender:
                    del self._leases[lease]
                    if trace in self._groups:
                        self._groups[trace].ready_ns = time.time_ns()
            case wire.WeightsPublished(version=version) if sender.startswith("policy-"):
                self._publish(version)
            case wire.WeightsAdopted(lease=lease, version=version):
                peer, expected, begun_ns = self._adopting.get(lease, ("", -1, 0))
                if peer == sender and version == expected:
                    del self._adopting[lease]
                    self._adopted(sender, version, begun_ns)
            case wire.LeaseFailed(lease=lease) if self._adopting.get(lease, ("", 0, 0))[0] == sender:
                del self._adopting[lease]

    def _follow(self, trace: int, prompt: str, begun_ns: int) -> _TracedGroup:
        """Return the group of `trace`; if it is not followed yet, it began at `begun_ns`."""
        group = self._groups.setdefault(trace, _TracedGroup(prompt, begun_ns))
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        return group

    def _leased_if_known(self, lease: str, peer: str, prompt: str) -> None:
        trace = self._traces.trace(prompt)
        if trace in self._groups:
            self._leased(lease, peer, trace)

    def _leased(self, lease: str, peer: str, trace: int) -> None:
        self._leases[lease] = (peer, trace)
        if len(self._leases) > 2 * MAX_GROUPS:
            self._leases.popitem(last=False)

    def _train(self, step: int, prompts: list[str]) -> None:
        """Record the wait of groups until their step; a step may be sent to several policies, or again."""
        if step in self._steps:
            return
        now_ns, traced = time.time_ns(), []
        for prompt in prompts:
            trace = self._traces.trace(prompt)
            if not trace:
                continue
            traced.append(trace)
            # No rollout was sent it by this controller, as after a restart, or in a run that replays trajectories.
            group = self._follow(trace, prompt, now_ns)
            if group.ready_ns:
                self._traces.add(trace, "wait", "wait in the buffer", group.ready_ns, now_ns, version=step)
        self._steps[step] = tuple(traced)
        if len(self._steps) > MAX_STEPS:
            self._steps.popitem(last=False)

    def _publish(self, version: int) -> None:
        for step in self._steps:
            if step <= version:
                self._published.setdefault(step, version)
        self._published = {step: self._published[step] for step in self._steps if step in self._published}

    def _adopted(self, replica: str, version: int, begun_ns: int) -> None:
        """Record an adoption in the groups of all steps that it brings to the rollout, and end those groups."""
        held, now_ns = self._held.get(replica, -1), time.time_ns()
        self._held[replica] = max(held, version)
        for step, published in self._published.items():
            if not held < step <= version:
                continue
            for trace in self._steps.get(step, ()):
                work, above = f"adopt/{version}/{replica}", publish_work(published)
                self._traces.add(trace, work, "adopt", begun_ns, now_ns, parent=above, version=version, replica=replica)
                self._end(trace, now_ns, step)

    def _end(self, trace: int, now_ns: int, step: int = -1) -> None:
        group = self._groups.pop(trace, None)
        if group is not None:
            self._traces.add(trace, ROOT, "group", group.begun_ns, now_ns, prompt=group.prompt, version=step)

    def close(self) -> None:
        """End the groups that are on their way, which the last version may have trained, and export what is there."""
        now_ns = time.time_ns()
        trained = {trace: step for step, traces in self._steps.items() for trace in traces}
        for trace in list(self._groups):
            self._end(trace, now_ns, trained.get(trace, -1))
        self._traces.close()
