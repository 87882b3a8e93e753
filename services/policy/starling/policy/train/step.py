"""Stops 6 to 8 of the walk: the groups of a step become a new weight version, by GRPO.

rewards -> advantages -> microbatches -> forward and backward of each -> one optimizer step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from starling.algo import packing
from starling.algo.advantage import group_relative
from starling.algo.loss.aggregate import token_mean
from starling.algo.loss.grpo import grpo_loss
from starling.algo.loss.kl import kl_k3
from starling.algo.staleness import staleness
from starling.common.errors import ConfigError
from starling.policy.settings import PolicySettings
from starling.policy.train.batch import Batch, Prompted, lay_out, per_token, to_tensors
from starling.policy.train.forward import token_logprobs, trained_logits
from starling.policy.train.groups import FloatArray, Group, IntArray
from starling.policy.train.model import frozen_copy
from starling.policy.train.optimizer import Descent

if TYPE_CHECKING:
    from transformers import PreTrainedModel
else:
    PreTrainedModel = torch.nn.Module

_SUMS = ("loss", "entropy", "clip_fraction", "approx_kl", "kl_reference", "mismatch_kl")
_MAXIMA = ("ratio_max", "mismatch_max")


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """The trained tokens of a step, T of them, and how they are laid out."""

    num_tokens: int
    """Tokens of all completions: the denominator of the mean, trained or skipped."""
    num_fresh: int
    """Tokens among the T whose whole completion was sampled by the version that is now being trained."""
    token_ids: IntArray
    old_logprobs: FloatArray
    advantages: FloatArray
    fresh: FloatArray
    batch: Batch


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
        self._descent = Descent(model, settings.optimizer, total_steps)
        self._reference = None
        if settings.grpo.kl_coefficient:
            self._reference = reference if reference is not None else frozen_copy(model)

    def step(self, groups: Sequence[Group], *, step: int, temperature: float = 1.0) -> dict[str, float]:
        """Make version `step` out of version `step - 1`.

        Args:
            groups: those of the step, in any order of prompts.
            step: numbers the version to make; sample ages count from it.
            temperature: divisor of the logits under which the completions were sampled.

        Returns:
            The metrics, means over tokens where not said otherwise:
            ``loss`` (sum over the trained tokens by `num_tokens`), ``entropy`` (nats), ``clip_fraction``, ``approx_kl``
            and ``ratio_max`` against the sampling policy, ``kl_reference`` (with a KL term); ``mismatch_kl`` and
            ``mismatch_max`` between rollout and trainer for completions sampled wholly by version `step - 1`, where
            any difference is an error of computation; ``grad_norm`` before clipping, ``learning_rate``,
            ``skipped_step`` (1 when the gradient was not finite); ``reward_mean``, ``reward_std``,
            ``zero_advantage_share`` over completions; ``num_tokens``, ``num_trained_tokens``, ``num_sequences``,
            ``num_microbatches``, ``padding_waste``; ``staleness_max`` and ``staleness_mean`` over completions.
            What no token can tell is left out, for example `mismatch_kl` when every completion is stale.

        Raises:
            ConfigError: there are no groups or no tokens, or `temperature` is not above 0.
            ValueError: a reward is not finite.
        """
        if not temperature > 0.0:
            raise ConfigError(f"temperature is {temperature}: training needs samples drawn at a temperature above 0")
        work, metrics = self._prepare(groups, step)
        self._descent.clear()
        parts = [self._microbatch(work, microbatch, temperature) for microbatch in work.batch.plan]
        applied = self._descent.apply()
        metrics |= _summary(parts, work, with_reference=self._reference is not None)
        metrics["grad_norm"] = applied.grad_norm
        metrics["learning_rate"] = applied.learning_rate
        metrics["skipped_step"] = float(applied.skipped)
        return metrics

    def _prepare(self, groups: Sequence[Group], step: int) -> tuple[_Step, dict[str, float]]:
        """Credit the completions, choose which to compute, and lay them out."""
        settings = self._settings
        num_tokens = sum(len(group.completion_ids) for group in groups)
        if not num_tokens:
            raise ConfigError(f"step {step} has {len(groups)} groups without a token: there is nothing to train")
        skip_zero = settings.grpo.skip_zero_advantage and self._reference is None
        advantages: list[float] = []
        ages: list[int] = []
        prompted: list[Prompted] = []
        chosen = np.ones(num_tokens, dtype=bool)
        offset = kept = 0
        for group in groups:
            credit = group_relative(group.rewards, scale=settings.grpo.advantage_scale)
            spans, end = [], 0
            for length, advantage in zip(group.lengths, credit, strict=True):
                start, end = end, end + length
                ages.append(staleness(step, int(group.versions[start:end].min())) if length else 0)
                if skip_zero and advantage == 0.0:
                    chosen[offset + start : offset + end] = False
                elif length:
                    spans.append((kept, kept + length))
                    kept += length
            advantages += credit
            offset += end
            if spans:
                prompted.append(Prompted(group.prompt_ids, tuple(spans)))
        lengths = [length for group in groups for length in group.lengths]
        fresh = per_token([float(age == 0) for age in ages], lengths)[chosen]
        batch = lay_out(prompted, settings.tokens_per_microbatch, share_prompts=settings.share_prompts)
        work = _Step(
            num_tokens=num_tokens,
            num_fresh=int(fresh.sum()),
            token_ids=np.concatenate([group.completion_ids for group in groups])[chosen],
            old_logprobs=np.concatenate([group.logprobs for group in groups])[chosen],
            advantages=per_token(advantages, lengths)[chosen],
            fresh=fresh,
            batch=batch,
        )
        rewards = np.array([reward for group in groups for reward in group.rewards])
        return work, {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "zero_advantage_share": advantages.count(0.0) / len(advantages),
            "num_tokens": float(num_tokens),
            "num_trained_tokens": float(kept),
            "num_sequences": float(len(lengths)),
            "num_microbatches": float(len(batch.plan)),
            "padding_waste": batch.padding_waste,
            "staleness_max": float(max(ages)),
            "staleness_mean": sum(ages) / len(ages),
        }

    def _microbatch(self, work: _Step, microbatch: packing.Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Add one microbatch's gradient; return its sums (of `_SUMS`) and maxima (of `_MAXIMA`)."""
        grpo = self._settings.grpo
        inputs = to_tensors(work.batch, microbatch, work.token_ids, self._model.dtype)
        old_logprobs, advantages, fresh = (
            torch.from_numpy(values[inputs.tokens]) for values in (work.old_logprobs, work.advantages, work.fresh)
        )
        logits = trained_logits(self._model, inputs)
        logprobs, entropy = token_logprobs(logits, inputs.targets, temperature)
        terms = grpo_loss(logprobs, old_logprobs, advantages, clip_low=grpo.clip_low, clip_high=grpo.clip_high)
        losses, kl = terms.loss, torch.zeros(())
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = token_logprobs(trained_logits(self._reference, inputs), inputs.targets, temperature)
            kl = kl_k3(logprobs, reference)
            losses = losses + grpo.kl_coefficient * kl
        token_mean(losses, work.num_tokens).backward()
        with torch.no_grad():
            sums = (losses, entropy, terms.clipped, terms.approx_kl, kl, terms.approx_kl * fresh)
            differences = (logprobs - old_logprobs).abs() * fresh
            return (
                torch.stack([values.detach().sum(dtype=torch.float32) for values in sums]),
                torch.stack([terms.ratio.max(), differences.max()]),
            )


def _summary(parts: list[tuple[Tensor, Tensor]], work: _Step, *, with_reference: bool) -> dict[str, float]:
    """Read the metrics of all microbatches at once: reading each would make the device wait each time."""
    if not parts:
        return {"loss": 0.0}
    sums = dict(zip(_SUMS, torch.stack([part[0] for part in parts]).sum(dim=0).tolist(), strict=True))
    maxima = dict(zip(_MAXIMA, torch.stack([part[1] for part in parts]).amax(dim=0).tolist(), strict=True))
    count = len(work.token_ids)
    metrics = {name: sums[name] / count for name in ("entropy", "clip_fraction", "approx_kl")}
    metrics["loss"] = sums["loss"] / work.num_tokens
    metrics["ratio_max"] = maxima["ratio_max"]
    if with_reference:
        metrics["kl_reference"] = sums["kl_reference"] / count
    if work.num_fresh:
        metrics["mismatch_kl"] = sums["mismatch_kl"] / work.num_fresh
        metrics["mismatch_max"] = maxima["mismatch_max"]
    return metrics
