"""Settings of property tests: as many examples as `make test` has time for, and ten times as many in `make explore`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(num: int, **changes: Any) -> settings:
    """Return settings for `num` examples, or for ten times as many in the profile `explore`."""
    exploring = settings.get_current_profile_name() == "explore"
    return settings(max_examples=10 * num if exploring else num, **changes)
