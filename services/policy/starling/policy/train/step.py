"""Stops 6 to 8 of the walk: the groups of a step become a new weight version, by GRPO.

rewards -> advantages -> microbatches -> forward and backward of each -> one optimizer step
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.grpo import grpo_loss
from starling.algo.loss.kl import kl_k3
from starling.common.errors import ConfigError
from starling.policy.settings import GrpoSettings, PolicySettings
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
        initial: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        """Start with a fresh optimizer.

        Args:
            model: trained in place.
            settings: what to do.
            total_steps: how many steps there will be; decides the decay of the learning rate.
            reference: the model of the KL term; by default a copy of `model` as it is before the first step, made when
                there is such a term.
            initial: loads version 0 again, for a KL term that comes when that is no longer what `model` holds.
        """
        self._model = model
        self._settings = settings
        self._longest = longest_sequence(model)
        self._pair_cost = pair_cost(model)
        self._initial = initial
        self.descent = Descent(model, settings.optimizer, total_steps)
        self.reference = reference
        self.begun_at = -1
        """The version that its first step changed: the reference's; -1 before that step."""

    def step(
        self,
        groups: Sequence[Group],
        *,
        step: int,
        temperature: float = 1.0,
        settings: PolicySettings | None = None,
    ) -> dict[str, float]:
        """Make version `step` out of version `step - 1`.

        Args:
            groups: those of the step.
            step: numbers the version to make; the ages of samples count from it.
            temperature: divisor of the logits under which the completions were sampled whose group does not say it.
            settings: of this step; by default those that the trainer was made with.

        Returns:
            The metrics; means over the trained tokens where not said otherwise:
            ``loss`` (over `num_tokens`), ``entropy`` (nats), ``clip_fraction``, ``approx_kl`` and ``ratio_max`` against
            the sampling policy, ``kl_reference`` (with a KL term); ``mismatch_kl`` and ``mismatch_max`` (k3, and
            greatest absolute difference of log-probabilities) between rollout and trainer for completions sampled
            wholly by version `step - 1`, where any difference is one of computation; ``grad_norm`` before clipping,
            ``learning_rate``, ``skipped_step`` (1 when loss or gradient was not finite); of the settings
            ``max_grad_norm``, ``clip_low``, ``clip_high`` and ``kl_coefficient``; over completions:
            ``reward_mean``, ``reward_std``, ``zero_advantage_share``, ``staleness_max``, ``staleness_mean``;
            ``num_tokens``, ``num_trained_tokens``, ``num_sequences``, ``num_microbatches``, ``padding_waste``.
            What no token can tell is left out, such as ``mismatch_kl`` when every completion is stale.

        Raises:
            ConfigError: no tokens, a reward or log-probability not finite, a sequence too long, `temperature` <= 0,
                or a KL term whose reference nobody has any more. Then the weights are as they were.
        """
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}: training needs samples drawn at a temperature above 0")
        settings = settings or self._settings
        grpo, reference = settings.grpo, self._reference_of(settings.grpo, step)
        skip_zero = grpo.skip_zero_advantage and reference is None
        credited = credit(groups, step=step, scale=grpo.advantage_scale, skip_zero=skip_zero, temperature=temperature)
        check_lengths(credited.prompted, self._longest)
        batch = lay_out(
            credited.prompted,
            settings.tokens_per_microbatch,
            share_prompts=settings.share_prompts,
            pair_cost=self._pair_cost,
        )
        self.descent.clear()
        parts = []
        for microbatch in batch.plan:
            inputs = to_tensors(batch, microbatch, credited.token_ids, self._model.dtype, self._model.device)
            parts.append(self._accumulate(inputs, credited, temperature, grpo, reference))
        measured = _summary(parts, credited, with_reference=reference is not None)
        applied = self.descent.apply(measured["loss"], settings.optimizer)
        return {
            **credited.metrics,
            **measured,
            "grad_norm": applied.grad_norm,
            "learning_rate": applied.learning_rate,
            "skipped_step": float(applied.skipped),
            "max_grad_norm": settings.optimizer.max_grad_norm,
            "clip_low": grpo.clip_low,
            "clip_high": grpo.clip_high,
            "kl_coefficient": grpo.kl_coefficient,
            "num_microbatches": float(len(batch.plan)),
            "padding_waste": batch.padding_waste,
        }

    def _reference_of(self, grpo: GrpoSettings, step: int) -> PreTrainedModel | None:
        """Return the model of the KL term: the weights that the first step found; None without such a term."""
        if not self.descent.num_steps:
            self.begun_at = step - 1
        if not grpo.kl_coefficient:
            return None
        if self.reference is None and not self.descent.num_steps:
            self.reference = frozen_copy(self._model)
        elif self.reference is None and self.begun_at == 0 and self._initial is not None:
            self.reference = self._initial()
        elif self.reference is None:
            raise ConfigError(
                f"policy.grpo.kl_coefficient = {grpo.kl_coefficient:g} needs version {self.begun_at} as its reference, "
                "with which this run began to reinforce, and nobody kept it: leave it at 0, or begin a run with it"
            )
        return self.reference

    def _accumulate(
        self,
        inputs: Inputs,
        credited: Credited,
        temperature: float,
        grpo: GrpoSettings,
        reference: PreTrainedModel | None,
    ) -> tuple[Tensor, Tensor]:
        """Add one microbatch's gradient; return its sums (of `_MEANS`) and maxima (of `_MAXIMA`)."""
        old_logprobs, advantages, fresh = (
            torch.from_numpy(values[inputs.tokens]).to(inputs.targets.device)
            for values in (credited.old_logprobs, credited.advantages, credited.fresh)
        )
        divisor: float | Tensor = temperature
        if credited.temperatures is not None:
            divisor = torch.from_numpy(credited.temperatures[inputs.tokens]).to(inputs.targets.device)
        logprobs, entropy = token_logprobs(trained_logits(self._model, inputs), inputs.targets, divisor)
        terms = grpo_loss(logprobs, old_logprobs, advantages, clip_low=grpo.clip_low, clip_high=grpo.clip_high)
        losses, kl = terms.loss, torch.zeros_like(entropy)
        if reference is not None:
            with torch.no_grad():
                known, _ = token_logprobs(trained_logits(reference, inputs), inputs.targets, divisor)
            kl = kl_k3(logprobs, known)
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
