"""A bonus for a policy that keeps its options open."""

from __future__ import annotations

from torch import Tensor

from starling.algo.loss.terms import Terms


def entropy_bonus(entropies: Tensor) -> Terms:
    """Return minus the entropy of the trained policy at each token, to be added with a small coefficient.

    (A3C, arXiv:1602.01783, section 4; PPO, arXiv:1707.06347, equation 9.)

    Metrics: `entropy`, in nats.

    Args:
        entropies: float32 [N], ``-sum over the vocabulary of p log p`` at each trained token; differentiable.
    """
    return Terms(-entropies, {"entropy": entropies.detach()})
