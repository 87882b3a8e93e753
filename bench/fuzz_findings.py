"""What a fuzzed controller does wrong, read from its commands and its state."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
from figure import progress
from fuzz_answers import is_recorded
from fuzz_variants import TEMPERATURES

from starling.common.errors import StarlingError
from starling.common.ids import lease_subject
from starling.common.wire import messages as wire
from starling.common.wire.tensors import KEPT_COUNTS
from starling.controller.core.events import Command, FinishRun, Note, Send
from starling.controller.core.events import Write as WriteRecord
from starling.controller.core.groups.group import GroupState
from starling.controller.core.machine import Controller
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import (
    GroupDiscarded,
    StepCommitted,
    StepFrozen,
    StepReopened,
    VersionPublished,
)
from starling.policy.train.data.groups import ScoredGroup, groups_from_wire
from starling.sim.replicas.weights import offer_of

LIMITS = wire.ModelLimits(vocabulary_size=1000, longest=64)
MAX_STALL_S = 600.0
"""Longest simulated time without a step: many times that of all deadlines together."""


class Findings:
    """What went wrong, and what the run has done."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self.counts: Counter[str] = Counter()
        self.frozen: dict[int, tuple[int, ...]] = {}
        self.trained: list[int] = []
        self.discarded: set[int] = set()
        self.num_filtered = self.num_resumed = self.num_evaluations = 0
        self.committed = 0
        self.slowest_s = 0.0
        """Longest time between two steps."""
        self._committed_at = 0.0

    def note(self, kind: str, what: str) -> None:
        """Count a finding, and show the first ones."""
        self.counts[kind] += 1
        if self.counts[kind] <= 5:
            progress(f"{kind}: {what}")

    def check_progress(self, now: float) -> None:
        """Check that the run has made a step not long ago."""
        waited_s = now - self._committed_at
        self.slowest_s = max(self.slowest_s, waited_s)
        if waited_s > MAX_STALL_S:
            self.note("stalls", f"no step was made for {waited_s:.0f} s after step {self.committed}")
            self._committed_at = now

    def check(self, command: Command, now: float) -> None:
        """Check one command."""
        match command:
            case WriteRecord(record=VersionPublished(version=version, root=root)):
                if version > self.committed or root != offer_of(version).root:
                    self.note("unproven_versions", f"version {version} of root {root} was journaled")
            case WriteRecord(record=StepFrozen(step=step, ordinals=ordinals)):
                self.frozen[step] = ordinals
            case WriteRecord(record=StepReopened(step=step)):
                del self.frozen[step]
            case WriteRecord(record=StepCommitted(step=step)):
                self.check_progress(now)
                self.committed, self._committed_at = step, now
                self.trained += self.frozen.pop(step)
            case WriteRecord(record=GroupDiscarded(key=key, filtered=filtered)) if key.startswith("t"):
                self.discarded.add(int(key[1:]))
                self.num_filtered += filtered
            case Send(message=wire.AdoptWeights(version=version)) if version > self.committed:
                self.note("unproven_versions", f"version {version} is to be adopted")
            case Send(message=wire.TrainStep() as message, buffers=buffers):
                try:
                    self._check_step(groups_from_wire(message.groups, buffers, LIMITS))
                except StarlingError as error:
                    self.note("poisoned_steps", str(error))
            case Send(message=wire.GenerateGroup() as message, buffers=buffers):
                self.num_evaluations += message.purpose == "evaluate"
                if problem := self._resumption_problem(message, buffers):
                    self.note("poisoned_steps", f"{message.lease}: {problem}")
            case Note(kind=kind, fields=fields):
                try:
                    json.dumps(fields, allow_nan=False)
                except ValueError:
                    self.note("bad_lines", f"{kind}: {fields}")
            case FinishRun(ok=False, reason=reason):
                self.note("crashes", f"the run failed: {reason}")
            case _:
                pass

    def _check_step(self, groups: Sequence[ScoredGroup]) -> None:
        for group in groups:
            teacher = group.teacher
            if teacher is None or teacher.top_ids is None or teacher.top_ids.shape[1] != self._plan.teacher_top_k:
                self.note("poisoned_steps", "teachers sent other numbers of likeliest tokens")
            if group.temperature not in TEMPERATURES:
                self.note("poisoned_steps", f"a group was sampled at temperature {group.temperature}")
            if (group.kept is None) != (self._plan.sampling.logprobs == "full"):
                self.note("poisoned_steps", f"the kept tokens of {group.prompt_id} are {group.kept}")
            if self._plan.dynamic_sampling and len(set(group.rewards)) == 1:
                self.note("poisoned_steps", f"all rewards of {group.prompt_id} are equal")
            if group.versions.max(initial=0) > self.committed:
                self.note("poisoned_steps", f"tokens of version {group.versions.max()} are trained")

    def _resumption_problem(self, message: wire.GenerateGroup, buffers: Sequence[bytes]) -> str:
        """Return why an honest rollout could not resume a group; empty if it can."""
        temperature = message.sampling.temperature
        allowed = TEMPERATURES if message.purpose == "train" else {self._plan.eval_sampling.temperature}
        if temperature not in allowed:
            return f"its temperature is {temperature}"
        if not message.partial:
            return ""
        self.num_resumed += 1
        if any(one.status is not None and not one.num_tokens for one in message.partial):
            return "a completion has ended without a token"
        if is_recorded(message) != any(meta.name == KEPT_COUNTS for meta in message.tensors):
            return "it has other tensors than are recorded"
        kinds = (np.int32, np.float32, np.int32)
        ids, logprobs, versions = (np.frombuffer(one, kind) for one, kind in zip(buffers, kinds, strict=False))
        total = sum(one.num_tokens for one in message.partial)
        if not len(ids) == len(logprobs) == len(versions) == total or len(message.partial) != message.num_completions:
            return "its tensors have other sizes than its completions"
        if ids.min() < 0 or ids.max() >= LIMITS.vocabulary_size or not np.isfinite(logprobs).all():
            return "it has tokens that no engine reads"
        if versions.min() < message.min_version or versions.max() > self.committed:
            return f"it has versions from {versions.min()} to {versions.max()}, and {message.min_version} is the oldest"
        return ""


def orphans(controller: Controller) -> list[str]:
    """Return the groups that are leased to no replica: no result can come, and no deadline ends the wait."""
    state = controller.state
    leased = [group.key for group in state.buffer.within(GroupState.LEASED)]
    held = {
        lease_subject(lease)
        for member in state.replicas.membership.of("rollout")
        for lease in state.replicas.leases.of(member.name, "generate")
    }
    return [key for key in leased if key not in held]


def count_lost(found: Findings, controller: Controller) -> int:
    """Return how many admitted prompts are unaccounted for, or were trained twice or out of order."""
    trained, buffer = found.trained, controller.state.buffer
    accounted = set(trained) | found.discarded | {group.ordinal for group in buffer.live()}
    missing = set(range(buffer.num_admitted)) - accounted
    wrong = len(trained) - len(set(trained)) + (trained != sorted(trained)) + len(set(trained) & found.discarded)
    return len(missing) + wrong + len(orphans(controller))
