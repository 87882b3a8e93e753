"""Differences between Starling's algorithms and those of the same name in TRL 1.16 and verl 0.9.1, as one JSON line.

    python bench/departures.py

Both sides compute the derivative of a step's loss by the log-probability of each token, on one batch that is made here:
8 prompts with 8 completions of 16 to 400 tokens, rewards of 0 and 1 with noise, an eighth of the completions cut off.
`noise` is the standard deviation of log π - log π_old of a token, in nats: 0 on policy. Starling's side is the library;
the other side is a formula, written down from that project's code and checked against it once. For each pair:

- `relative`: norm of the difference over the norm of the other side's derivative;
- `cosine`: of the angle between them. With Adam, which divides by the gradient's size, only this part of the difference
  matters.

docs/reference/algorithms.md has these figures, and tests/unit/policy/loss/test_train_algorithms_page.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from figure import print_figure
from torch import Tensor

from starling.algo.algorithm import find, functions
from starling.algo.loss.aggregate import token_weights
from starling.algo.loss.gspo import gspo
from starling.algo.loss.ppo import ppo_clip
from starling.algo.loss.regularisers import kl_loss
from starling.algo.loss.terms import Tokens

NUM_GROUPS, GROUP_SIZE, LIMIT = 8, 8, 400
NUM_COMPLETIONS = NUM_GROUPS * GROUP_SIZE


@dataclass(frozen=True)
class Batch:
    """A step: its completions end to end, N tokens."""

    lengths: list[int]
    rewards: list[float]
    cut: list[bool]
    new: Tensor
    """Log-probabilities, float64 [N]."""
    old: Tensor
    reference: Tensor
    sequence: Tensor
    """int64 [N]: the completion of each token."""

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over each completion, [completions]."""
        return values.new_zeros(NUM_COMPLETIONS).index_add(0, self.sequence, values)

    def grouped(self) -> list[list[float]]:
        """Return the rewards by group."""
        return [self.rewards[i : i + GROUP_SIZE] for i in range(0, NUM_COMPLETIONS, GROUP_SIZE)]


def make_batch(noise: float = 0.0, reference_noise: float = 0.1) -> Batch:
    """Return the batch, with tokens that are `noise` away from the weights that sampled them."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(NUM_COMPLETIONS, generator=generator)
    lengths = (16 * (LIMIT / 16) ** drawn).int().tolist()
    longest = sorted(range(NUM_COMPLETIONS), key=lambda i: -lengths[i])[: NUM_COMPLETIONS // 8]
    cut = [i in longest for i in range(NUM_COMPLETIONS)]
    lengths = [LIMIT if is_cut else length for length, is_cut in zip(lengths, cut, strict=True)]
    share = torch.linspace(0.1, 0.9, NUM_GROUPS).repeat_interleave(GROUP_SIZE)
    rewards = (torch.rand(NUM_COMPLETIONS, generator=generator) < share).double()
    rewards += 0.05 * torch.randn(NUM_COMPLETIONS, generator=generator)
    new = -torch.rand(sum(lengths), generator=generator).double() * 2.0
    near, far = (torch.randn(len(new), generator=generator).double() for _ in range(2))
    sequence = torch.repeat_interleave(torch.arange(NUM_COMPLETIONS), torch.tensor(lengths))
    old, reference = new - noise * near, new - reference_noise * far
    return Batch(lengths, rewards.tolist(), cut, new, old, reference, sequence)


# --- Starling


def ours(name: str, batch: Batch, *, mask_truncated: bool = False, **options: Any) -> Tensor:
    """Return the derivative of Starling's loss, [N]."""
    algorithm = find(name)
    loss, advantage = functions(algorithm, options)
    advantages = torch.tensor([value for group in advantage(batch.grouped()) for value in group])
    logprobs = batch.new.float().requires_grad_()
    old = batch.old.float()
    tokens = Tokens(logprobs, old, old, advantages[batch.sequence], batch.sequence, NUM_COMPLETIONS)
    weights = weights_of(batch, algorithm.aggregate, mask_truncated=mask_truncated)
    (found,) = torch.autograd.grad((loss(tokens).loss * weights).sum(), logprobs)
    return found.double()


def weights_of(batch: Batch, aggregate: Any, *, mask_truncated: bool = False) -> Tensor:
    """Return Starling's weight of each token, [N]."""
    dropped = [mask_truncated and is_cut for is_cut in batch.cut]
    lengths = [0 if drop else length for length, drop in zip(batch.lengths, dropped, strict=True)]
    num = NUM_COMPLETIONS - sum(dropped)
    shares = token_weights(lengths, aggregate, num_tokens=sum(lengths), num_sequences=num, constant=LIMIT)
    shares = shares * [not drop for drop in dropped]
    return torch.from_numpy(shares).float()[batch.sequence]


# --- formulas of the others

Loss = Callable[[Batch, Tensor, Tensor], Tensor]
"""From a batch, its log-probabilities [N] and advantages [N] to the loss of a step."""


def theirs(batch: Batch, loss: Loss, advantages: Tensor) -> Tensor:
    """Return the derivative of `loss`, [N]; `advantages` are those of completions or of tokens."""
    logprobs = batch.new.clone().requires_grad_()
    by_token = advantages if len(advantages) == len(batch.new) else advantages[batch.sequence]
    (found,) = torch.autograd.grad(loss(batch, logprobs, by_token), logprobs)
    return found


def clipped(ratio: Tensor, advantages: Tensor, low: float = 0.2, high: float = 0.2, dual: float = math.inf) -> Tensor:
    """Return PPO's loss, at most `dual` times the advantage where that is negative."""
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return torch.where(advantages < 0, torch.minimum(loss, -dual * advantages), loss) if dual < math.inf else loss


def token_mean(low: float = 0.2, high: float = 0.2, dual: float = math.inf) -> Loss:
    """Return PPO's loss averaged over tokens; verl's default, with `dual` 3."""
    return lambda batch, new, a: clipped((new - batch.old).exp(), a, low, high, dual).mean()


def completion_mean(keep: Callable[[Batch], Tensor] = lambda batch: torch.ones(NUM_COMPLETIONS)) -> Loss:
    """Return PPO's loss averaged over each completion, then over all, also those that `keep` sets to 0 (TRL's grpo)."""

    def loss(batch: Batch, new: Tensor, a: Tensor) -> Tensor:
        own = batch.sums(clipped((new - batch.old).exp(), a)) / torch.tensor(batch.lengths)
        return (own * keep(batch)).mean()

    return loss


def by_completion(keep: Callable[[Batch], Tensor] = lambda batch: torch.ones(NUM_COMPLETIONS)) -> Loss:
    """Return the loss of TRL's `RLOOTrainer`: one ratio for each completion."""

    def loss(batch: Batch, new: Tensor, a: Tensor) -> Tensor:
        first = torch.tensor([0, *batch.lengths[:-1]]).cumsum(0)
        return (clipped(batch.sums(new - batch.old).exp(), a[first]) * keep(batch)).mean()

    return loss


def geometric_token_mean(batch: Batch, new: Tensor, a: Tensor) -> Tensor:
    """Return GSPO's loss with its published bounds, averaged over tokens (verl's default)."""
    means = (batch.sums((new - batch.old).detach()) / torch.tensor(batch.lengths))[batch.sequence]
    return clipped((means + new - new.detach()).exp(), a, 3e-4, 4e-4).mean()


def cispo_token_mean(low: float, high: float) -> Loss:
    """Return CISPO's loss averaged over tokens, with bounds on the weight."""
    return lambda batch, new, a: (-(new.detach() - batch.old).exp().clamp(low, high) * a * new).mean()


def uncut(batch: Batch) -> Tensor:
    """Return 1 for completions that were not cut off, else 0."""
    return 1.0 - torch.tensor(batch.cut, dtype=torch.float64)


def rewards_of(batch: Batch) -> Tensor:
    """Return the rewards, [groups, completions]."""
    return torch.tensor(batch.rewards, dtype=torch.float64).view(NUM_GROUPS, GROUP_SIZE)


def leave_one_out(rewards: Tensor) -> Tensor:
    """Return RLOO's advantages, [completions]."""
    return ((rewards - rewards.mean(1, keepdim=True)) * GROUP_SIZE / (GROUP_SIZE - 1)).flatten()


def group_normalised(batch: Batch, epsilon: float = 1e-4) -> Tensor:
    """Return GRPO's advantages, [completions]."""
    rewards = rewards_of(batch)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + epsilon)).flatten()


def by_batch_deviation(batch: Batch) -> Tensor:
    """Return the advantages of TRL's `scale_rewards = "batch"`, [completions]."""
    rewards = rewards_of(batch)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)).flatten()


def whitened_by_token(batch: Batch, *, centred: bool) -> Tensor:
    """Return the advantages of verl's REINFORCE++, [N]: long completions count more in mean and deviation."""
    rewards = rewards_of(batch)
    values = (rewards - rewards.mean(1, keepdim=True) if centred else rewards).flatten()[batch.sequence]
    return (values - values.mean()) / (values.var() + 1e-8).sqrt()


def penalised(batch: Batch, coefficient: float = 0.05) -> Tensor:
    """Return RLOO's advantages of rewards less the divergence of each completion (TRL's default)."""
    divergence = batch.sums(batch.old - batch.reference).view(NUM_GROUPS, GROUP_SIZE)
    return leave_one_out(rewards_of(batch) - coefficient * divergence)


def kl_derivative(batch: Batch, *, bounded: bool) -> Tensor:
    """Return the derivative of k3, [N]; `bounded`: 0 where the value is above 10 (verl)."""
    if bounded:
        difference = batch.reference - batch.new
        return torch.where(difference.expm1() - difference > 10.0, 0.0, 1.0 - difference.exp())
    logprobs = batch.new.float().requires_grad_()
    old, zeros = batch.old.float(), torch.zeros(len(batch.new))
    tokens = Tokens(logprobs, old, old, zeros, batch.sequence, NUM_COMPLETIONS)
    (found,) = torch.autograd.grad(kl_loss(tokens, batch.reference.float()).loss.sum(), logprobs)
    return found.double()


# --- comparisons


def compare(mine: Tensor, other: Tensor) -> dict[str, float]:
    """Return the difference of two derivatives."""
    relative = float((mine - other).norm() / other.norm())
    cosine = float(torch.dot(mine, other) / (mine.norm() * other.norm()))
    # Starling computes losses in single precision.
    return {"relative": 0.0 if relative < 1e-5 else float(f"{relative:.2g}"), "cosine": round(cosine, 3)}


def departures() -> dict[str, dict[str, float]]:
    """Return `relative` and `cosine` of each comparison."""
    exact, near, stale = make_batch(), make_batch(0.02), make_batch(0.6)
    far = make_batch(reference_noise=1.5)
    even = torch.full_like(exact.new, 1 / len(exact.new))
    rloo, grpo = leave_one_out(rewards_of(exact)), group_normalised(exact)
    verl_grpo = group_normalised(exact, 1e-6)
    pairs: dict[str, tuple[Tensor, Tensor]] = {
        "grpo, TRL `loss_type = grpo`": (ours("grpo", near), theirs(near, completion_mean(), grpo)),
        "grpo, TRL default (`dapo`)": (ours("grpo", near), theirs(near, token_mean(), grpo)),
        "grpo, verl": (ours("grpo", near), theirs(near, token_mean(dual=3.0), verl_grpo)),
        "grpo with `advantage_scale = batch`, TRL": (
            ours("grpo", near, scale="batch"),
            theirs(near, completion_mean(), by_batch_deviation(near)),
        ),
        "dapo, verl": (ours("dapo", near), theirs(near, token_mean(0.2, 0.28, 3.0), verl_grpo)),
        "dapo, verl, noise 0.6": (ours("dapo", stale), theirs(stale, token_mean(0.2, 0.28, 3.0), verl_grpo)),
        "gspo, verl": (ours("gspo", near), theirs(near, geometric_token_mean, verl_grpo)),
        "cispo, verl, noise 0.6": (ours("cispo", stale), theirs(stale, cispo_token_mean(0.8, 1.2), verl_grpo)),
        "cispo, TRL with `epsilon_high = 5`, noise 0.6": (
            ours("cispo", stale),
            theirs(stale, cispo_token_mean(0.0, 5.0), grpo),
        ),
        "rloo, TRL with `beta = 0`, noise 0": (ours("rloo", exact), theirs(exact, by_completion(), rloo)),
        "rloo, TRL with `beta = 0`": (ours("rloo", near), theirs(near, by_completion(), rloo)),
        "rloo_sequence, TRL with `beta = 0`": (ours("rloo_sequence", near), theirs(near, by_completion(), rloo)),
        "rloo_sequence, TRL": (ours("rloo_sequence", near), theirs(near, by_completion(), penalised(near))),
        "rloo, verl": (ours("rloo", near), theirs(near, token_mean(dual=3.0), rloo)),
        "reinforce_pp, verl": (
            ours("reinforce_pp", near),
            theirs(near, token_mean(dual=3.0), whitened_by_token(near, centred=False)),
        ),
        "reinforce_pp_baseline, verl": (
            ours("reinforce_pp_baseline", near),
            theirs(near, token_mean(dual=3.0), whitened_by_token(near, centred=True)),
        ),
        "grpo with `mask_truncated`, TRL `loss_type = grpo`": (
            ours("grpo", near, mask_truncated=True),
            theirs(near, completion_mean(uncut), grpo),
        ),
        "rloo_sequence with `mask_truncated`, TRL with `beta = 0`": (
            ours("rloo_sequence", near, mask_truncated=True),
            theirs(near, by_completion(uncut), rloo),
        ),
        "entropy term of grpo, TRL": (weights_of(exact, "sequence_mean_token_mean").double(), even),
        "entropy term of dapo, TRL": (weights_of(exact, "token_mean").double(), even),
        "entropy term of dr_grpo, TRL": (weights_of(exact, "constant").double(), even),
        "k3, verl": (kl_derivative(exact, bounded=False), kl_derivative(exact, bounded=True)),
        "k3, verl, 1.5 nats from the reference": (
            kl_derivative(far, bounded=False),
            kl_derivative(far, bounded=True),
        ),
    }
    return {name: compare(mine, other) for name, (mine, other) in pairs.items()}


def largest_log_ratios() -> dict[str, int]:
    """Return the largest log-ratio, in whole nats, at which a token with a negative advantage has a gradient."""

    def slope(loss: Any, nats: int) -> float:
        new = torch.tensor([0.0], requires_grad=True)
        old, sequence = torch.tensor([-float(nats)]), torch.zeros(1, dtype=torch.int64)
        (found,) = torch.autograd.grad(loss(Tokens(new, old, old, -torch.ones(1), sequence, 1)).loss.sum(), new)
        return float(found)

    bounds: Sequence[tuple[str, Any]] = (("ppo_clip", ppo_clip), ("gspo", gspo))
    return {name: max(nats for nats in range(1, 40) if slope(loss, nats) != 0.0) for name, loss in bounds}


def main() -> None:
    """Print all differences."""
    found = departures()
    detail = {"departures": found, "largest_log_ratio": largest_log_ratios()}
    largest = max(one["relative"] for one in found.values())
    print_figure("departures", "largest_relative", largest, unit="ratio", goal=None, better="lower", detail=detail)


if __name__ == "__main__":
    main()
