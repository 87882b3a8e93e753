"""Texts of megabytes at each place of a message where a replica may write one: they are neither stored nor sent on."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pytest
from generated_results import valid
from msgspec import inspect
from transcript import SMALL, Script

from starling.common.ids import Role
from starling.common.wire import messages as wire
from starling.controller.core.events import Note, Send, Write
from starling.controller.core.records import CompletionsStored

Path = tuple[str, ...]
"""Names of fields, ``[]`` for an entry of a sequence, ``{}`` for a value of a dict, and ``{key}`` for its key."""

LONG: Final = 4 << 20
MOST: Final = 1 << 19
"""Bytes of all records, of each message, and of the summary of a run of some steps, with a long text or without."""
LIARS: Final[tuple[Role, ...]] = ("rollout", "reward", "teacher")
"""Roles whose keys must not end the run."""
REPLICAS: Final = ("policy-0", "rollout-0", "rollout-1", "reward-0", "teacher-0")
EXAMPLES: Final[dict[type, object]] = {
    wire.TensorMeta: wire.TensorMeta(dtype="int32", shape=(0,), nbytes=0, name="kept_counts"),
    wire.HeldLease: wire.HeldLease(lease="x", phase="working"),
    wire.Wait: wire.Wait(what="x", on="controller", since_s=0.0, seconds_left=1.0),
    wire.RankRead: wire.RankRead(source="policy-0", source_rank=0, rank=0, transport="tcp", num_bytes=1, seconds=1.0),
    wire.ProfileReport: wire.ProfileReport(profile="x", state="active", text="x"),
    wire.Status: wire.Status.OK,
    str: "x",
    float: 1.0,
    tuple: (),
}
"""A value of each kind that is absent from an honest message, or would be an entry of an empty sequence."""


def paths(kind: inspect.Type) -> Iterator[Path]:
    """Return the places of all texts in a value of `kind`."""
    match kind:
        case inspect.StrType():
            yield ()
        case inspect.Metadata(type=inner):
            yield from paths(inner)
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from ((field.encode_name, *path) for path in paths(field.type))
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            yield from (("[]", *path) for path in paths(item))
        case inspect.DictType(key_type=key, value_type=value):
            yield from (("{key}",) for _ in paths(key))
            yield from (("{}", *path) for path in paths(value))
        case inspect.UnionType(types=types):
            for one in types:
                yield from paths(one)


def lengthen(value: Any, kind: inspect.Type, path: Path) -> Any:
    """Return a value of `kind` whose text at `path` is long."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    if not path:
        return "x" * LONG
    step, rest = path[0], path[1:]
    match kind:
        case inspect.UnionType(types=types):
            [inner] = [one for one in types if not isinstance(one, inspect.NoneType)]
            return lengthen(value, inner, path)
        case inspect.StructType(fields=fields):
            value = EXAMPLES[_class(kind)] if value is None else value
            [field] = [one for one in fields if one.encode_name == step]
            return msgspec.structs.replace(value, **{step: lengthen(getattr(value, step), field.type, rest)})
        case inspect.VarTupleType(item_type=item):
            first, *others = value or (EXAMPLES[_class(item)],)
            return (lengthen(first, item, rest), *others)
        case inspect.DictType(value_type=item) if step == "{key}":
            return {**value, "x" * LONG: EXAMPLES[_class(item)]}
        case inspect.DictType(value_type=item):
            return {**value, "key": lengthen("x", item, rest)}
    raise AssertionError(f"no text at {path} of {kind}")


def _class(kind: inspect.Type) -> type:
    match kind:
        case inspect.StructType(cls=found):
            return found
        case inspect.StrType():
            return str
        case inspect.FloatType():
            return float
        case inspect.VarTupleType():
            return tuple
    raise AssertionError(f"no example of {kind}")


PLACES: Final = [
    (kind, path)
    for kind in sorted(
        frozenset[type].union(*(wire.ALLOWED_MESSAGES[role] for role in LIARS)) - {wire.ReportFault},
        key=lambda one: one.__name__,
    )
    for path in paths(inspect.type_info(kind))
]


class Liar(Script):
    """A run in which rollouts, rewards and teachers write a long text at one place of one kind of message."""

    def __init__(self, kind: type | None = None, path: Path = ()) -> None:
        super().__init__(SMALL, num_teachers=1, max_tries=3, max_staleness=1)
        self._kind, self._path = kind, path
        self.num_lies = 0
        self.largest = dict[str, int]()
        """Bytes of the largest record, message and note."""

    def receive(self, sender: str, message: wire.Up, *buffers: bytes, incarnation: int = 1) -> list[str]:
        if self._kind is type(message) and sender.rpartition("-")[0] in LIARS:
            message = lengthen(message, inspect.type_info(self._kind), self._path)
            self.num_lies += 1
        return super().receive(sender, message, *buffers, incarnation=incarnation)

    def _step(self, event: Any) -> list[str]:
        lines = super()._step(event)
        for command in self.commands:
            match command:
                case Write(record=content) | Send(message=content):
                    size = len(msgspec.msgpack.encode(content))
                case Note(fields=fields):
                    size = len(str(fields))
                case _:
                    continue
            name = type(command).__name__
            self.largest[name] = max(size, self.largest.get(name, 0))
        return lines

    def _unasked(self, lease: str, version: int) -> list[wire.Up]:
        """Return messages that nothing has asked for."""
        found: list[wire.Up] = [
            wire.RelayOffered(lease=lease, version=version, problem="none"),
            wire.WeightsPublished(lease=lease, version=version, publish_s=1.0),
            wire.Slept(lease=lease),
            wire.Woken(lease=lease),
        ]
        return [one for one in found if type(one) is self._kind]

    def answer(self, send: Send) -> None:
        """Answer a command as an honest replica does, except for the text; the first one to a rollout otherwise."""
        lease, peer = self.aliases.short(getattr(send.message, "lease", "")), send.peer
        match send.message:
            case wire.GenerateGroup() if self._kind is wire.GroupInterrupted and not self.num_lies:
                self.interrupts(peer, lease, 2, 1)
            case wire.GenerateGroup() | wire.ScoreGroup() | wire.ScoreTokens() if (
                self._kind is wire.LeaseFailed and not self.num_lies
            ):
                self.fails(peer, lease)
            case wire.GenerateGroup(min_version=version):
                self.generates(peer, lease, version)
            case wire.ScoreGroup():
                self.scores(lease, name=peer)
            case wire.ScoreTokens():
                self.scores_tokens(lease, name=peer)
            case wire.TrainStep(step=step):
                self.receive(peer, wire.StepTrained(lease=send.message.lease, step=step, metrics={}))
            case wire.PublishWeights(version=version):
                self.publishes(version, lease)
            case wire.AdoptWeights(version=version):
                for unasked in self._unasked(send.message.lease, version):
                    self.receive(peer, unasked)
                self.adopts(peer, version, int(lease.rpartition(":")[2]))
            case wire.SaveCheckpoint(step=step):
                self.receive(peer, wire.CheckpointSaved(lease=send.message.lease, step=step, path="/s", state=True))


def play(script: Liar) -> None:
    """Let all replicas join, work for some time, and leave."""
    for name in REPLICAS:
        script.joins(name, slots=4)
    for _ in range(8):
        for name in REPLICAS:
            script.heartbeats(name, version=0 if name == "policy-0" else -1)
        pending = [send for send in script.commands_sent.values() if getattr(send.message, "lease", "")]
        script.commands_sent.clear()
        for send in pending:
            script.answer(send)
        script.advance_time(1.0)
    for name in REPLICAS[1:]:
        script.leaves(name)


def test_run_without_a_long_text_makes_its_steps() -> None:
    script = Liar()
    play(script)
    assert "(trained 2)" in script.log, script.log


def test_problem_of_a_completion_that_has_not_failed_is_not_stored() -> None:
    """Nothing would delete it: not the end of an evaluation, nor that of a step."""
    script = Script(SMALL)
    script.start_run()
    result = valid()
    result.change(0, problem="x" * 60_000)
    result.send(script)
    group = script.state.buffer.get(0)
    assert group is not None
    assert [one.problem for one in group.trajectories] == ["", ""]
    [stored] = [write.record for write in script.journal if isinstance(write.record, CompletionsStored)]
    assert [one.problem for one in stored.trajectories] == ["", ""]


@pytest.mark.parametrize(
    ("kind", "path"), PLACES, ids=lambda one: ".".join(one) if isinstance(one, tuple) else one.__name__
)
def test_long_text_is_neither_stored_nor_sent_on(kind: type, path: Path) -> None:
    script = Liar(kind, path)
    play(script)
    assert script.num_lies
    assert max(script.largest.values()) < MOST, script.largest
    assert len(pickle.dumps(script.state)) < MOST
