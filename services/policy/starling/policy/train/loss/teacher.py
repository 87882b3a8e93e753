"""Distillation in a step: advantages from a teacher's log-probabilities, or a divergence from its distribution."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from starling.algo.loss.distill import generalised_jsd, reverse_kl_advantages
from starling.algo.loss.terms import LossTerms
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import DistillSettings
from starling.policy.train.data.packing import MicrobatchInputs
from starling.policy.train.loss.credit import TrainBatch


def check_teacher(batch: TrainBatch, settings: DistillSettings) -> None:
    """Refuse a teacher that reports less than the loss needs.

    Raises:
        ConfigError: names the setting and the remedy.
    """
    if batch.teacher is not None and settings.loss == "jsd" and batch.teacher.top_ids is None:
        raise ConfigError(
            "policy.distill.loss = 'jsd' needs the teacher's likeliest tokens, and the teacher reports only the "
            "sampled ones: set teacher.top_k above 0, or use 'reverse_kl'"
        )
    if batch.teacher is not None and settings.loss == "jsd" and batch.kept is not None:
        raise ConfigError(
            "policy.distill.loss = 'jsd' compares whole distributions, and sampling.logprobs = 'truncated' normalises "
            "over the kept tokens only: set sampling.logprobs = 'full', or use 'reverse_kl'"
        )


def with_teacher_advantages(batch: TrainBatch, settings: DistillSettings) -> TrainBatch:
    """Return `batch` with the teacher's advantages added; unchanged without a teacher."""
    teacher = batch.teacher
    if teacher is None:
        return batch
    advantages = settings.reward_coefficient * torch.from_numpy(batch.advantages)
    if settings.loss == "reverse_kl":
        from_teacher = reverse_kl_advantages(
            torch.from_numpy(batch.rollout_logprobs),
            torch.from_numpy(teacher.logprobs),
            torch.from_numpy(batch.sequence),
            discount=settings.discount,
        )
        advantages = advantages + settings.coefficient * from_teacher
    return replace(batch, advantages=advantages.numpy())


def teacher_targets(batch: TrainBatch, inputs: MicrobatchInputs, settings: DistillSettings) -> Tensor | None:
    """Return the tokens whose log-probabilities the loss needs, [N, 1 + K]: the trained one, then the teacher's K.

    None where the trained ones are enough.
    """
    teacher = batch.teacher
    if teacher is None or teacher.top_ids is None or settings.loss != "jsd":
        return None
    ids = torch.from_numpy(teacher.top_ids[inputs.tokens]).to(inputs.targets)
    return torch.cat([inputs.targets[:, None], ids], dim=1)


def teacher_divergence(
    batch: TrainBatch, inputs: MicrobatchInputs, student_logprobs: Tensor, settings: DistillSettings
) -> LossTerms:
    """Return the divergence between teacher and student at each token, [N].

    Args:
        batch: of the update.
        inputs: the microbatch.
        student_logprobs: float32 [N, K], of the teacher's likeliest tokens under the trained weights.
        settings: which divergence.
    """
    assert batch.teacher is not None, "the update has no teacher"
    assert batch.teacher.top_logprobs is not None, "the teacher reported no likeliest tokens"
    teacher_logprobs = torch.from_numpy(batch.teacher.top_logprobs[inputs.tokens]).to(student_logprobs)
    return generalised_jsd(student_logprobs, teacher_logprobs, beta=settings.beta)
