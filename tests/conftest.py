"""What all tests share: how hypothesis searches.

What must be green before a change lands draws the same examples each time, so that it fails for what the change did.
`make explore` draws others, and more of them; what it finds becomes an `@example`.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
