"""The loss of supervised fine-tuning, and its mean over the tokens of a step."""

from __future__ import annotations

import pytest
import torch

from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.sft import sft_loss

torch.set_num_threads(1)


def test_sft_equals_the_cross_entropy() -> None:
    logits = torch.randn(12, 9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.arange(12) % 9
    theirs = logits.detach().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(theirs, targets)
    expected.backward()
    loss = token_mean(sft_loss(logits.log_softmax(-1).gather(-1, targets[:, None])), 12)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_sft_of_unequal_microbatches_sums_to_the_mean() -> None:
    losses = torch.randn(10, generator=torch.Generator().manual_seed(1))
    parts = [token_mean(part, 10) for part in losses.split([1, 6, 3])]
    torch.testing.assert_close(torch.stack(parts).sum(), losses.mean(), rtol=1e-6, atol=1e-6)


def test_sft_step_without_tokens_is_rejected() -> None:
    with pytest.raises(ValueError, match="num_tokens is 0"):
        token_mean(torch.zeros(0), 0)
