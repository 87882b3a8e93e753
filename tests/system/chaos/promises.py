"""What a run promises, whatever happened to it, checked against its journal: the record of what was really decided.

- Every position of the data was opened exactly once, in order.
- No prompt was trained twice, none was both trained and given up, and none is missing when the run is complete.
- Nothing that was finished was generated again: completions come twice only after the first were thrown away.
- Steps were sealed before they were committed, and committed once each, in order.
- Every evaluation that was begun was finished.
- The metrics tell the same story.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starling.controller.core import records as rec


@dataclass
class Story:
    """What a journal says, in the order in which it says it."""

    opened: list[int] = field(default_factory=list)
    sealed: list[rec.StepFrozen] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    discarded: list[str] = field(default_factory=list)
    generated_again: list[str] = field(default_factory=list)
    sealed_unscored: list[str] = field(default_factory=list)
    committed_unsealed: list[int] = field(default_factory=list)
    incarnations: list[int] = field(default_factory=list)
    evaluations_opened: list[int] = field(default_factory=list)
    evaluations_closed: list[int] = field(default_factory=list)
    ended: list[rec.RunEnded] = field(default_factory=list)

    @property
    def trained(self) -> list[int]:
        """Ordinals of the groups of committed steps, in order."""
        committed = set(self.committed)
        return [ordinal for step in self.sealed if step.step in committed for ordinal in step.ordinals]

    @property
    def given_up(self) -> list[int]:
        """Ordinals of the training groups that were discarded."""
        return [int(key[1:]) for key in self.discarded if key.startswith("t")]

    @property
    def lost(self) -> list[int]:
        """Positions that were opened and neither trained nor given up."""
        return sorted(set(self.opened) - set(self.trained) - set(self.given_up))

    @property
    def twice(self) -> list[int]:
        """Ordinals that more than one committed step trained."""
        return _repeated(self.trained)


def story_of(records: Iterable[rec.Record], num_supervised_steps: int) -> Story:
    """Read a journal; supervised steps, the first `num_supervised_steps`, have no groups to seal."""
    story, has, scored, sealed = Story(), set[str](), set[str](), set[int]()
    for record in records:
        match record:
            case rec.ControllerStarted(incarnation=incarnation):
                story.incarnations.append(incarnation)
            case rec.GroupsOpened(first=first, num=num):
                story.opened += range(first, first + num)
            case rec.CompletionsStored(key=key):
                if key in has:
                    story.generated_again.append(key)
                has.add(key)
                scored.discard(key)
            case rec.RewardsStored(key=key):
                scored.add(key)
            case rec.GroupRequeued(key=key):
                has.discard(key)
                scored.discard(key)
            case rec.GroupDiscarded(key=key):
                story.discarded.append(key)
            case rec.StepFrozen(ordinals=ordinals):
                story.sealed.append(record)
                sealed.add(record.step)
                story.sealed_unscored += [f"t{ordinal}" for ordinal in ordinals if f"t{ordinal}" not in scored]
            case rec.StepCommitted(step=step):
                story.committed.append(step)
                if step > num_supervised_steps and step not in sealed:
                    story.committed_unsealed.append(step)
            case rec.EvaluationOpened(number=number):
                story.evaluations_opened.append(number)
            case rec.EvaluationClosed(number=number):
                story.evaluations_closed.append(number)
            case rec.RunEnded():
                story.ended.append(record)
    return story


def broken(story: Story, *, complete: bool, num_slots: int = 0) -> list[str]:
    """Return one sentence for each promise that does not hold.

    `complete`: the run came to its last step. A run that was stopped before leaves at most its `num_slots` newest
    positions open: groups are trained in the order of their opening, and a slot is free when its group is trained.
    """
    found = [*_broken_always(story), *(_broken_at_the_end(story) if complete else ())]
    if not complete and (lost := [p for p in story.lost if p < len(story.opened) - num_slots]):
        found.append(f"positions {lost} were passed over")
    return found


def _broken_always(story: Story) -> Iterator[str]:
    if story.opened != list(range(len(story.opened))):
        yield f"positions were not opened once each and in order: {_repeated(story.opened) or story.opened}"
    sealed = [ordinal for step in story.sealed for ordinal in step.ordinals]
    if again := _repeated(sealed):
        yield f"groups {again} are in two steps"
    if again := _repeated(prompt for step in story.sealed for prompt in step.prompts):
        yield f"prompts {again} are in two steps"
    if again := _repeated(step.step for step in story.sealed):
        yield f"steps {again} were sealed twice"
    if unknown := sorted(set(sealed) - set(story.opened)):
        yield f"groups {unknown} were sealed and never opened"
    if both := sorted(set(sealed) & set(story.given_up)):
        yield f"groups {both} were both sealed and given up"
    if again := _repeated(story.discarded):
        yield f"groups {again} were given up twice"
    if story.generated_again:
        yield f"groups {story.generated_again} were generated again although their completions were there"
    if story.sealed_unscored:
        yield f"groups {story.sealed_unscored} were sealed without rewards"
    if story.committed_unsealed:
        yield f"steps {story.committed_unsealed} were committed and not sealed before"
    if story.committed != list(range(1, len(story.committed) + 1)):
        yield f"steps were not committed once each and in order: {story.committed}"
    if story.incarnations != list(range(1, len(story.incarnations) + 1)):
        yield f"incarnations of the controller were not counted one by one: {story.incarnations}"
    if again := _repeated(story.evaluations_opened) + _repeated(story.evaluations_closed):
        yield f"evaluations {again} were begun or finished twice"


def _broken_at_the_end(story: Story) -> Iterator[str]:
    if story.lost:
        yield f"positions {story.lost} were neither trained nor given up"
    if left := sorted({step.step for step in story.sealed} - set(story.committed)):
        yield f"steps {left} were sealed and never committed"
    if left := sorted(set(story.evaluations_opened) - set(story.evaluations_closed)):
        yield f"evaluations {left} were begun and never finished"
    if not story.ended or not story.ended[-1].ok:
        yield f"the end of the run is not in the journal: {story.ended}"


def disagreements(story: Story, lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return where metrics.jsonl tells another story than the journal.

    A controller that was killed between the journal and the metrics may have left a line out, never one too many.
    """
    found = []
    prompts = {step.step: step.prompts for step in story.sealed}
    for kind in ("step", "trained"):
        of_kind = [line for line in lines if line["kind"] == kind]
        steps = [line["step"] for line in of_kind]
        if again := _repeated(steps):
            found.append(f"{kind}: the metrics tell of steps {again} twice")
        if unknown := sorted(set(steps) - set(story.committed)):
            found.append(f"{kind}: the metrics tell of steps {unknown}, which were never committed")
        wanted = set(story.committed) if kind == "step" else {s for s in story.committed if prompts.get(s)}
        if len(missing := sorted(wanted - set(steps))) > max(0, len(story.incarnations) - 1):
            found.append(f"{kind}: steps {missing} are not in the metrics")
    for line in lines:
        if line["kind"] == "trained" and tuple(line["prompts"]) != tuple(prompts.get(line["step"], ())):
            found.append(f"step {line['step']} trained {line['prompts']}, says the metrics; not so the journal")
    return found


def _repeated(items: Iterable[Any]) -> list[Any]:
    return [item for item, times in Counter(items).items() if times > 1]
