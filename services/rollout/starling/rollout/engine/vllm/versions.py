"""From vLLM's spans of weight versions to the version of each token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt


def token_versions(spans: Iterable[Any] | None, num_tokens: int) -> npt.NDArray[np.int32]:
    """Return the weight version of each of `num_tokens` sampled tokens, int32.

    vLLM's engine stamps what it puts out with the version in force, so that spans are exact: it changes only while
    nothing is being computed.

    Args:
        spans: each with `version`, the name given at an adoption, and `start` and `end` in tokens; None for no tokens.
        num_tokens: tokens that arrived; what comes after the last span is of its version.
    """
    versions = np.full(num_tokens, -1, np.int32)
    last = -1
    for span in spans or ():
        last = int(span.version)
        versions[span.start : span.end] = last
    versions[versions < 0] = last
    return versions
