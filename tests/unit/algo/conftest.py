"""Losses here are tiny: one thread each, so that tests do not fight for the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
