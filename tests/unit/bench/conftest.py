"""The benchmarks are scripts; what they are made of is tested as modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench"))
