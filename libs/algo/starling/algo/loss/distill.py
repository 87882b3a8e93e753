"""On-policy distillation: losses from a teacher's log-probabilities of tokens that the student sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from starling.algo.loss.terms import LossTerms


@torch.no_grad()
def reverse_kl_advantages(
    logprobs: Tensor, teacher_logprobs: Tensor, sequence: Tensor, *, discount: float = 0.0
) -> Tensor:
    """Return an advantage for each sampled token, float32 [N]: teacher minus student log-probability.

    ``a_t = log teacher - log student``, minus the sampled reverse divergence KL(student || teacher) of the token
    (MiniLLM, arXiv:2306.08543; Thinking Machines, "On-policy distillation", 2025). A policy loss over these advantages
    minimises that divergence. With a `discount` g a token is also credited with those after it in its completion:
    ``a_t + g a_(t+1) + g^2 a_(t+2) + ...``; with 1 that is the gradient of the divergence of whole completions, with 0,
    the default, that of each token given the tokens before it, with far lower variance.

    Args:
        logprobs: float32 [N], of the sampled tokens under the student that sampled them.
        teacher_logprobs: float32 [N], of the same tokens under the teacher.
        sequence: int64 [N], the completion of each token; the tokens of a completion are adjacent and in order.
        discount: from 0 to 1.

    Raises:
        ValueError: `discount` is outside [0, 1].
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount is {discount}: it must be from 0 to 1")
    sums = (teacher_logprobs - logprobs).double()
    # Doubling: once `sums` holds 2^k terms for each token, the token 2^k places on holds the next 2^k. Without a loop
    # over tokens this takes log2 of the longest completion.
    reach, factor = 1, discount
    while factor and reach < len(sums):
        same = sequence[reach:] == sequence[:-reach]
        if not bool(same.any()):
            break
        later = torch.where(same, sums[reach:], 0.0)
        sums = torch.cat([sums[:-reach] + factor * later, sums[-reach:]])
        reach, factor = 2 * reach, factor * factor
    return sums.to(logprobs.dtype)


def generalised_jsd(student_logprobs: Tensor, teacher_logprobs: Tensor, *, beta: float = 0.5) -> LossTerms:
    """Return the generalised Jensen-Shannon divergence between teacher and student at each token, [N].

    With ``m = beta teacher + (1 - beta) student``: ``beta KL(teacher || m) + (1 - beta) KL(student || m)`` (GKD,
    arXiv:2306.13649, equation 1). ``beta = 0`` stands for KL(teacher || student), the forward divergence that covers
    all modes of the teacher, and ``beta = 1`` for KL(student || teacher), which seeks its main mode: these are the
    limits of the formula divided by beta, and by 1 - beta, as it is itself 0 there.

    Over K of V tokens of the vocabulary, best the most likely ones of the teacher. The remaining probability forms one
    further outcome, "any other token", on both sides: no probability is dropped or spread over the K, a student that
    favours tokens outside them pays for it, and the value is a lower bound of the divergence over V, met if K = V.

    Metrics: `jsd`, the loss itself, in nats; `teacher_tail`, the teacher's probability outside the K tokens.

    Args:
        student_logprobs: float32 [N, K], finite, normalised over the whole vocabulary; differentiable.
        teacher_logprobs: float32 [N, K], of the same tokens under the teacher, normalised likewise.
        beta: from 0 to 1.

    Raises:
        ValueError: `beta` is outside [0, 1].
    """
    if not 0.0 <= beta <= 1.0:
        raise ValueError(f"beta is {beta}: it must be from 0 to 1")
    student, teacher = _with_tail(student_logprobs), _with_tail(teacher_logprobs)
    if beta == 0.0:
        loss = _kl(teacher, student)
    elif beta == 1.0:
        loss = _kl(student, teacher)
    else:
        logs = torch.tensor([beta, 1.0 - beta], dtype=student.dtype, device=student.device).log()
        mixture = torch.logaddexp(teacher + logs[0], student + logs[1])
        loss = beta * _kl(teacher, mixture) + (1.0 - beta) * _kl(student, mixture)
    return LossTerms(loss, {"jsd": loss.detach(), "teacher_tail": teacher[:, -1].detach().exp()})


def _with_tail(logprobs: Tensor) -> Tensor:
    """Append the logarithm of the probability that is left: [N, K] to [N, K + 1].

    A remainder of 0, or negative by rounding, counts as the smallest probability that is distinguishable from 1.
    """
    epsilon = torch.finfo(logprobs.dtype).eps
    total = torch.logsumexp(logprobs, dim=-1, keepdim=True).clamp(max=-epsilon)
    return torch.cat([logprobs, torch.log(-torch.expm1(total))], dim=-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)
