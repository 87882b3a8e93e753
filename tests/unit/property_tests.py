"""Settings of property tests: a third of the examples in `make test`, and ten times as many in `make explore`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(num: int, **changes: Any) -> settings:
    """Return settings for `num` examples, for a third of them in profile `quick`, or ten times as many in `explore`."""
    share = {"quick": 1 / 3, "explore": 10}.get(settings.get_current_profile_name(), 1)
    return settings(max_examples=max(5, round(share * num)), **changes)
