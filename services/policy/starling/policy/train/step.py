"""Stops 6 to 8 of the walk: the groups of a step become a new weight version, by GRPO.

rewards -> advantages -> microbatches -> forward and backward of each -> one optimizer step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.grpo import grpo_loss
from starling.algo.loss.kl import kl_k3
from starling.common.errors import ConfigError
from starling.policy.settings import PolicySettings
from starling.policy.train.batch import Inputs, check_lengths, lay_out, to_tensors
from starling.policy.train.credit import Credited, credit
from starling.policy.train.forward import token_logprobs, trained_logits
from starling.policy.train.groups import Group
from starling.policy.train.model import frozen_copy, longest_sequence, pair_cost
from starling.policy.train.optimizer import Descent

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_MEANS = ("entropy", "clip_fraction", "approx_kl", "kl_reference", "mismatch_kl", "loss")
_MAXIMA = ("ratio_max", "mismatch_max")


class GrpoTrainer:
    """Trains a model on scored groups, one step at a time, each token weighing the same.

    Two trainers with equal weights, settings and groups make bitwise equal versions on a CPU with one thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: PolicySettings,
        *,
        total_steps: int,
        reference: PreTrainedModel | None = None,
    ) -> None:
        """Start with a fresh optimizer.

        Args:
            model: trained in place.
            settings: what to do.
            total_steps: how many steps there will be; decides the decay of the learning rate.
            reference: the model of the KL term; by default a copy of `model` as it is now, if there is such a term.
        """
        self._model = model
        self._settings = settings
        self._longest = longest_sequence(model)
        self._pair_cost = pair_cost(model)
        self._descent = Descent(model, settings.optimizer, total_steps)
        self._reference = None
        if settings.grpo.kl_coefficient:
            self._reference = reference if reference is not None else frozen_copy(model)

    def step(self, groups: Sequence[Group], *, step: int, temperature: float = 1.0) -> dict[str, float]:
        """Make version `step` out of version `step - 1`.

        Args:
            groups: those of the step.
            step: numbers the version to make; the ages of samples count from it.
            temperature: divisor of the logits under which the completions were sampled.

        Returns:
            The metrics; means over the trained tokens where not said otherwise:
            ``loss`` (over `num_tokens`), ``entropy`` (nats), ``clip_fraction``, ``approx_kl`` and ``ratio_max`` against
            the sampling policy, ``kl_reference`` (with a KL term); ``mismatch_kl`` and ``mismatch_max`` (k3, and
            greatest absolute difference of log-probabilities) between rollout and trainer for completions sampled
            wholly by version `step - 1`, where any difference is one of computation; ``grad_norm`` before clipping,
            ``learning_rate``, ``skipped_step`` (1 when loss or gradient was not finite); over completions:
            ``reward_mean``, ``reward_std``, ``zero_advantage_share``, ``staleness_max``, ``staleness_mean``;
            ``num_tokens``, ``num_trained_tokens``, ``num_sequences``, ``num_microbatches``, ``padding_waste``.
            What no token can tell is left out, such as ``mismatch_kl`` when every completion is stale.

        Raises:
            ConfigError: no tokens, a reward or log-probability not finite, a sequence too long, `temperature` <= 0.
        """
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}: training needs samples drawn at a temperature above 0")
        grpo = self._settings.grpo
        skip_zero = grpo.skip_zero_advantage and self._reference is None
        credited = credit(groups, step=step, scale=grpo.advantage_scale, skip_zero=skip_zero)
        check_lengths(credited.prompted, self._longest)
        batch = lay_out(
            credited.prompted,
            self._settings.tokens_per_microbatch,
            share_prompts=self._settings.share_prompts,
            pair_cost=self._pair_cost,
        )
        self._descent.clear()
        parts = []
        for microbatch in batch.plan:
            inputs = to_tensors(batch, microbatch, credited.token_ids, self._model.dtype, self._model.device)
            parts.append(self._accumulate(inputs, credited, temperature))
        measured = _summary(parts, credited, with_reference=self._reference is not None)
        applied = self._descent.apply(measured["loss"])
        return {
            **credited.metrics,
            **measured,
            "grad_norm": applied.grad_norm,
            "learning_rate": applied.learning_rate,
            "skipped_step": float(applied.skipped),
            "num_microbatches": float(len(batch.plan)),
            "padding_waste": batch.padding_waste,
        }

    def _accumulate(self, inputs: Inputs, credited: Credited, temperature: float) -> tuple[Tensor, Tensor]:
        """Add one microbatch's gradient; return its sums (of `_MEANS`) and maxima (of `_MAXIMA`)."""
        grpo = self._settings.grpo
        old_logprobs, advantages, fresh = (
            torch.from_numpy(values[inputs.tokens]).to(inputs.targets.device)
            for values in (credited.old_logprobs, credited.advantages, credited.fresh)
        )
        logprobs, entropy = token_logprobs(trained_logits(self._model, inputs), inputs.targets, temperature)
        terms = grpo_loss(logprobs, old_logprobs, advantages, clip_low=grpo.clip_low, clip_high=grpo.clip_high)
        losses, kl = terms.loss, torch.zeros_like(entropy)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(trained_logits(self._reference, inputs), inputs.targets, temperature)
            kl = kl_k3(logprobs, reference)
            losses = losses + grpo.kl_coefficient * kl
        torch.autograd.backward(token_mean(losses, credited.num_tokens))
        with torch.no_grad():
            means = (entropy, terms.clipped.float(), terms.approx_kl, kl, terms.approx_kl * fresh, losses)
            differences = (logprobs - old_logprobs).abs() * fresh
            return (
                torch.stack(means).sum(dim=-1),
                torch.stack((terms.ratio, differences)).amax(dim=-1),
            )


def _summary(parts: list[tuple[Tensor, Tensor]], credited: Credited, *, with_reference: bool) -> dict[str, float]:
    """Read the metrics of all microbatches at once: reading each would make the device wait each time."""
    if not parts:
        return {"loss": 0.0}
    sums = dict(zip(_MEANS, torch.stack([part[0] for part in parts]).sum(dim=0).tolist(), strict=True))
    maxima = dict(zip(_MAXIMA, torch.stack([part[1] for part in parts]).amax(dim=0).tolist(), strict=True))
    num_trained, num_fresh = len(credited.token_ids), float(credited.fresh.sum())
    metrics = {name: sums[name] / num_trained for name in ("entropy", "clip_fraction", "approx_kl")}
    metrics["loss"] = sums["loss"] / credited.num_tokens
    metrics["ratio_max"] = maxima["ratio_max"]
    if with_reference:
        metrics["kl_reference"] = sums["kl_reference"] / num_trained
    if num_fresh:
        metrics["mismatch_kl"] = sums["mismatch_kl"] / num_fresh
        metrics["mismatch_max"] = maxima["mismatch_max"]
    return metrics
