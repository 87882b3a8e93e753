"""What one peer may do: which messages its role may say, how large they are, and how many of them come in a second.

A role follows from the name, and the name from the key: who holds the key of ``rollout-3`` can only act as a rollout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, get_args

from starling.common.errors import WireError
from starling.common.ids import Role
from starling.common.wire import codec, messages

PEER_ROLES: Final = (*(role for role in get_args(Role) if role != "controller"), "observer")
"""The roles that a key may be made for. An observer says nothing: it listens to the telemetry."""

NAME_FORM: Final = f"ROLE-NUMBER, ROLE being {', '.join(PEER_ROLES[:-1])} or {PEER_ROLES[-1]}"
_NAME: Final = re.compile(rf"({'|'.join(PEER_ROLES)})-(?:0|[1-9][0-9]{{0,8}})")

_MIB: Final = 1 << 20

MAX_BYTES: Final = {
    "policy": 1024 * _MIB,  # an offer with the digests of a large model
    "rollout": 2048 * _MIB,  # a group of long completions, or with the pixels of its prompt
    "reward": codec.MAX_MESSAGE_BYTES + codec.MAX_ENVELOPE_BYTES,  # no buffers
    "teacher": 2048 * _MIB,  # for each token of a group its log-probability, and the likeliest tokens
    "operator": 64 << 10,  # a key and its value
    "observer": 0,
}
"""The most bytes of one message of each role, over all its frames. The codec's own limits hold besides."""


@dataclass(frozen=True)
class RateLimits:
    """How much one peer may say. What is beyond is dropped: all of it that matters is said again.

    The defaults are far above what a replica needs (a heartbeat each second, and a result when there is one), and
    below what would keep the controller from the others: a peer at its limit takes a tenth of its time.
    """

    messages_per_s: float = 10_000.0
    bytes_per_s: float = 256.0 * _MIB
    burst_messages: float = 20_000.0
    """So many at once, after a quiet while: all answers of a replica that has found the controller again."""
    burst_bytes: float = 4096.0 * _MIB
    patience: int = 10_000
    """Who had so many messages dropped without a pause loses its connection."""


DEFAULT_RATE_LIMITS: Final = RateLimits()


class PeerAllowance:
    """What is left to one peer: two token buckets, filled up only when one of them is empty.

    To take is then two subtractions. What a peer may say in a time t is thereby at most `rate * t` and two bursts.
    """

    __slots__ = ("dropped", "limits", "num_bytes", "num_messages", "over", "since")

    def __init__(self, limits: RateLimits, now: float) -> None:
        self.limits, self.since = limits, now
        self.num_messages, self.num_bytes = limits.burst_messages, limits.burst_bytes
        self.over = False
        """An episode is under way: messages were dropped, and the peer has not kept quiet since."""
        self.dropped = 0
        """Messages that were dropped in this episode."""

    def refill(self, now: float) -> bool:
        """Add what time has brought. Returns whether the message that has just been taken was within the limits."""
        limits, elapsed = self.limits, now - self.since
        self.since = now
        self.num_messages = min(limits.burst_messages, self.num_messages + elapsed * limits.messages_per_s)
        self.num_bytes = min(limits.burst_bytes, self.num_bytes + elapsed * limits.bytes_per_s)
        if self.over and 2 * self.num_messages >= limits.burst_messages and 2 * self.num_bytes >= limits.burst_bytes:
            self.over, self.dropped = False, 0
        return self.num_messages >= 0 and self.num_bytes >= 0

    def give_back(self, num_bytes: int) -> None:
        """Count a message as one that was dropped, not taken: who is over the limit stays at it and sinks no deeper."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        self.over = True
        self.dropped += 1


@dataclass(frozen=True)
class RoleRules:
    """What one role may say."""

    role: str
    may_say: frozenset[type]
    max_bytes: int

    def oversize(self, size_bytes: int) -> WireError:
        """Return the error of a message that is larger than any of this role."""
        reason = f"a message of {size_bytes} bytes is over the limit of {self.max_bytes} for the role {self.role}"
        return WireError(reason, "size")

    def check(self, name: str, message: messages.Up) -> None:
        """Raise WireError when `name`, who has this role, may not say `message`."""
        if type(message) not in self.may_say:
            raise WireError(f"{name} may not say {type(message).__name__}: its role is {self.role}", "role")
        if type(message) is messages.Hello and message.role != self.role:
            raise WireError(f"{name} says that it is a {message.role}, and its name says {self.role}", "role")


RULES: Final = {
    role: RoleRules(role, messages.ALLOWED_MESSAGES.get(role, frozenset()), MAX_BYTES[role]) for role in PEER_ROLES
}


def role_of(name: str) -> str | None:
    """Return the role that `name` stands for (``rollout`` for ``rollout-3``), or None when it is no name of ours."""
    match = _NAME.fullmatch(name)
    return match[1] if match is not None else None


def rules_of(name: str) -> RoleRules:
    """Return the rules for `name`. Raises WireError when it is no name of ours."""
    role = role_of(name)
    if role is None:
        raise WireError(f"{name!r} is no name: it must be {NAME_FORM}", "role")
    return RULES[role]
