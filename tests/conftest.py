"""What all tests share: how hypothesis searches, and a summary of faults that could not be injected.

What must be green before a change lands draws the same examples each time, so that it fails for what the change did:
some in `make test` (the profile `quick`), and all in the campaigns (`full`). `make explore` draws others, and more of
them; what it finds becomes an `@example`.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

settings.register_profile("quick", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("full", derandomize=True, deadline=None, max_examples=100)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List the tests of faults that were skipped, mostly for lack of root: their guarantees were not tested."""
    skipped = [one for one in terminalreporter.stats.get("skipped", ()) if "system/chaos/" in one.nodeid]
    if skipped:
        terminalreporter.section("FAULTS THAT WERE NOT INJECTED: their guarantees are not tested", red=True, bold=True)
        for report in skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            terminalreporter.write_line(f"{report.nodeid}: {reason}", red=True)
