"""Parser and interpreter of the scenario language: blocks of events with the resulting commands; see README.md."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import msgspec
from scenario_harness import Harness, LostCommands, Replica

from starling.common.kinds import KINDS
from starling.common.wire import messages as wire
from starling.controller.core.events import ReplicaDisconnected
from starling.controller.core.plan import LeaseTimeouts
from starling.sim.replicas.weights import adopted, encoded_layout, encoded_offer, encoded_plan, published

SEPARATOR, HIDDEN = "----", "---- not shown"
NOTHING = "(nothing)"
FLIPPED = b"flipped bits here"[:16]
"""Bytes of a tensor that no version has."""


@dataclass
class Block:
    """Events of a scenario and the output lines that they cause."""

    before: list[str] = field(default_factory=list)
    """Comment lines before the events."""
    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    separator: str = SEPARATOR
    """`HIDDEN` for a preamble whose output other scenarios show."""


def parse(text: str) -> list[Block]:
    """Parse a scenario.

    Raises:
        ValueError: a block without its separator.
    """
    blocks = []
    for part in text.strip().split("\n\n"):
        block, lines = Block(), part.strip().split("\n")
        while lines and lines[0].startswith("#"):
            block.before.append(lines.pop(0))
        at = next((index for index, line in enumerate(lines) if line in (SEPARATOR, HIDDEN)), None)
        if lines and at is None:
            raise ValueError(f"the block that begins with {lines[0]!r} has no {SEPARATOR}; put it after the events")
        if at is not None:
            block.events, block.separator, block.lines = lines[:at], lines[at], lines[at + 1 :]
        blocks.append(block)
    return blocks


def format_scenario(blocks: list[Block]) -> str:
    """Return the text of a scenario; the inverse of `parse`."""
    parts = [
        [*block.before, *block.events, *([block.separator, *block.lines] if block.events else [])] for block in blocks
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def play(blocks: list[Block], folder: Path, *, compacts: bool = False) -> list[Block]:
    """Run the events on a controller, and return the blocks with its commands.

    `compacts`: its journal is compacted before every event.

    Raises:
        ValueError: an invalid line.
    """
    harness: Harness | None = None
    played = []
    for block in blocks:
        lines: list[str] = []
        for event in block.events:
            verb, _, rest = event.partition(" ")
            if verb == "plan":
                harness = _begin(folder, rest, compacts)
                continue
            if harness is None:
                raise ValueError(f"{event!r} comes before the plan; begin with 'plan', and its numbers")
            lines += _apply(harness, event)
        shown = lines or [NOTHING] if block.events and block.separator == SEPARATOR else []
        played.append(Block(block.before, block.events, shown, block.separator))
    if harness is not None:
        harness.carry_out()
        harness.store.close()
    return played


def _begin(folder: Path, rest: str, compacts: bool) -> Harness:
    options = _options(shlex.split(rest))[1]
    plan_fields = {key: value if value.islower() else ast.literal_eval(value) for key, value in options.items()}
    if "kind" in plan_fields:
        plan_fields["kind"] = KINDS[plan_fields["kind"]]
    names = [one.name for one in fields(LeaseTimeouts) if one.name in plan_fields]
    plan_fields["timeouts"] = LeaseTimeouts(**{name: plan_fields.pop(name) for name in names})
    return Harness(folder, plan_fields.pop("held_out", 2), compacts=compacts, **plan_fields)


def _options(words: list[str]) -> tuple[list[str], dict[str, str]]:
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    return [word for word in words if "=" not in word], pairs


def _apply(harness: Harness, event: str) -> list[str]:
    first, *words = shlex.split(event)
    match first:
        case "crash":
            lost: Any = words[0] if words else ""
            if lost not in get_args(LostCommands):
                raise ValueError(f"{event!r}: a crash leaves things 'unsaid', 'unwritten', or is just a 'crash'")
            return harness.crash(lost)
        case "fetched":
            return harness.answer_fetch()
        case "stored":
            return harness.report_stored()
        case "checkpoint":
            return harness.read_checkpoint(f"{words[0]:0>32}" if words else "")
        case "stop":
            return harness.request_stop(" ".join(words) or "enough")
        case "wait":
            return _wait(harness, float(words[0]), beating="beating" in words)
    verb = VERBS.get(words[0]) if words else None
    if verb is None:
        others = "crash, checkpoint, fetched, stored, stop, wait"
        raise ValueError(f"{event!r} is not understood; a replica {', '.join(VERBS)}; or {others}")
    plain, options = _options(words[1:])
    harness.carry_out()
    if first.startswith("operator"):
        return verb(harness, Replica(first, options), plain, options)
    if first not in harness.replicas and words[0] != "joins":
        raise ValueError(f"{event!r}: {first} has not joined")
    return verb(harness, harness.replicas.setdefault(first, Replica(first, {})), plain, options)


def _wait(harness: Harness, seconds: float, *, beating: bool) -> list[str]:
    if not beating:
        return harness.advance_time(seconds)
    lines, end = [], harness.now + seconds
    while harness.now < end and not harness.ended:
        for replica in list(harness.replicas.values()):
            if replica.is_up:
                harness.carry_out()
                lines += beats(harness, replica, [], {})
        lines += harness.advance_time(min(harness.plan.heartbeat_s, end - harness.now))
    return lines


# --- messages of replicas ---------------------------------------------------------------------------------------------

Words = list[str]
Options = dict[str, str]


def joins(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica sends a hello with its previous options, overridden by `options`."""
    replica.options |= {**dict.fromkeys(words, "yes"), **options}
    hello_options, role = replica.options, replica.name.rpartition("-")[0]
    replica.is_up, has_layout = True, role in ("policy", "rollout")
    if role == "policy" or "version" in hello_options:
        replica.version = int(options.get("version", max(0, replica.version)))
    hello = wire.Hello(
        role=role,  # type: ignore[arg-type]
        host=hello_options.get("host", "a"),
        pid=1,
        num_slots=0 if role == "policy" else int(hello_options.get("slots", 2 if role == "rollout" else 8)),
        version=replica.version,
        has_layout=has_layout,
        serves=role == "policy" or "serves" in hello_options,
        peer=f"{replica.name}:1" if "shares" in hello_options else "",
        checkpoint=hello_options.get("checkpoint", "") and f"{hello_options['checkpoint']:0>32}",
    )
    return harness.receive(replica.name, hello, *((encoded_layout(replica.name),) if has_layout else ()))


def restarts(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica's process restarts without work, and sends a hello."""
    replica.incarnation += 1
    replica.version = -1
    replica.held.clear()
    return joins(harness, replica, words, options)


def returns(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica rejoins after it lost the controller: a hello and a heartbeat."""
    lines = joins(harness, replica, words, options)
    harness.carry_out()
    return lines + beats(harness, replica, [], {})


def beats(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica sends a heartbeat with its version and its leases, or with those after 'holding'."""
    held = list(replica.held)
    if words[:1] == ["holding"]:
        held = [_lease(harness, replica, *word.split(":", 1)) for word in words[1:] if word != "nothing"]
    replica.version = int(options.get("version", replica.version))
    leases = tuple(wire.HeldLease(lease=lease, phase="working") for lease in held)
    return harness.receive(replica.name, wire.Heartbeat(leases=leases, version=replica.version))


def dies(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica's process dies and its connection closes; 'silently': it stays open, as when a host fails."""
    replica.is_up = False
    replica.held.clear()
    return [] if words == ["silently"] else harness._step(ReplicaDisconnected(harness.now, replica.name))


def leaves(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica sends a goodbye."""
    replica.is_up = False
    return harness.receive(replica.name, wire.Leave(reason=" ".join(words) or "drained"))


def generates(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica has generated groups with the version that it holds."""
    lines = []
    for word in words:
        lease = _lease(harness, replica, "generate", word)
        command = replica.held.get(lease)
        num = command.num_completions if isinstance(command, wire.GenerateGroup) else harness.plan.group_size
        lines += harness.generates(replica.name, lease, int(options.get("version", replica.version)), num)
    return lines


def interrupts(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica returns interrupted groups with partial completions of `tokens` tokens."""
    lines, version = [], int(options.get("version", replica.version))
    for word in words:
        lease = _lease(harness, replica, "generate", word)
        command = replica.held.get(lease)
        num = command.num_completions if isinstance(command, wire.GenerateGroup) else harness.plan.group_size
        lines += harness.interrupts(replica.name, lease, *[int(options.get("tokens", 3))] * num, version=version)
    return lines


def scores(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica has scored groups with rewards 1, 0, 1, ... or with `rewards`, where 'none' is a failure."""
    lines = []
    for word in words:
        lease = _lease(harness, replica, "score", word)
        command = replica.held.get(lease)
        num = len(command.completions) if isinstance(command, wire.ScoreGroup) else harness.plan.group_size
        rewards: list[float | None] = [float(index % 2 == 0) for index in range(num)]
        if "rewards" in options:
            rewards = [None if r == "none" else float(r) for r in options["rewards"].split(",")]
        lines += harness.scores(lease, *rewards, name=replica.name)
    return lines


def teaches(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The teacher has scored the tokens of groups, with the `top` most likely tokens at each position."""
    lines = []
    for word in words:
        lease = _lease(harness, replica, "teach", word)
        command = replica.held.get(lease)
        num = sum(command.lengths) if isinstance(command, wire.ScoreTokens) else harness.plan.group_size
        lines += harness.scores_tokens(lease, name=replica.name, num_tokens=num, k=int(options.get("top", 0)))
    return lines


def trains(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The policy has trained a step."""
    step = int(words[0])
    replica.version = step
    lease = _lease(harness, replica, "train", words[0])
    return harness.receive(replica.name, wire.StepTrained(lease=lease, step=step, metrics={}))


def publishes(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica has published a version."""
    lease, version = _lease(harness, replica, "publish", words[0]), int(words[0])
    command = replica.held.get(lease)
    if not isinstance(command, wire.PublishWeights):  # it answers again
        command = wire.PublishWeights(lease=lease, version=version)
    answer = published(command, replica.buffers[lease] if command.layouts else ())
    return harness.receive(replica.name, answer, encoded_offer(version))


def adopts(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica has adopted a version; 'torn': its weights are not those of the offer; 'flipped': its source sent
    other bits, with their digests, under the root of the version."""
    lease, version = _lease(harness, replica, "adopt", words[0]), int(words[0])
    replica.version = version
    command = replica.held.get(lease)
    if not isinstance(command, wire.AdoptWeights):  # it answers again
        command = wire.AdoptWeights(lease=lease, version=version)
    content = FLIPPED if "flipped" in words else None
    answer = adopted(
        command, replica.buffers.get(lease, (encoded_offer(version), encoded_plan("policy-0", replica.name))), content
    )
    if "torn" in words:
        answer = msgspec.structs.replace(answer, root="torn", layout_root="torn")
    return harness.receive(replica.name, answer)


def saves(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The policy has saved a state that it can resume from."""
    saved = wire.CheckpointSaved(
        lease=_lease(harness, replica, "save", words[0]), step=int(words[0]), path="/s", state=True
    )
    return harness.receive(replica.name, saved)


def exports(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The policy has written the last checkpoint."""
    saved = wire.CheckpointSaved(lease=_lease(harness, replica, "checkpoint", words[0]), step=int(words[0]), path="/c")
    return harness.receive(replica.name, saved)


def fails(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """The replica reports the failure of a lease such as ``generate:t0``; 'for good': the failure is not retryable."""
    kind, subject = words[0].split(":", 1)
    return harness.fails(
        replica.name, _lease(harness, replica, kind, subject), options.get("reason", "no luck"), fatal="good" in words
    )


def _lease(harness: Harness, replica: Replica, kind: str, subject: str = "") -> str:
    """Return the replica's newest lease of this kind and subject, or the one of the attempt in `subject`."""
    if ":" in subject:
        return harness.aliases.long(f"{kind}:{subject}")
    newest = harness.newest_leases.get((replica.name, f"{kind}:{subject}"))
    if newest is None:
        raise ValueError(f"{replica.name} was never given {kind}:{subject}")
    return newest


# --- messages of operators --------------------------------------------------------------------------------------------


def sets(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """An operator changes a setting; the same `request` counts once."""
    key, text = words
    value = ast.literal_eval(text) if text[:1] in "-.0123456789" else text
    request = options.get("request", f"{key} {text} {harness.now}")
    return harness.receive(replica.name, wire.ChangeSetting(request=request, key=key, value=value))


def evaluates(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """An operator requests an evaluation of the newest version, with the given number of completions per prompt."""
    num = int(words[0]) if words else 0
    request = wire.RequestEvaluation(request=options.get("request", "evaluate"), num_completions=num)
    return harness.receive(replica.name, request)


def asks(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """An operator queries the run's waits or its status."""
    about: Any = words[0]
    text = harness.receive(replica.name, wire.QueryRun(request="ask", about=about))
    return [line for lines in text for line in lines.split("\n")]


def checkpoints(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """An operator requests a saved state."""
    return harness.receive(replica.name, wire.RequestCheckpoint(request="checkpoint"))


def stops(harness: Harness, replica: Replica, words: Words, options: Options) -> list[str]:
    """An operator requests a stop."""
    return harness.receive(replica.name, wire.RequestStop(request="stop", reason=" ".join(words) or "enough"))


VERBS: dict[str, Callable[[Harness, Replica, Words, Options], list[str]]] = {
    "joins": joins,
    "restarts": restarts,
    "returns": returns,
    "beats": beats,
    "dies": dies,
    "leaves": leaves,
    "generates": generates,
    "interrupts": interrupts,
    "scores": scores,
    "teaches": teaches,
    "trains": trains,
    "publishes": publishes,
    "adopts": adopts,
    "saves": saves,
    "exports": exports,
    "fails": fails,
    "sets": sets,
    "evaluates": evaluates,
    "asks": asks,
    "checkpoints": checkpoints,
    "stops": stops,
}
