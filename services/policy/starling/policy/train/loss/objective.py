"""What a step's settings ask for: the functions of its algorithm, with their options bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from starling.algo.algorithm import Aggregate, Correction, Old, defaults, find, functions
from starling.algo.loss.terms import LossTerms, Tokens
from starling.common.errors import ConfigError
from starling.policy.settings.algorithm import AlgorithmSettings

Advantage = Callable[[Sequence[Sequence[float]]], list[list[float]]]
"""The rewards of each group of a step become the advantages of its completions."""

_OPTIONS: Final = ("clip_low", "clip_high", "dual_clip", "max_ratio", "advantage_scale")
"""Settings that are arguments of a loss or an advantage; unset, they are as the algorithm has them."""
_NAMES: Final = {"advantage_scale": "scale"}
"""Those whose argument has another name."""


@dataclass(frozen=True, slots=True)
class Objective:
    """A resolved algorithm."""

    advantage: Advantage
    loss: Callable[[Tokens], LossTerms]
    aggregate: Aggregate
    aggregate_tokens: int
    old: Old
    corrections: tuple[Correction, ...]
    mask_truncated: bool
    in_force: Mapping[str, Any]
    """Options of the loss and the advantage, by name of their arguments, with the functions' own defaults."""


def objective_of(settings: AlgorithmSettings) -> Objective:
    """Resolve the algorithm that `settings` name, with what they want otherwise.

    Raises:
        ConfigError: there is no such algorithm, an option that it does not take, or a correction without an effect.
    """
    algorithm = find(settings.name)
    given = {_NAMES.get(name, name): getattr(settings, name) for name in _OPTIONS}
    options = {name: value for name, value in given.items() if value is not None} | settings.options
    try:
        loss, advantage = functions(algorithm, options)
    except ConfigError as error:
        raise ConfigError(f"policy.algorithm, {settings.name}: {error}") from error
    corrections = algorithm.corrections
    if settings.corrections is not None:
        corrections = tuple(one.to_algo() for one in settings.corrections)
    old = settings.old or algorithm.old
    if old == "rollout" and any(one.kind != "sequence_mask" for one in corrections):
        raise ConfigError(
            f"policy.algorithm, {settings.name}: corrections have no effect with old = 'rollout', where the loss's own "
            "ratio begins at the rollout; set old = 'proximal', or remove them"
        )
    return Objective(
        advantage=advantage,
        loss=loss,
        aggregate=settings.aggregate or algorithm.aggregate,
        aggregate_tokens=settings.aggregate_tokens,
        old=old,
        corrections=corrections,
        mask_truncated=algorithm.mask_truncated if settings.mask_truncated is None else settings.mask_truncated,
        in_force={**defaults(loss), **defaults(advantage), **algorithm.options, **options},
    )


def check_objective(settings: AlgorithmSettings) -> None:
    """Resolve the algorithm and try it on two tokens, so that no step has to find out what is wrong with it.

    Raises:
        ConfigError: as `objective_of`; or an option has a value that its function does not take, or the loss is not
            one number per token.
    """
    objective = objective_of(settings)
    zeros, sequence = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    tokens = Tokens(zeros.clone().requires_grad_(), zeros, zeros, torch.tensor([1.0, -1.0]), sequence, 1)
    try:
        objective.advantage([[0.0, 1.0]])
        loss = objective.loss(tokens).loss
    except Exception as error:  # A user's function raises anything.
        why = error if isinstance(error, ValueError) else repr(error)
        raise ConfigError(f"policy.algorithm, {settings.name}: {why}") from error
    if loss.shape != (2,):
        raise ConfigError(
            f"policy.algorithm, {settings.name}: the loss of 2 tokens has the shape {list(loss.shape)}; "
            "return one number for each token, the step adds them up"
        )
