"""What all tests share: how hypothesis searches, and a summary of faults that could not be injected.

What must be green before a change lands draws the same examples each time, so that it fails for what the change did:
some in `make test` (the profile `quick`), and all in the campaigns (`full`). `make explore` draws others, and more of
them; what it finds becomes an `@example`. Of a test that is marked `sample`, some parameters are part of `make test`,
and the others of the campaign.
"""

from __future__ import annotations

import os
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import settings

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("full", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.hookimpl(tryfirst=True)  # before the tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `campaign` what a sample of the parameters of a test leaves out."""
    by_test = defaultdict[Any, list[pytest.Function]](list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sample"):
            by_test[item.parent, item.originalname].append(item)
    for same in by_test.values():
        marker = same[0].get_closest_marker("sample")
        assert marker is not None
        kept = _sample(same, *marker.args)
        for item in same:
            if item not in kept:
                item.add_marker(pytest.mark.campaign)


def _sample(items: list[pytest.Function], num: int) -> list[pytest.Function]:
    """Return `num` items that have as many different values of their parameters as possible, the first ones of such."""
    items = [item for item in items if not item.get_closest_marker("campaign")]
    values = {item: {(name, id(value)) for name, value in item.callspec.params.items()} for item in items}
    kept, seen = list[pytest.Function](), set[tuple[str, int]]()
    while items and len(kept) < num:
        kept.append(max(items, key=lambda item: len(values[item] - seen)))  # the first of equal ones
        items.remove(kept[-1])
        seen |= values[kept[-1]]
    return kept


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the tests of faults that were skipped, mostly for lack of root: their guarantees were not tested."""
    skipped = [one for one in terminalreporter.stats.get("skipped", ()) if "system/chaos/" in one.nodeid]
    if skipped:
        terminalreporter.section("FAULTS THAT WERE NOT INJECTED: their guarantees are not tested", red=True, bold=True)
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            terminalreporter.write_line(f"{report.nodeid}: {reason}", red=True)
