"""Well-formed lies: messages of valid types with false contents, as a replica sends them whose key is in other hands.

The layouts and offers that follow them may be malformed, too: they are decoded only by who uses them.

A lie that no receiver could tell from the truth (other tokens, other finite rewards) is not among them: it would only
make the run learn something else.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from starling.common.wire import messages as wire
from starling.sim.replicas.weights import encoded_offer, offer_of
from starling.sim.scenario.scenario import EVALUATION_SCORER

Buffers = tuple[bytes, ...]
Lie = tuple[wire.Up, Buffers]

NAN: Final = float("nan")
ENDLESS: Final = float("inf")


def lie(message: wire.Up, buffers: Buffers, rng: random.Random) -> Lie:
    """Return a false message in place of a true one; the message itself if there is no lie of its kind."""
    match message:
        case wire.GroupGenerated():
            return rng.choice(_OF_COMPLETIONS)(message, buffers, rng)
        case wire.GroupScored():
            return rng.choice(_OF_REWARDS)(message, rng), buffers
        case wire.WeightsPublished():
            version = message.version + rng.choice((-1, 1, 1000))
            false = replace(message, version=rng.choice((version, message.version)))
            offer = encoded_offer(max(0, version))
            return false, (rng.choice((b"junk", b"", offer, malformed(offer, rng))),)
        case wire.RelayOffered():
            return _relay_offer(message, rng)
        case wire.WeightsAdopted():
            other = message.version + rng.choice((-1, 1, 1000))
            root = rng.choice(("", "f" * 32, offer_of(max(0, other)).root))
            version = rng.choice((other, message.version))
            return replace(message, version=version, root=root, layout_root=rng.choice(("", root))), buffers
        case wire.Heartbeat():
            made_up = tuple(wire.HeldLease(lease=_made_up(rng), phase="answered") for _ in range(rng.randint(1, 4)))
            return replace(message, leases=(*message.leases, *made_up)), buffers
        case _:
            return message, buffers


def _relay_offer(message: wire.RelayOffered, rng: random.Random) -> Lie:
    version, problem = message.version + rng.choice((-1, 1, 1000)), rng.choice(("", "none"))
    false = replace(message, version=rng.choice((version, message.version)), problem=problem)
    data = rng.choice((b"junk", b"", encoded_offer(max(0, version)), malformed(encoded_offer(0), rng)))
    return false, () if problem else (data,)


def _made_up(rng: random.Random) -> str:
    """Return a lease that may or may not exist."""
    kind = rng.choice(("generate", "score", "teach", "publish", "adopt"))
    return f"{kind}:{rng.choice('te')}{rng.randint(0, 30)}:{rng.randint(0, 4)}.{rng.randint(0, 300)}"


# --- completions ------------------------------------------------------------------------------------------------------


def _of_another_version(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    shift = rng.choice((-1000, -1, 1, 1000))
    moved = tuple(
        replace(t, oldest_version=t.oldest_version + shift, newest_version=t.newest_version + shift)
        for t in message.trajectories
    )
    return replace(message, trajectories=moved), buffers


def _fewer(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    return replace(message, trajectories=message.trajectories[: rng.randrange(len(message.trajectories))]), buffers


def _failed(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    failed = tuple(replace(t, status=wire.Status.ENV_ERROR, problem="no luck") for t in message.trajectories)
    return replace(message, trajectories=failed), buffers


def _other_number_of_tokens(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    first, *others = message.trajectories
    return replace(message, trajectories=(replace(first, num_tokens=rng.randint(-2, 2**40)), *others)), buffers


def _other_form(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    index = rng.randrange(len(message.tensors))
    fields = rng.choice(({"dtype": "float64"}, {"shape": (2**40,)}, {"shape": ()}, {"shape": (-1,)}, {"name": "x"}))
    changed = replace(message.tensors[index], **fields)
    return replace(message, tensors=(*message.tensors[:index], changed, *message.tensors[index + 1 :])), buffers


def _other_contents(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    index, element = rng.choice(((0, struct.pack("<i", -1)), (1, struct.pack("<i", -7)), (2, struct.pack("<f", NAN)),
                                 (2, struct.pack("<f", -ENDLESS)), (2, struct.pack("<f", -3e38)),
                                 (3, struct.pack("<i", 1000))))  # fmt: skip
    changed = element + buffers[index][4:]
    return message, (*buffers[:index], changed, *buffers[index + 1 :])


def _no_tensor(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    kept = rng.randrange(len(buffers))
    return replace(message, tensors=message.tensors[:kept]), buffers[:kept]


def _of_another_group(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    return replace(message, lease=_made_up(rng)), buffers


def _at_another_temperature(message: wire.GroupGenerated, buffers: Buffers, rng: random.Random) -> Lie:
    return replace(message, temperature=rng.choice((NAN, ENDLESS, -7.0))), buffers


_OF_COMPLETIONS: Final[tuple[Callable[[wire.GroupGenerated, Buffers, random.Random], Lie], ...]] = (
    _of_another_version,
    _fewer,
    _failed,
    _other_number_of_tokens,
    _other_form,
    _other_contents,
    _no_tensor,
    _of_another_group,
    _at_another_temperature,
)


# --- rewards ----------------------------------------------------------------------------------------------------------


def _unusable(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    return replace(message, rewards=(rng.choice((NAN, ENDLESS, -ENDLESS, 1e300)), *message.rewards[1:]))


def _other_number(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    return replace(message, rewards=message.rewards * rng.choice((0, 2, 1000)))


def _failed_scorer(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    return replace(message, statuses=(wire.Status.REWARD_ERROR,) * len(message.statuses))


def _other_scores(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    return replace(message, components={"right": (NAN,) * rng.randint(0, 3), "x" * 1000: ()})


def _other_evaluation_scores(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    values = tuple(rng.choice((NAN, ENDLESS, 1e300, None)) for _ in range(len(message.rewards) + rng.randint(0, 1)))
    return replace(message, evaluation_scores={rng.choice((EVALUATION_SCORER, "x" * 1000)): values})


def _for_another_group(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    return replace(message, lease=_made_up(rng))


_OF_REWARDS: Final[tuple[Callable[[wire.GroupScored, random.Random], wire.GroupScored], ...]] = (
    _unusable,
    _other_number,
    _failed_scorer,
    _other_scores,
    _other_evaluation_scores,
    _for_another_group,
)


# --- messages that answer nothing -------------------------------------------------------------------------------------

EXTREME: Final = (NAN, ENDLESS, -ENDLESS, 0.0, -1.0, 1e300, 5e-324)
WHOLE: Final = (-(1 << 63), -2, -1, 0, 1, 7, 1 << 31, (1 << 64) - 1)
TEXTS: Final = ("", "x", "\x1b[31m", "a\nb", "[/green]", "x" * 5000, "\u0000")


def unasked(role: str, leases: Sequence[str], rng: random.Random) -> Lie:
    """Return a message that no true one led to, about one of `leases` or a made-up one, of a type that `role` may send.

    A `Hello` is not among them: the caller knows the layouts.
    """
    lease = rng.choice(leases) if leases and rng.random() < 0.8 else _made_up(rng)
    kinds: list[Callable[[str, random.Random], Lie]] = [_failure, _strange_heartbeat]
    if role == "rollout":
        kinds += [_partial, _device_answer, _strange_adoption]
    if role == "teacher":
        kinds += [_tokens_scored]
    if rng.random() < 0.005:
        return wire.Leave(reason=rng.choice(TEXTS)), ()
    return rng.choice(kinds)(lease, rng)


def _failure(lease: str, rng: random.Random) -> Lie:
    message = wire.LeaseFailed(
        lease=lease,
        status=rng.choice(list(wire.Status)),
        reason=rng.choice(TEXTS),
        fatal=rng.random() < 0.5,
        version=rng.choice(WHOLE),
        rejected=tuple(f"train/0/{rng.randint(0, 30)}" for _ in range(rng.randint(0, 3))),
    )
    return message, ()


def _strange_heartbeat(lease: str, rng: random.Random) -> Lie:
    progress = wire.LeaseProgress(
        bytes_done=rng.choice(WHOLE), bytes_total=rng.choice(WHOLE), seconds_left=rng.choice((None, *EXTREME))
    )
    held = wire.HeldLease(lease=lease, phase="working", progress=progress)
    waits = tuple(
        wire.Wait(
            what=rng.choice(TEXTS), on=rng.choice(("controller", "policy-0", "rollout-0", *TEXTS)),
            since_s=rng.choice(EXTREME), seconds_left=rng.choice(EXTREME),
        )
        for _ in range(rng.randint(0, 3))
    )  # fmt: skip
    gauges = {rng.choice(TEXTS): rng.choice(EXTREME), "tokens_per_s": rng.choice(EXTREME)}
    version, offered = rng.choice(WHOLE), rng.choice(WHOLE)
    return wire.Heartbeat(leases=(held,), version=version, gauges=gauges, offered=offered, waits=waits), ()


def _partial(lease: str, rng: random.Random) -> Lie:
    lengths = [rng.choice((-1, 0, 1, 2, 3, 4, 1 << 40)) for _ in range(rng.choice((0, 1, 2, 2, 2, 3)))]
    total = min(16, max(0, sum(lengths)))
    kinds = [("int32", ""), ("float32", ""), ("int32", "")]
    if rng.random() < 0.2:
        kinds += [("int32", "kept_counts"), ("int32", "kept_ids")]
    tensors = tuple(wire.TensorMeta(dtype=dtype, shape=(total,), nbytes=4 * total, name=name) for dtype, name in kinds)
    if rng.random() < 0.2:
        tensors += (wire.TensorMeta(dtype="uint8", shape=(total, 2, 2), nbytes=4 * total, name="routing"),)
    statuses = (None, None, None, wire.Status.OK, wire.Status.INFRA_LOST)
    message = wire.GroupInterrupted(
        lease=lease,
        reason=rng.choice(TEXTS),
        partial=tuple(wire.PartialCompletionMeta(num_tokens=num, status=rng.choice(statuses)) for num in lengths),
        tensors=tensors,
        temperature=rng.choice((-1.0, 1.0, *EXTREME)),
        lost=rng.random() < 0.2,
    )
    version = struct.pack("<i", rng.choice((-1, 0, rng.randint(0, 30))))
    return message, tuple(version * total if index == 2 else bytes(4 * total) for index in range(len(tensors)))


def _device_answer(lease: str, rng: random.Random) -> Lie:
    return rng.choice((wire.Slept, wire.Woken))(lease=lease), ()


def _strange_adoption(lease: str, rng: random.Random) -> Lie:
    message = wire.WeightsAdopted(
        lease=lease,
        version=rng.choice(WHOLE),
        root=rng.choice(TEXTS),
        pull_s=rng.choice(EXTREME),
        pause_s=rng.choice(EXTREME),
        size_bytes=rng.choice(WHOLE),
        transport=rng.choice(TEXTS),
        sent_bytes=rng.choice(WHOLE),
        lanes=TEXTS,
        split={"read_s": rng.choice(EXTREME), rng.choice(TEXTS): rng.choice(EXTREME)},
        source=rng.choice(("policy-0", "rollout-0", *TEXTS)),
        layout=rng.choice(TEXTS),
        reads=tuple(
            wire.RankRead(
                source=rng.choice(("policy-0", *TEXTS)),
                source_rank=rng.choice(WHOLE),
                rank=rng.choice(WHOLE),
                transport=rng.choice(("tcp", *TEXTS)),
                num_bytes=rng.choice(WHOLE),
                seconds=rng.choice(EXTREME),
            )
            for _ in range(rng.choice((0, 1, 40)))
        ),
    )
    return message, ()


def _tokens_scored(lease: str, rng: random.Random) -> Lie:
    num, k = rng.choice((0, 1, 6, 6, 6)), rng.choice((0, 1, 2))
    forms = (("teacher_logprobs", "float32", (num,)), ("teacher_top_ids", "int32", (num, k)),
             ("teacher_top_logprobs", "float32", (num, k)))[: rng.choice((0, 1, 1, 2, 3, 3))]  # fmt: skip
    tensors, buffers = [], []
    for name, dtype, shape in forms:
        count = math.prod(shape)
        value = rng.choice((0.0, -1.0, 3e38, -3e38, NAN))
        element = struct.pack("<f", value) if dtype == "float32" else struct.pack("<i", rng.choice((0, -1, 1 << 30)))
        tensors.append(wire.TensorMeta(dtype=dtype, shape=shape, nbytes=4 * count, name=name))
        buffers.append(element * count)
    return wire.TokensScored(lease=lease, tensors=tuple(tensors)), tuple(buffers)


def strange_hello(hello: wire.Hello, rng: random.Random) -> wire.Hello:
    """Return `hello` with some false contents."""
    changes = {
        "host": rng.choice(("h", "0", "x" * 300, "\x1b[31m")),
        "pid": rng.choice(WHOLE),
        "num_slots": rng.choice((1, 2, 4, 4096, 4097, 0, -1, 1 << 62)),
        "version": rng.choice(WHOLE),
        "serves": rng.random() < 0.5,
        "peer": rng.choice(("", "h:1", "x" * 300)),
        "checkpoint": rng.choice(("", "0" * 32, "x")),
        "limits": rng.choice((None, wire.ModelLimits(vocabulary_size=1, longest=1))),
    }
    names = rng.sample(sorted(changes), rng.randint(1, 3))
    return replace(hello, **{name: changes[name] for name in names})


# --- layouts and offers -----------------------------------------------------------------------------------------------


def malformed(encoded: bytes, rng: random.Random) -> bytes:
    """Return an encoded layout or offer of which one to three parts are changed: other values, numbers of dims or of
    parts, missing and unknown keys, deep nesting."""
    content = msgspec.msgpack.decode(encoded)
    for _ in range(rng.randint(1, 3)):
        content = _with_change(content, rng)
    return msgspec.msgpack.encode(content)


def _with_change(value: Any, rng: random.Random) -> Any:
    """Return a value with one change, of itself or of a part."""
    is_inside = rng.random() < 0.8
    match value:
        case list() if value and is_inside:
            index = rng.randrange(len(value))
            return [*value[:index], _with_change(value[index], rng), *value[index + 1 :]]
        case list():
            return rng.choice((value[:-1], value + value[-1:], value * 40, [*value, _strange_value(rng)]))
        case dict() if value and is_inside:
            key = rng.choice(sorted(value))
            return {**value, key: _with_change(value[key], rng)}
        case dict():
            return rng.choice(({**value, "unknown": _strange_value(rng)}, dict(list(value.items())[1:])))
        case int() if is_inside:
            return rng.choice(WHOLE)
        case str() if is_inside:
            return rng.choice(TEXTS)
    return _strange_value(rng)


def _strange_value(rng: random.Random) -> Any:
    deep = msgspec.Raw(b"\x91" * rng.choice((10, 1_000, 100_000)) + b"\xc0")
    return rng.choice((None, deep, deep, rng.choice(EXTREME), b"\xff", [], {}, rng.choice(WHOLE), rng.choice(TEXTS)))
