"""The loss of a reward model, which scores a completion with one number."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from starling.algo.loss.terms import Terms


def bradley_terry(chosen: Tensor, rejected: Tensor, *, margins: Tensor | None = None, center: float = 0.0) -> Terms:
    """Return ``-log sigmoid(chosen - rejected - margin) + center (chosen + rejected)^2`` of each pair, [P].

    The first part is the likelihood of the preferences (Bradley and Terry, 1952; InstructGPT, arXiv:2203.02155,
    equation 1), with a margin where the preference is strong (Llama 2, arXiv:2307.09288, equation 2). It leaves the
    zero of the scale open; the second part holds the scores around 0 (arXiv:2312.09244, section 2; 0.01 is usual).

    Metrics, [P] each: `reward_chosen`, `reward_rejected`, `reward_margin` (their difference) and `accuracy`, 1 where
    it is above 0.

    Args:
        chosen: float32 [P], the scores of the preferred completions; differentiable.
        rejected: float32 [P], of the others; differentiable.
        margins: float32 [P], by how much the preferred should win; None for 0.
        center: weight of the second part.

    Raises:
        ValueError: `center` is negative.
    """
    if not center >= 0.0:
        raise ValueError(f"center is {center}: it must be 0 or more")
    difference = chosen - rejected
    loss = -logsigmoid(difference if margins is None else difference - margins)
    if center:
        loss = loss + center * (chosen + rejected).square()
    won = difference.detach()
    metrics = {
        "reward_chosen": chosen.detach(),
        "reward_rejected": rejected.detach(),
        "reward_margin": won,
        "accuracy": (won > 0.0).to(won.dtype),
    }
    return Terms(loss, metrics)
