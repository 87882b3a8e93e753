"""Objective of a reinforcement-learning step: the functions of its algorithm with their options, and the token loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from starling.algo.algorithm import Aggregate, Correction, Old, defaults, find, functions, takes_scores
from starling.algo.loss.correct import correct
from starling.algo.loss.regularisers import entropy_bonus, kl_loss, positive_nll
from starling.algo.loss.terms import LossTerms, Tokens
from starling.common.errors import ConfigError
from starling.common.wire.messages import ScorerScores
from starling.policy.settings.algorithm import AlgorithmSettings
from starling.policy.train.metrics.tokens import TokenMetrics

Advantage = Callable[..., list[list[float]]]
"""From the rewards of each group of a step, and the scores of each if it takes them, to the advantages of its
completions."""

_OPTIONS: Final = ("clip_low", "clip_high", "dual_clip", "max_ratio", "scale")
"""Arguments that are settings, of a loss or an advantage function; unset, the algorithm's own value applies."""
SETTINGS: Final = {"scale": "advantage_scale"}
"""Settings whose name differs from that of the argument, by argument."""
_EXAMPLES: Final = ((ScorerScores(label="example", weight=1.0, values=(0.0, 1.0)),),)
"""Scores of one group of two completions."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A resolved algorithm."""

    advantage: Advantage
    takes_scores: bool
    """Whether `advantage` takes the scores of each scorer, too."""
    loss: Callable[[Tokens], LossTerms]
    aggregate: Aggregate
    aggregate_tokens: int
    old: Old
    corrections: tuple[Correction, ...]
    mask_truncated: bool
    in_force: Mapping[str, Any]
    """Options of the loss and the advantage function by argument name, the functions' own defaults included."""


def objective_of(settings: AlgorithmSettings) -> Objective:
    """Resolve the algorithm of `settings`, with the options that they override.

    Raises:
        ConfigError: the algorithm is unknown, does not take an option, or a correction has no effect.
    """
    algorithm = find(settings.name)
    values = {name: getattr(settings, SETTINGS.get(name, name)) for name in _OPTIONS}
    options = {name: value for name, value in values.items() if value is not None} | settings.options
    names = {argument: name for argument, name in SETTINGS.items() if argument not in settings.options}
    try:
        loss, advantage = functions(algorithm, options, settings=names)
    except ConfigError as error:
        raise ConfigError(f"policy.algorithm, {settings.name}: {error}") from error
    corrections = algorithm.corrections
    if settings.corrections is not None:
        corrections = tuple(one.to_algo() for one in settings.corrections)
    old = settings.old or algorithm.old
    if old == "rollout" and any(one.kind != "sequence_mask" for one in corrections):
        raise ConfigError(
            f"policy.algorithm, {settings.name}: corrections have no effect with old = 'rollout', where the loss's own "
            "ratio starts at the rollout; set old = 'proximal', or remove them"
        )
    return Objective(
        advantage=advantage,
        takes_scores=takes_scores(advantage),
        loss=loss,
        aggregate=settings.aggregate or algorithm.aggregate,
        aggregate_tokens=settings.aggregate_tokens,
        old=old,
        corrections=corrections,
        mask_truncated=algorithm.mask_truncated if settings.mask_truncated is None else settings.mask_truncated,
        in_force={**defaults(loss), **defaults(advantage), **algorithm.options, **options},
    )


def check_objective(settings: AlgorithmSettings) -> None:
    """Resolve the algorithm and try it on two tokens, so that mistakes surface before the first step.

    Raises:
        ConfigError: as `objective_of`; or an option has a value that its function refuses, or the loss is not one
            number per token.
    """
    objective = objective_of(settings)
    zeros, sequence = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(zeros.clone().requires_grad_(), zeros, zeros, torch.tensor([1.0, -1.0]), sequence, 1)
    try:
        objective.advantage([[0.0, 1.0]], *([_EXAMPLES] if objective.takes_scores else []))
        loss = objective.loss(tokens).loss
    except Exception as error:  # A user's function raises anything.
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ConfigError(f"policy.algorithm, {settings.name}: {reason}") from error
    if loss.shape != (2,):
        raise ConfigError(
            f"policy.algorithm, {settings.name}: the loss of 2 tokens has the shape {list(loss.shape)}; "
            "return one number for each token, the step adds them up"
        )


def token_losses(
    tokens: Tokens,
    entropy: Tensor | None,
    reference_logprobs: Tensor | None,
    algorithm: AlgorithmSettings,
    objective: Objective,
    metrics: TokenMetrics,
) -> Tensor:
    """Return the loss of each token, [N]: the algorithm's, corrected, plus the regularisers of the settings.

    Args:
        tokens: of one microbatch.
        entropy: of each token's distribution, [N]; None for steps of trajectories, whose entropy is constant.
        reference_logprobs: under the reference model, [N]; None without a KL term.
        algorithm: coefficients of the regularisers.
        objective: loss and corrections.
        metrics: receives the metrics of every term.
    """
    terms = _algorithm_terms(tokens, objective)
    factor, correction_metrics = correct(tokens, objective.corrections)
    metrics.add(terms.metrics | correction_metrics)
    if entropy is not None:
        metrics.add({"entropy": entropy})
    losses = terms.loss * factor if objective.corrections else terms.loss
    regularisers = []
    if reference_logprobs is not None:
        kl = kl_loss(tokens, reference_logprobs, kind=algorithm.kl_estimator)
        regularisers.append((algorithm.kl_coefficient, kl))
    if algorithm.entropy_coefficient:
        assert entropy is not None, "it was checked"
        regularisers.append((algorithm.entropy_coefficient, entropy_bonus(entropy)))
    if algorithm.positive_nll_coefficient:
        regularisers.append((algorithm.positive_nll_coefficient, positive_nll(tokens)))
    for coefficient, term in regularisers:
        losses = losses + coefficient * term.loss
        metrics.add({name: value for name, value in term.metrics.items() if name != "entropy"})
    return losses


def _algorithm_terms(tokens: Tokens, objective: Objective) -> LossTerms:
    """Call the loss, which may be the user's own, and check its result: a mean would silently count N times."""
    try:
        terms = objective.loss(tokens)
        shapes = {name: tuple(values.shape) for name, values in {"loss": terms.loss, **terms.metrics}.items()}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # A user's function raises anything.
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ConfigError(f"the loss function of policy.algorithm failed: {reason}") from error
    for name, shape in shapes.items():
        if shape != tuple(tokens.logprobs.shape):
            raise ConfigError(
                f"the loss function of policy.algorithm gave {name!r} in the shape {list(shape)} for "
                f"{len(tokens.logprobs)} tokens: it must give one number per token"
            )
    if not terms.loss.requires_grad:
        raise ConfigError(
            "the loss of policy.algorithm does not depend on tokens.logprobs, so the step would train nothing"
        )
    return terms
