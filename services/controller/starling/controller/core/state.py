"""State of the controller: the numbers of the run, the clock, the outbox, and one attribute per topic."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from starling.common.ids import Role, whole_number
from starling.common.wire.messages import Down, Prompt
from starling.controller.core.allowance import Allowances
from starling.controller.core.dirty import Dirty
from starling.controller.core.evaluation.evaluation import Evaluations
from starling.controller.core.events import Buffers, Command, Note, Prompts, Send, Write
from starling.controller.core.groups.group import Group, Groups
from starling.controller.core.groups.validation.limits import MAX_TIED, GroupLimits
from starling.controller.core.lifecycle.profiles import Profiles
from starling.controller.core.lifecycle.stages import Lifecycle
from starling.controller.core.plan import RunPlan
from starling.controller.core.records import Record
from starling.controller.core.replicas.replicas import Replicas
from starling.controller.core.replicas.routing.slots import SLOT_KINDS
from starling.controller.core.training.metrics import MetricNames
from starling.controller.core.training.reward_hacking import EvaluatedSteps
from starling.controller.core.training.step import Training
from starling.controller.core.weights.plans import LayoutPlans
from starling.controller.core.weights.publications import Publications

MAX_TEXT_CHARACTERS: Final = 8192
"""Characters of one text in metrics.jsonl and in the log. Peers may send texts of the size of a message."""
NOTE_BURST_BYTES: Final = 16 << 20
"""Bytes of notes about one replica, in metrics.jsonl and in the log, at once, and below on average. A replica that
adopts ten versions a second is below that."""
NOTE_BYTES_PER_S: Final = 8192.0
NOTE_BYTES: Final = 50
"""Bytes of a line besides the fields of its note: its time and its kind."""
_encoder: Final = msgspec.json.Encoder()


class Outbox:
    """The commands that one event leads to: records for the journal first, then all others, each in order."""

    __slots__ = ("_allowances", "_commands", "_now", "_writes")

    def __init__(self) -> None:
        self._writes: list[Write] = []
        self._commands: list[Command] = []
        self._allowances = Allowances(NOTE_BURST_BYTES, NOTE_BYTES_PER_S)
        self._now = 0.0

    def clear(self, now: float = 0.0) -> None:
        """Begin with the next event, which happens at `now`."""
        self._writes, self._commands, self._now = [], [], now

    def commands(self) -> list[Command]:
        """Return all commands, in the order in which the shell carries them out."""
        return [*self._writes, *self._commands] if self._writes else self._commands

    def write(self, record: Record, payload: Buffers = ()) -> None:
        """Write a record to the journal, before any other command of this event is carried out."""
        self._writes.append(Write(record, payload))

    def add(self, command: Command) -> None:
        """Add a command that is not a record."""
        self._commands.append(command)

    def send(self, peer: str, message: Down, buffers: Buffers = ()) -> None:
        """Send a message that needs no answer."""
        self._commands.append(Send(peer, message, buffers))

    def note(self, kind: str, **fields: Any) -> None:
        """Note something in metrics.jsonl and in the log, with texts of bounded length.

        `because_of`, which is no field of the note: the replica whose message led to it, by default the field
        `replica`. Beyond its allowance nothing is noted: one that joins or fails again and again would fill the disk.
        """
        name = fields.pop("because_of", "") or fields.get("replica", "")
        size_bytes = _size_bytes(fields)
        if size_bytes > MAX_TEXT_CHARACTERS:  # else each of its texts is short
            fields = _bounded(fields)
            size_bytes = _size_bytes(fields)
        if not name or self._allowances.take(name, NOTE_BYTES + size_bytes, self._now):
            self._commands.append(Note(kind, fields))


def _size_bytes(fields: dict[str, Any]) -> int:
    """Return the size of a note as JSON.

    To encode a note takes a fraction of the time of a look at each of its fields.
    """
    try:
        return len(_encoder.encode(fields))
    except UnicodeEncodeError:  # the name of a file that is not UTF-8
        return len(json.dumps(fields))


def _bounded(value: Any) -> Any:
    """Return `value` with only the beginning of each long text in it."""
    match value:
        case str():
            return value[:MAX_TEXT_CHARACTERS]
        case list():
            return [_bounded(item) for item in value]
        case tuple():
            return tuple(_bounded(item) for item in value)
        case dict():
            return {_bounded(name): _bounded(item) for name, item in value.items()}
        case _:
            return value


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """The data of a run."""

    prompts: Prompts
    """For reinforcement learning, or to be answered."""
    examples: Prompts
    """For the steps of examples."""
    held_out: Sequence[Prompt]
    """For evaluations."""


class ControllerState:
    """One attribute per topic, independent of each other, and the numbers that they share."""

    def __init__(self, plan: RunPlan, data: RunPrompts, incarnation: int = 1) -> None:
        """`incarnation`: how often a controller of this run has started, from 1."""
        initial_version = -1 if plan.kind.trains or plan.fans_out else 0
        self.plan, self.data, self.incarnation = plan, data, incarnation
        self.now = 0.0
        self.version = plan.begin_version
        """The newest version: how many steps were made, or files written in a run without a policy."""
        self.outbox = Outbox()
        self.dirty: int = Dirty.ALL
        self.buffer = plan.new_buffer()
        self.replicas = Replicas(plan, initial_version)
        self.weights = Publications(
            version=initial_version,
            plans=LayoutPlans(plan.relay_from_bytes),
            is_reading_checkpoint=plan.reads_checkpoint,
        )
        labels = [*(scorer.label for scorer in plan.scorers), *plan.evaluation_scorers]
        evaluated = EvaluatedSteps(plan.evaluation_scorers, plan.alarm_steps)
        self.training = Training(plan.begin_version, plan.sampling, MetricNames(plan.num_scorers, labels), evaluated)
        self.evaluations = Evaluations()
        self.lifecycle = Lifecycle(plan.drain_s, plan.stop_s)
        self.profiles = Profiles()

    @property
    def weights_version(self) -> int:
        """The newest version of the weights. Without training it is 0, while `version` counts files."""
        return self.version if self.plan.kind.trains else 0

    @property
    def has_begun(self) -> bool:
        """Whether any step was dispatched: from then on one policy is enough."""
        return self.version > self.plan.begin_version or self.training.step is not None or self.buffer.has_frozen

    @property
    def group_limits(self) -> GroupLimits:
        """Limits on the size of a group: those of the plan, or the number of completions that an operator requested."""
        limits, evaluation = self.plan.group_limits, self.evaluations.current
        if evaluation is None or evaluation.num_completions <= limits.num_completions:
            return limits
        return replace(limits, num_completions=evaluation.num_completions)

    def message_bytes(self) -> dict[Role, int]:
        """Return how many bytes a message with a group may have now, by the role that sends it."""
        num_kept = 0
        if self.plan.sampling.logprobs == "truncated":
            changes = self.training.changes.in_order()
            changed = [value for key, value, _ in changes if key == "sampling.top_k"]
            num_kept = 2 * int(max([self.plan.sampling.top_k, *changed])) + MAX_TIED
        is_routed = self.plan.sampling.routing == "replayed"
        return self.group_limits.message_bytes(self.training.limits, num_kept, is_routed=is_routed)

    def find_group(self, key: str) -> tuple[Groups, Group] | None:
        """Return the live group of this key, and the groups that it belongs to."""
        groups: Groups | None = self.buffer if key[:1] == "t" else self.evaluations.current
        if groups is None:
            return None
        group = groups.get(whole_number(key[1:]))
        return None if group is None else (groups, group)

    def group_of_lease(self, lease: str) -> tuple[Groups, Group] | None:
        """Return the live group of a lease to generate or score it, and the groups that it belongs to."""
        kind, _, rest = lease.partition(":")
        return self.find_group(rest.partition(":")[0]) if kind in SLOT_KINDS else None
