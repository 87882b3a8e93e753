"""One thread per process, because the losses are tiny and tests run in parallel."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
