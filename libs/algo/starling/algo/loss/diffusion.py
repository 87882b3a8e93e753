"""Losses of diffusion models. Each returns one number per trajectory, [B]; which of them a step adds up is decided
elsewhere.

A step of a sampler is an action like a token, with a log-density in place of a log-probability (see
`starling.algo.diffusion.transitions`), so the policy losses of tokens hold for it as they are: Flow-GRPO
(arXiv:2505.05470) is `ppo_clip` over steps, with bounds of 1e-4 or so. What is here has no counterpart with tokens:

    normalised_log_ratio    GRPO-Guard: ratios of all steps around 1, with one spread
    mean_kl, velocity_kl    divergence from the reference
    matching                the loss of pre-training, for supervised training
    data_term               the same with DDRL's weight
    negative_aware          DiffusionNFT, which needs no log-densities
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from starling.algo.diffusion.flow import per_sample
from starling.algo.diffusion.transitions import Transition
from starling.algo.loss.terms import LossTerms


def mean_square(values: Tensor) -> Tensor:
    """Return the mean square of the elements of each row of [B, ...], in float32 or better: [B]."""
    wide = values if values.dtype == torch.float64 else values.float()
    return wide.square().mean(dim=tuple(range(1, wide.ndim)))


def normalised_log_ratio(found: Transition, old_mean: Tensor, logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return the log-ratio of each step as GRPO-Guard normalises it (arXiv:2510.22319, equation 8), [B].

    ``s (log r + |m - m_old|^2 / (2 s^2))`` with the step's deviation s, means of elements in place of sums. A log-ratio
    of two Gaussians has the mean ``-|m - m_old|^2 / (2 s^2)`` under the old one, so that ratios lie below 1 and the
    upper bound of a clipped loss is rarely met; and a spread of ``|m - m_old| / s``, greatest where s is small, so that
    one bound cannot fit all steps. The paper divides the loss of a step by ``-dt``, too.

    Args:
        found: the distribution of each step; its `std` is above 0.
        old_mean: [B, ...], the mean when the step was drawn.
        logprobs: [B], ``log_density(found, drawn state)``.
        old_logprobs: [B], the one when the step was drawn.
    """
    bias = mean_square(found.mean - old_mean) / (2.0 * found.std.square())
    return found.std * (logprobs - old_logprobs + bias)


def mean_kl(found: Transition, reference_mean: Tensor) -> Tensor:
    """Return Flow-GRPO's divergence of each step from the reference (arXiv:2505.05470, section 4.1), [B].

    ``|m - m_ref|^2 / (2 rate^2)``, the mean over elements: that of two Gaussians over the length of the step.
    """
    return mean_square(found.mean - reference_mean) / (2.0 * found.rate.square())


def velocity_kl(velocity: Tensor, reference: Tensor) -> Tensor:
    """Return the mean square between the velocities of the model and the reference, [B]: the same for all steps."""
    return mean_square(velocity - reference)


def matching(velocity: Tensor, target: Tensor) -> Tensor:
    """Return the flow-matching loss of each sample (arXiv:2210.02747, equation 9): the mean square of ``v - (e - x0)``.

    Args:
        velocity: the model's, [B, ...].
        target: noise less clean sample.
    """
    return mean_square(velocity - target)


def data_term(velocity: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
    """Return DDRL's term of each sample of data, [B]: `matching` times ``(1 - sigma)^2 + sigma^2``.

    DDRL (arXiv:2512.04332) holds the policy to the data by the forward divergence, which is the loss of pre-training.
    Cosmos-RL weighs the square error of the clean sample at the EDM noise level s with ``(1 + s^2) / s^2``. With
    ``s = sigma / (1 - sigma)`` the error of the clean sample is sigma times that of the velocity, and this is the same
    number in terms of velocities: a weight between a half and one.
    """
    weight = (1.0 - sigma).square() + sigma.square()
    return weight * matching(velocity, target)


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """B clean samples, noised once more, and what the three models predict there."""

    clean: Tensor
    """[B, ...], the samples that were rewarded."""
    state: Tensor
    """Each of them noised to `sigma`."""
    sigma: Tensor
    """float [B]."""
    velocity: Tensor
    """Of the trained model; the only differentiable input."""
    old_velocity: Tensor
    """Of the model that the samples were drawn from."""
    reference_velocity: Tensor
    """Of the model that the divergence is from."""
    advantages: Tensor
    """float [B]."""


def negative_aware(forward: Forward, *, beta: float = 1.0, kl: float = 1e-4, bound: float = 5.0) -> LossTerms:
    """Return DiffusionNFT's loss of each sample (arXiv:2509.16117, equation 5), [B].

    An advantage A becomes the probability ``r = (clip(A, -bound, bound) / bound + 1) / 2`` that the sample is a good
    one. The trained velocity v implies a positive model ``beta v + (1 - beta) v_old`` and a negative one ``(1 + beta)
    v_old - beta v``, and each predicts the clean sample::

        bound / beta (r |x0 - clean of positive|^2 / w + (1 - r) |x0 - clean of negative|^2 / w') + kl |v - v_ref|^2

    with means over elements; each error is divided by its own mean absolute value w, without gradient, as the paper's
    code does.

    Metrics: `positive_error` and `negative_error`, the terms; `reference_kl`.

    Raises:
        ValueError: `beta` or `bound` is not above 0, or `kl` is negative.
    """
    if not (beta > 0.0 and bound > 0.0 and kl >= 0.0):
        raise ValueError(f"beta is {beta}, bound {bound} and kl {kl}: the first two must be above 0, kl 0 or more")
    old = forward.old_velocity.detach()
    good = ((forward.advantages.clamp(-bound, bound) / bound + 1.0) / 2.0).clamp(0.0, 1.0)
    positive = _relative_error(forward, beta * forward.velocity + (1.0 - beta) * old)
    negative = _relative_error(forward, (1.0 + beta) * old - beta * forward.velocity)
    divergence = velocity_kl(forward.velocity, forward.reference_velocity.detach())
    loss = bound / beta * (good * positive + (1.0 - good) * negative) + kl * divergence
    metrics = {"positive_error": positive, "negative_error": negative, "reference_kl": divergence}
    return LossTerms(loss, {name: value.detach() for name, value in metrics.items()})


def _relative_error(forward: Forward, velocity: Tensor) -> Tensor:
    error = forward.state - per_sample(forward.sigma, forward.state) * velocity - forward.clean
    size = error.detach().double().abs().mean(dim=tuple(range(1, error.ndim))).clamp(min=1e-5)
    return mean_square(error) / size.to(error.dtype)
