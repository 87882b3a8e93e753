"""What logits say of tokens that are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from starling.rollout.engine.base import PromptScores

ROWS_AT_ONCE: Final = 1024
"""Tokens whose logits are taken to float32 together: bounds the memory beside the logits themselves."""


def prompt_scores(logits: torch.Tensor, prompt_ids: list[int], version: int) -> PromptScores:
    """Return the scores of a prompt.

    Args:
        logits: [tokens - 1, vocabulary]: what is expected behind each token but the last.
        prompt_ids: the tokens; at least one.
        version: of the weights that the logits are of.
    """
    wanted = torch.tensor(prompt_ids[1:], device=logits.device)[:, None]
    parts = []
    for begin in range(0, len(wanted), ROWS_AT_ONCE):
        some = slice(begin, begin + ROWS_AT_ONCE)
        scaled = logits[some].float()
        total = scaled.logsumexp(dim=-1, keepdim=True)
        best, ids = scaled.max(dim=-1, keepdim=True)
        # One copy to the host is one wait for the device; float64 holds all three exactly.
        columns = ((scaled.gather(-1, wanted[some]) - total).double(), ids.double(), (best - total).double())
        parts.append(torch.cat(columns, dim=-1).cpu().numpy())
    told = np.concatenate(parts) if parts else np.zeros((0, 3))
    return PromptScores(
        told[:, 0].astype(np.float32), told[:, 1].astype(np.int32), told[:, 2].astype(np.float32), version
    )


def joined(parts: Sequence[PromptScores]) -> PromptScores:
    """Return the scores of a prompt of which `parts` are those of its tokens in order."""
    return PromptScores(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
        parts[-1].version,
    )
