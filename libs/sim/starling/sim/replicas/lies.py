"""Well-formed lies: messages of valid types with false contents, as a replica sends them whose key is in other hands.

A lie that no receiver could tell from the truth (other tokens, other finite rewards) is not among them: it would only
make the run learn something else.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from starling.common.wire import messages as wire
from starling.sim.replicas.weights import encoded_offer, offer_of

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
            return false, (rng.choice((b"junk", b"", encoded_offer(max(0, version)))),)
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
                                 (2, struct.pack("<f", -ENDLESS)), (3, struct.pack("<i", 1000))))  # fmt: skip
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


def _for_another_group(message: wire.GroupScored, rng: random.Random) -> wire.GroupScored:
    return replace(message, lease=_made_up(rng))


_OF_REWARDS: Final[tuple[Callable[[wire.GroupScored, random.Random], wire.GroupScored], ...]] = (
    _unusable,
    _other_number,
    _failed_scorer,
    _other_scores,
    _for_another_group,
)
