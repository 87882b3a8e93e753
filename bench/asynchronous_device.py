"""Timing model of a simulated GPU. Pure: the caller passes the time.

All running rows get their next token in one decode step, whose time has a fixed part for reading the weights and a part
per row: because of the fixed part, the last rows of a batch are expensive. Rows join and leave between two steps, as in
any engine with continuous batching. Rows only grow until they end, so many steps are computed at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Profile:
    """Speed of a device, and the distribution of completion lengths."""

    step_s: float
    """Seconds of a decode step with `max_rows` rows."""
    fixed_share: float
    """Share of them that does not depend on the number of rows."""
    max_rows: int
    """Most rows that run at a time."""
    median_length: float
    """Completion lengths are drawn from a lognormal distribution: its median, in tokens."""
    sigma: float
    """The deviation of their logarithm: 0 for equal lengths; with 1, one in a hundred is ten times the median."""

    def decode_s(self, rows: int) -> float:
        """Return the seconds of a decode step with so many rows."""
        return self.step_s * (self.fixed_share + (1.0 - self.fixed_share) * rows / self.max_rows)

    def length(self, seed: int, index: int, most: int) -> int:
        """Return the length in tokens, at most `most`, of completion `index` of the group with this sampling seed."""
        drawn = math.exp(self.sigma * np.random.default_rng((seed, index)).standard_normal())
        return min(most, max(1, round(self.median_length * drawn)))


@dataclass(eq=False)
class Row:
    """A sequence that waits or runs."""

    lease: str
    index: int
    """Of the completion in its group."""
    length: int
    """Tokens that it will have."""
    done: int = 0
    """Tokens that it has."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens that it had when that version came), ascending."""


class Device:
    """Rows that grow with time."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self.running: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.num_tokens = 0
        """Number of tokens sampled so far."""
        self.version = -1
        """The weight version that samples the next token."""
        self._at = 0.0
        """When the last decode step ended."""

    def add(self, rows: Iterable[Row], now: float) -> None:
        """Queue rows; they start in this order. The device was advanced to `now` before."""
        if not self.running:
            self._at = now
        self.waiting.extend(rows)
        self._fill()

    def advance(self, now: float) -> list[Row]:
        """Take the decode steps that end by `now`; return the rows that ended, in order."""
        ended: list[Row] = []
        while self.running:
            step_s = self._profile.decode_s(len(self.running))
            shortest = min(row.length - row.done for row in self.running)
            steps = min(shortest, math.floor((now - self._at) / step_s + 1e-9))
            if steps <= 0:
                break
            self._at += steps * step_s
            self.num_tokens += steps * len(self.running)
            for row in self.running:
                row.done += steps
            ended += [row for row in self.running if row.done == row.length]
            self.running = [row for row in self.running if row.done < row.length]
            self._fill()
        return ended

    def next_end(self) -> float:
        """Return when the next row ends, should nothing change before; infinity without rows."""
        if not self.running:
            return math.inf
        shortest = min(row.length - row.done for row in self.running)
        return self._at + shortest * self._profile.decode_s(len(self.running))

    def adopt(self, version: int) -> None:
        """Sample from now on with other weights."""
        self.version = version
        for row in self.running:
            row.versions.append((version, row.done))

    def hold(self, now: float) -> None:
        """Let the time until `now` pass without a token: the device was paused."""
        self._at = max(self._at, now)

    def remove(self, lease: str) -> list[Row]:
        """Take the rows of a group out."""
        gone = [row for row in (*self.running, *self.waiting) if row.lease == lease]
        self.running = [row for row in self.running if row.lease != lease]
        self.waiting = deque(row for row in self.waiting if row.lease != lease)
        self._fill()
        return gone

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self._profile.max_rows:
            row = self.waiting.popleft()
            row.versions.append((self.version, row.done))
            self.running.append(row)
