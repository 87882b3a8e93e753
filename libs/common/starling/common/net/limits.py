"""Limits of one peer: which messages its role may send, of which size, and at which rate.

A role follows from the name, and the name from the key: the holder of the key of ``rollout-3`` can only act as a
rollout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, get_args

from starling.common.errors import WireError
from starling.common.ids import Role
from starling.common.wire import codec, messages

PEER_ROLES: Final = (*(role for role in get_args(Role) if role != "controller"), "observer")
"""Roles that a key may be made for. An observer sends no messages: it subscribes to the telemetry."""

NAME_FORM: Final = f"ROLE-NUMBER, ROLE being {', '.join(PEER_ROLES[:-1])} or {PEER_ROLES[-1]}"
_NAME: Final = re.compile(rf"({'|'.join(PEER_ROLES)})-(?:0|[1-9][0-9]{{0,8}})")

_MIB: Final = 1 << 20

MAX_FRAMES: Final = 64
"""Frames of one message to the controller, without the route of its connection. None has more than 14; each takes a
microsecond, and may be empty."""

MAX_BYTES: Final = {
    "policy": 1024 * _MIB,  # an offer with the digests of a large model
    "rollout": 2048 * _MIB,  # a group of long completions, or with the pixels of its prompt
    "reward": codec.MAX_MESSAGE_BYTES + codec.MAX_ENVELOPE_BYTES,  # no buffers
    "teacher": 2048 * _MIB,  # the log-probability of each token of a group, and the most likely tokens
    "operator": 64 << 10,  # a key and its value
    "observer": 0,
}
"""Maximum bytes of one message of each role, over all its frames. The limits of the codec apply too. A run may allow
less (`Hub.limit_messages`)."""

MIN_BYTES: Final = 80 * _MIB
"""What each role with a layout may send: a `Hello` of 16 MiB with a layout of 64 MiB."""


MAX_DEBT_S: Final = 1.0
"""Most seconds by which a peer may exceed its time: two seconds of its messages are dropped then."""


@dataclass(frozen=True)
class RateLimits:
    """Rate limits of one peer. Messages beyond them are dropped: those that matter are sent again.

    The defaults are far above the needs of a replica (a heartbeat each second, and a result when there is one), and low
    enough for the controller to serve the others: a peer at its limit takes a tenth of its time.
    """

    messages_per_s: float = 10_000.0
    bytes_per_s: float = 256.0 * _MIB
    burst_messages: float = 20_000.0
    """Burst after a quiet time: all answers of a replica that has reconnected."""
    burst_bytes: float = 4096.0 * _MIB
    patience: int = 10_000
    """Messages dropped without a pause after which the connection is closed."""
    seconds_per_s: float = 0.5
    """Time that the controller spends on the messages of one peer."""
    burst_seconds: float = 10.0


DEFAULT_RATE_LIMITS: Final = RateLimits()


class PeerAllowance:
    """Send budget of one peer: three token buckets, refilled only when one of them is empty.

    Counting a message is then three subtractions. In a time t a peer may send at most `rate * t` plus two bursts.
    """

    __slots__ = (
        "asked_at",
        "dropped",
        "limits",
        "num_bytes",
        "num_messages",
        "num_seconds",
        "over",
        "refused_at",
        "since",
    )

    def __init__(self, limits: RateLimits, now: float) -> None:
        self.limits, self.since = limits, now
        self.num_messages, self.num_bytes = limits.burst_messages, limits.burst_bytes
        self.num_seconds = limits.burst_seconds
        self.over = False
        """Whether messages were dropped, and the peer has not slowed down since."""
        self.dropped = 0
        """Messages that were dropped since then."""
        self.refused_at = float("-inf")
        """When its holder was last told why it is refused."""
        self.asked_at: dict[bool, float] = {}
        """When its holder was last sent the settings of its role, without and with the files of the model."""

    def refill(self, now: float) -> bool:
        """Refill the buckets. Returns whether the message that was counted last is within the limits."""
        limits, elapsed = self.limits, now - self.since
        self.since = now
        self.num_messages = min(limits.burst_messages, self.num_messages + elapsed * limits.messages_per_s)
        self.num_bytes = min(limits.burst_bytes, self.num_bytes + elapsed * limits.bytes_per_s)
        self.num_seconds = min(limits.burst_seconds, self.num_seconds + elapsed * limits.seconds_per_s)
        if self.over and 2 * self.num_messages >= limits.burst_messages and 2 * self.num_bytes >= limits.burst_bytes:
            self.over, self.dropped = False, 0
        return self.is_within()

    def take_time(self, seconds: float) -> None:
        """Count the time that a message has taken. One that takes long, as a hello whose layout needs new plans, leaves
        a debt of no more than `MAX_DEBT_S`: its sender must not seem to be silent."""
        self.num_seconds = max(min(self.num_seconds, -MAX_DEBT_S), self.num_seconds - seconds)

    def is_within(self) -> bool:
        """Return whether no bucket is empty."""
        return self.num_messages >= 0 and self.num_bytes >= 0 and self.num_seconds >= 0

    def refund(self, num_bytes: int) -> None:
        """Count a message as dropped instead of accepted: a peer over its limit goes no further into debt."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        self.over = True
        self.dropped += 1


@dataclass(frozen=True)
class RoleRules:
    """Messages that one role may send."""

    role: str
    allowed: frozenset[type]

    def oversize(self, size_bytes: int, max_bytes: int) -> WireError:
        """Return the error for a message that is larger than this role may send in this run."""
        reason = f"a message of {size_bytes} bytes is over the limit of {max_bytes} for the role {self.role}"
        return WireError(reason, "size")

    def check(self, name: str, message: messages.Up) -> None:
        """Raise WireError if `name`, which has this role, may not send `message`."""
        if type(message) not in self.allowed:
            raise WireError(f"{name} may not send {type(message).__name__}: its role is {self.role}", "role")
        if type(message) is messages.Hello and message.role != self.role:
            raise WireError(f"{name} has the name of a {self.role}, but joins as a {message.role}", "role")


RULES: Final = {role: RoleRules(role, messages.ALLOWED_MESSAGES.get(role, frozenset())) for role in PEER_ROLES}


def role_of(name: str) -> str | None:
    """Return the role of `name` (``rollout`` for ``rollout-3``), or None if it is malformed."""
    match = _NAME.fullmatch(name)
    return match[1] if match is not None else None


def may_send(name: str) -> bool:
    """Return whether `name` may send any message; a malformed name is refused by its first one."""
    role = role_of(name)
    return role is None or MAX_BYTES[role] > 0


def rules_of(name: str) -> RoleRules:
    """Return the rules for `name`. Raises WireError if it is malformed."""
    role = role_of(name)
    if role is None:
        raise WireError(f"{name!r} is not a valid name: it must be {NAME_FORM}", "role")
    return RULES[role]
