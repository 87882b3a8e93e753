"""Guarantees of a run under any faults, checked against its journal, the record of its decisions.

- Every position of the data was opened exactly once, in order.
- No prompt was trained twice, none was both trained and dropped, and none is missing when the run is complete.
- No finished group was generated again: completions are stored twice only if the first were dropped.
- Steps were frozen before they were committed, and committed once each, in order.
- Every evaluation that was opened was closed.
- The metrics agree with the journal.
- The policy trained the tokens, rewards and advantages of the groups that the journal says: digests of both are equal.
"""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starling.controller.core import records as rec
from starling.controller.core.records import JournalEntry


@dataclass
class JournalHistory:
    """Decisions of a run, in the order of its journal."""

    opened: list[int] = field(default_factory=list)
    frozen: list[rec.StepFrozen] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    regenerated: list[str] = field(default_factory=list)
    frozen_unscored: list[str] = field(default_factory=list)
    committed_unfrozen: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    evaluations_opened: list[int] = field(default_factory=list)
    evaluations_closed: list[int] = field(default_factory=list)
    ended: list[rec.RunEnded] = field(default_factory=list)
    num_compactions: int = 0

    @property
    def trained(self) -> list[int]:
        """Ordinals of the groups of committed steps, in order."""
        committed = set(self.committed)
        return [ordinal for step in self.frozen if step.step in committed for ordinal in step.ordinals]

    @property
    def dropped(self) -> list[int]:
        """Ordinals of the training groups that were discarded."""
        return [int(key[1:]) for key in self.discarded if key.startswith("t")]

    @property
    def lost(self) -> list[int]:
        """Positions that were opened and neither trained nor dropped."""
        return sorted(set(self.opened) - set(self.trained) - set(self.dropped))

    @property
    def trained_twice(self) -> list[int]:
        """Ordinals that more than one committed step trained."""
        return _repeated(self.trained)


def read_history(records: Iterable[rec.Record], num_supervised_steps: int) -> JournalHistory:
    """Read a journal; supervised steps, the first `num_supervised_steps`, have no groups to freeze."""
    history, has, scored, frozen = JournalHistory(), set[str](), set[str](), set[int]()
    for record in records:
        match record:
            case rec.ControllerStarted(incarnation=incarnation):
                history.incarnations.append(incarnation)
            case rec.GroupsOpened(first=first, num=num):
                history.opened += range(first, first + num)
            case rec.CompletionsStored(key=key):
                if key in has:
                    history.regenerated.append(key)
                has.add(key)
                scored.discard(key)
            case rec.RewardsStored(key=key):
                scored.add(key)
            case rec.GroupRequeued(key=key):
                has.discard(key)
                scored.discard(key)
            case rec.GroupDiscarded(key=key):
                history.discarded.append(key)
            case rec.StepFrozen(ordinals=ordinals):
                history.frozen.append(record)
                frozen.add(record.step)
                history.frozen_unscored += [f"t{ordinal}" for ordinal in ordinals if f"t{ordinal}" not in scored]
            case rec.StepReopened(step=step):
                history.frozen = [one for one in history.frozen if one.step != step]
                frozen.discard(step)
            case rec.StepCommitted(step=step):
                history.committed.append(step)
                if step > num_supervised_steps and step not in frozen:
                    history.committed_unfrozen.append(step)
            case rec.EvaluationOpened(number=number):
                history.evaluations_opened.append(number)
            case rec.EvaluationClosed(number=number):
                history.evaluations_closed.append(number)
            case rec.RunEnded():
                history.ended.append(record)
            case rec.StateCompacted():
                history.num_compactions += 1
    return history


def violations(history: JournalHistory, *, complete: bool, num_slots: int = 0) -> list[str]:
    """Return one sentence for each guarantee that is violated.

    `complete`: the run reached its last step. A run stopped before leaves at most its `num_slots` newest positions
    open: groups are trained in the order in which they were opened, and a slot is free when its group is trained.
    """
    found = [*_violations_always(history), *(_violations_at_the_end(history) if complete else ())]
    if not complete and (lost := [p for p in history.lost if p < len(history.opened) - num_slots]):
        found.append(f"positions {lost} were passed over")
    return found


def _violations_always(history: JournalHistory) -> Iterator[str]:
    if history.opened != list(range(len(history.opened))):
        yield f"positions were not opened once each and in order: {_repeated(history.opened) or history.opened}"
    frozen = [ordinal for step in history.frozen for ordinal in step.ordinals]
    if again := _repeated(frozen):
        yield f"groups {again} are in two steps"
    if again := _repeated(prompt for step in history.frozen for prompt in step.prompts):
        yield f"prompts {again} are in two steps"
    if again := _repeated(step.step for step in history.frozen):
        yield f"steps {again} were frozen twice"
    if unknown := sorted(set(frozen) - set(history.opened)):
        yield f"groups {unknown} were frozen and never opened"
    if both := sorted(set(frozen) & set(history.dropped)):
        yield f"groups {both} were both frozen and dropped"
    if again := _repeated(history.discarded):
        yield f"groups {again} were dropped twice"
    if history.regenerated:
        yield f"groups {history.regenerated} were generated again although their completions were there"
    if history.frozen_unscored:
        yield f"groups {history.frozen_unscored} were frozen without rewards"
    if history.committed_unfrozen:
        yield f"steps {history.committed_unfrozen} were committed and not frozen before"
    if history.committed != list(range(1, len(history.committed) + 1)):
        yield f"steps were not committed once each and in order: {history.committed}"
    if history.incarnations != list(range(1, len(history.incarnations) + 1)):
        yield f"incarnations of the controller were not counted one by one: {history.incarnations}"
    if again := _repeated(history.evaluations_opened) + _repeated(history.evaluations_closed):
        yield f"evaluations {again} were opened or finished twice"


def _violations_at_the_end(history: JournalHistory) -> Iterator[str]:
    if history.lost:
        yield f"positions {history.lost} were neither trained nor dropped"
    if left := sorted({step.step for step in history.frozen} - set(history.committed)):
        yield f"steps {left} were frozen and never committed"
    if left := sorted(set(history.evaluations_opened) - set(history.evaluations_closed)):
        yield f"evaluations {left} were opened and never closed"
    if not history.ended or not history.ended[-1].ok:
        yield f"the end of the run is not in the journal: {history.ended}"


def contradictions(history: JournalHistory, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each contradiction between metrics.jsonl and the journal.

    A controller killed between writing the journal and the metrics may omit a line, never write one too many.
    """
    found = []
    prompts = {step.step: step.prompts for step in history.frozen}
    for kind in ("step", "trained"):
        of_kind = [line for line in lines if line["kind"] == kind]
        steps = [line["step"] for line in of_kind]
        if again := _repeated(steps):
            found.append(f"{kind}: the metrics tell of steps {again} twice")
        if unknown := sorted(set(steps) - set(history.committed)):
            found.append(f"{kind}: the metrics tell of steps {unknown}, which were never committed")
        expected = set(history.committed) if kind == "step" else {s for s in history.committed if prompts.get(s)}
        if len(missing := sorted(expected - set(steps))) > max(0, len(history.incarnations) - 1):
            found.append(f"{kind}: steps {missing} are not in the metrics")
    for line in lines:
        if line["kind"] == "trained" and tuple(line["prompts"]) != tuple(prompts.get(line["step"], ())):
            found.append(f"step {line['step']} trained {line['prompts']}, says the metrics; not so the journal")
    return found


def expected_digests(entries: Iterable[JournalEntry]) -> dict[int, str]:
    """Return the digest of each frozen step, computed from its groups in the journal, with the advantages of GRPO.

    `docs/reference/metrics.md` defines it; this shares no code with the policy.
    """
    completions, rewards, found = dict[str, JournalEntry](), dict[str, tuple[float, ...]](), dict[int, str]()
    for entry in entries:
        match entry.record:
            case rec.CompletionsStored(key=key):
                completions[key] = entry
            case rec.RewardsStored(key=key, rewards=values):
                rewards[key] = tuple(value for value in values if value is not None)
            case rec.StepFrozen(step=step, ordinals=ordinals, prompts=prompts):
                digests = (
                    _digest(prompt, completions[f"t{ordinal}"], rewards[f"t{ordinal}"])
                    for ordinal, prompt in zip(ordinals, prompts, strict=True)
                )
                found[step] = f"{sum(digests) % 2**64:016x}"
    return found


def _digest(prompt: str, entry: JournalEntry, rewards: Sequence[float]) -> int:
    assert isinstance(entry.record, rec.CompletionsStored)
    lengths = [trajectory.num_tokens for trajectory in entry.record.trajectories]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    advantages = [(reward - mean) / (std + 1e-4) for reward in rewards]
    form = len(rewards)
    content = prompt.encode() + b"\0" + b"".join(entry.payload[:4]) + struct.pack(f"<{len(lengths)}i", *lengths)
    content += struct.pack(f"<{form}d", *rewards) + struct.pack(f"<{form}f", *advantages)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def other_batches(expected: Mapping[int, str], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return one sentence for each step that was trained, or trained again, on other data than the journal says.

    A policy that was lost, or a controller that was killed, may leave steps whose digest was not reported.
    """
    found, reported = [], set[int]()
    for line in lines:
        step = line.get("step", 0)
        if line["kind"] not in ("step", "step_repeated") or "batch_digest" not in line:
            continue
        reported.add(step)
        if line["batch_digest"] != expected.get(step):
            found.append(f"{line['kind']}: step {step} has the digest {line['batch_digest']}, not {expected.get(step)}")
    trained = {line["step"] for line in lines if line["kind"] == "step" and line.get("phase") == "rl"}
    joined = [line["replica"] for line in lines if line["kind"] == "joined"]
    num_losses = sum(line["kind"] == "left" for line in lines) + len(joined) - len(set(joined))
    if len(missing := sorted(trained - reported)) > num_losses:
        found.append(f"the policy has not reported the digests of steps {missing}")
    return found


def _repeated(items: Iterable[Any]) -> list[Any]:
    return [item for item, times in Counter(items).items() if times > 1]
