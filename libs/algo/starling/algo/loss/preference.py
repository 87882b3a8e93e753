"""Losses over preference pairs: DPO and IPO for a policy, Bradley-Terry for a reward model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from starling.algo.loss.terms import LossTerms


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """P pairs of completions of the same prompt; log-probabilities are sums over the tokens of a completion."""

    chosen: Tensor
    """float32 [P], of the preferred completion under the trained weights; differentiable."""
    rejected: Tensor
    """float32 [P], of the other one; differentiable."""
    chosen_tokens: Tensor
    """int64 [P], how many tokens `chosen` sums; at least 1."""
    rejected_tokens: Tensor
    """int64 [P]."""
    reference_chosen: Tensor | None = None
    """float32 [P], under the reference, detached; None for no reference, which then counts as uniform."""
    reference_rejected: Tensor | None = None
    """float32 [P]; given if and only if `reference_chosen` is."""

    def __post_init__(self) -> None:
        if (self.reference_chosen is None) != (self.reference_rejected is None):
            raise ValueError("a reference has log-probabilities of one side only: give both sides or neither")


def dpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0) -> LossTerms:
    """Return the sigmoid loss of each pair, [P].

    ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)`` with ``h = log(p/q)(chosen) - log(p/q)(rejected)`` over
    trained p and reference q (DPO, arXiv:2305.18290, equation 7). `label_smoothing` e is the share of pairs taken to be
    labelled the wrong way round (conservative DPO, https://ericmitchell.ai/cdpo.pdf, equation 3). Without a reference
    q is left out.

    Metrics, [P] each: `reward_chosen` and `reward_rejected`, ``beta log(p/q)``; `reward_margin`, their difference;
    `accuracy`, 1 where it is above 0.

    Raises:
        ValueError: `beta` is not above 0, or `label_smoothing` is outside [0, 0.5).
    """
    if not beta > 0.0:
        raise ValueError(f"beta is {beta}: it must be above 0")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be 0 or more and below 0.5")
    chosen, rejected = _log_ratios(pairs)
    logits = beta * (chosen - rejected)
    loss = -logsigmoid(logits)
    if label_smoothing:
        loss = (1.0 - label_smoothing) * loss - label_smoothing * logsigmoid(-logits)
    return LossTerms(loss, _metrics(beta * chosen, beta * rejected))


def ipo(pairs: Pairs, *, beta: float = 0.1) -> LossTerms:
    """Return the squared loss of each pair, [P].

    ``(h - 1 / (2 beta))^2`` with h as for `dpo` (IPO, arXiv:2310.12036, equation 17, whose tau is beta): where DPO
    pushes h without end, this has a goal, so it does not overfit pairs that all agree.

    The log-probabilities are those per token, so that the goal means the same for completions of every length; the
    authors' results use them, though equation 17 does not mention it. The metrics are those of `dpo`, per token.

    Raises:
        ValueError: `beta` is not above 0.
    """
    if not beta > 0.0:
        raise ValueError(f"beta is {beta}: it must be above 0")
    chosen, rejected = _log_ratios(pairs)
    chosen, rejected = chosen / pairs.chosen_tokens, rejected / pairs.rejected_tokens
    loss = (chosen - rejected - 1.0 / (2.0 * beta)).square()
    return LossTerms(loss, _metrics(beta * chosen, beta * rejected))


def bradley_terry(chosen: Tensor, rejected: Tensor, *, center: float = 0.0) -> LossTerms:
    """Return ``-log sigmoid(chosen - rejected) + center (chosen + rejected)^2`` of each pair, [P].

    The first part is the likelihood of the preferences (Bradley and Terry, 1952; InstructGPT, arXiv:2203.02155,
    equation 1). It leaves the zero of the scale open; the second part keeps the scores around 0 (arXiv:2312.09244,
    section 2; 0.01 is usual).

    Metrics, [P] each: `reward_chosen`, `reward_rejected`, `reward_margin` (their difference) and `accuracy`, 1 where
    it is above 0.

    Args:
        chosen: float32 [P], the scores of the preferred completions; differentiable.
        rejected: float32 [P], of the others; differentiable.
        center: weight of the second part.

    Raises:
        ValueError: `center` is negative.
    """
    if not center >= 0.0:
        raise ValueError(f"center is {center}: it must be 0 or more")
    loss = -logsigmoid(chosen - rejected)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return LossTerms(loss, _metrics(chosen, rejected))


def _log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    if pairs.reference_chosen is None or pairs.reference_rejected is None:
        return pairs.chosen, pairs.rejected
    return pairs.chosen - pairs.reference_chosen, pairs.rejected - pairs.reference_rejected


@torch.no_grad()
def _metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    margin = (chosen - rejected).detach()
    return {
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
        "reward_margin": margin,
        "accuracy": (margin > 0.0).to(margin.dtype),
    }
