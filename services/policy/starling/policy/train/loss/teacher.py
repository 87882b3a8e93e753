"""What a teacher counts in a step: advantages of its own, or a divergence from it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from starling.algo.loss.distill import generalised_jsd, reverse_kl_advantages
from starling.algo.loss.terms import LossTerms
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import DistillSettings
from starling.policy.train.data.credit import TrainBatch
from starling.policy.train.data.packing import MicrobatchInputs


def check_taught(credited: TrainBatch, settings: DistillSettings) -> None:
    """Refuse a teacher that says less than the loss needs.

    Raises:
        ConfigError: names the setting and the remedy.
    """
    if credited.taught is not None and settings.loss == "jsd" and credited.taught.top_ids is None:
        raise ConfigError(
            "policy.distill.loss = 'jsd' needs the teacher's likeliest tokens, and it tells of the sampled ones only: "
            "set teacher.top_k above 0, or take 'reverse_kl'"
        )


def with_teacher(credited: TrainBatch, settings: DistillSettings) -> TrainBatch:
    """Return `credited` with the advantages that a teacher gives; as it is where there is none."""
    taught = credited.taught
    if taught is None:
        return credited
    advantages = settings.reward_coefficient * torch.from_numpy(credited.advantages)
    if settings.loss == "reverse_kl":
        own = reverse_kl_advantages(
            torch.from_numpy(credited.rollout_logprobs),
            torch.from_numpy(taught.logprobs),
            torch.from_numpy(credited.sequence),
            discount=settings.discount,
        )
        advantages = advantages + settings.coefficient * own
    return replace(credited, advantages=advantages.numpy())


def wanted_tokens(credited: TrainBatch, inputs: MicrobatchInputs, settings: DistillSettings) -> Tensor | None:
    """Return the tokens whose log-probabilities are wanted at each position: the trained one, then the teacher's.

    None where the trained ones are enough.
    """
    taught = credited.taught
    if taught is None or taught.top_ids is None or settings.loss != "jsd":
        return None
    ids = torch.from_numpy(taught.top_ids[inputs.tokens]).to(inputs.targets)
    return torch.cat([inputs.targets[:, None], ids], dim=1)


def divergence(
    credited: TrainBatch, inputs: MicrobatchInputs, student_logprobs: Tensor, settings: DistillSettings
) -> LossTerms:
    """Return the divergence between teacher and student at each token, [N].

    Args:
        credited: of the update.
        inputs: the microbatch.
        student_logprobs: float32 [N, K], of the teacher's likeliest tokens under the trained weights.
        settings: which divergence.
    """
    assert credited.taught is not None, "the update has no teacher"
    assert credited.taught.top_logprobs is not None, "the teacher told its likeliest tokens"
    known = torch.from_numpy(credited.taught.top_logprobs[inputs.tokens]).to(student_logprobs)
    return generalised_jsd(student_logprobs, known, beta=settings.beta)
