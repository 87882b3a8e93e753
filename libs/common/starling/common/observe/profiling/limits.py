"""What can be ordered of a profile. Imports nothing but the messages: the controller's core checks orders by it."""

from __future__ import annotations

import re
from typing import Final

from starling.common.wire.messages import Profile

FOLDER: Final = "profiles"
"""Folder of the run with a folder for each profile."""
MAX_PROFILES: Final = 64
"""Profiles that a run's folder holds; more are refused until some are removed."""
MAX_PROFILE_STEPS: Final = 1000
MAX_PROFILE_RANKS: Final = 64
"""Ranks that are named; a profile of all ranks names none."""
MAX_PROFILE_S: Final = 3600.0
"""Longest profile: what torch's profiler records in it has to fit into memory."""
_ID: Final = re.compile(r"[0-9a-f]{32}")


def order_problem(order: Profile) -> str:
    """Return why a profile is not recorded as ordered, in one sentence; empty if it is."""
    if not _ID.fullmatch(order.profile):
        return f"{order.profile!r} is no id of a profile: 32 hexadecimal digits"
    if not 1 <= order.num_steps <= MAX_PROFILE_STEPS:
        return f"{order.num_steps} steps cannot be profiled: give 1 to {MAX_PROFILE_STEPS}"
    if not 0 <= order.num_groups <= MAX_PROFILE_STEPS:
        return f"{order.num_groups} groups cannot be profiled: give 1 to {MAX_PROFILE_STEPS}, or 0 for a time"
    if not 0 < order.seconds <= MAX_PROFILE_S:
        return f"{order.seconds:g} s cannot be profiled: give more than 0 and at most {MAX_PROFILE_S:g}"
    if not 0 < order.limit_s <= MAX_PROFILE_S:
        return f"a limit of {order.limit_s:g} s is out of range: give more than 0 and at most {MAX_PROFILE_S:g}"
    if len(order.ranks) > MAX_PROFILE_RANKS or min(order.ranks, default=0) < 0:
        return f"{len(order.ranks)} ranks cannot be profiled: give at most {MAX_PROFILE_RANKS}, from 0, or all"
    return ""
