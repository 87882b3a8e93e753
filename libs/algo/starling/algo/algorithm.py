"""Algorithms of reinforcement learning: a loss, an advantage, and how a step combines them.

A user's algorithm is an `Algorithm` object in any module or file, named in the settings as ``module:attribute`` or
``path/to/file.py:attribute``, or registered by a package as an entry point of the group ``starling.algorithms``. Its
two functions are

- ``loss(tokens: Tokens, *, option=default, ...) -> LossTerms``, see `starling.algo.loss.terms`;
- ``advantage(groups: Sequence[Sequence[float]], *, option=default, ...) -> list[list[float]]``: the rewards of each
  group of a step in, the advantages out, see `starling.algo.advantage`. If it has a second parameter called
  ``scores``, it also gets of each group a sequence of `ScorerScores`: the scores of each scorer.

Their keyword-only parameters are the algorithm's options. No torch here: a loss is imported when it is first needed.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from starling.common.errors import ConfigError
from starling.common.importing import import_object

if TYPE_CHECKING:
    from starling.algo.loss.terms import LossTerms

Aggregate = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
"""The share of each token in the loss of a step: see `starling.algo.loss.aggregate.token_weights`."""

Old = Literal["rollout", "proximal"]
"""Denominator of the importance ratio: the log-probabilities of the rollout, or those of the weights at the start of
the step."""

Loss = Callable[..., "LossTerms"]
Advantage = Callable[..., list[list[float]]]

ENTRY_POINTS: Final = "starling.algorithms"
SCORES: Final = "scores"
"""Parameter of an advantage function that gets the scores of each scorer."""


@dataclass(frozen=True, slots=True)
class Correction:
    """A factor on the loss of off-policy tokens: see `starling.algo.loss.correct`.

    Raises:
        ValueError: a bound is negative or infinite, `low` is above `high`, or the kind has no lower bound.
    """

    kind: Literal["truncate", "mask", "sequence_mask"]
    level: Literal["token", "sequence", "geometric"] = "token"
    """Weight that is bounded; ``sequence_mask`` always applies to whole completions."""
    low: float = 0.0
    """Minimum weight that ``mask`` keeps."""
    high: float = 2.0
    """Maximum weight; for ``sequence_mask`` the maximum mean of ``rollout_logprobs - logprobs``, in nats."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high < math.inf:
            raise ValueError(f"low is {self.low} and high {self.high}: give 0 <= low <= high")
        if self.low and self.kind != "mask":
            raise ValueError(f"low is {self.low}: a correction of the kind {self.kind} has no lower bound, leave it 0")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A named combination of loss, advantage and their options; settings may override all but the functions."""

    loss: Loss | str
    """The function, or ``module:function``, or ``path.py:function``."""
    advantage: Advantage | str = "starling.algo.advantage:group_normalised"
    """The same."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Defaults for keyword arguments of both functions."""
    aggregate: Aggregate = "token_mean"
    old: Old = "rollout"
    mask_truncated: bool = False
    """Exclude completions that were cut off at the length limit from the loss; their rewards count in the baseline."""
    corrections: tuple[Correction, ...] = ()


class Functions(NamedTuple):
    """The two functions of an algorithm with their options bound."""

    loss: Callable[..., LossTerms]
    """Called with `Tokens`."""
    advantage: Callable[..., list[list[float]]]
    """Called with the rewards of each group, and the scores of each if it takes them: see `takes_scores`."""


_PPO: Final = "starling.algo.loss.ppo:ppo_clip"
_LEAVE_ONE_OUT: Final = "starling.algo.advantage:leave_one_out"
_BATCH: Final = "starling.algo.advantage:batch_normalised"
_DECOUPLED: Final = "starling.algo.advantage:decoupled_normalised"

ALGORITHMS: Final[Mapping[str, Algorithm]] = {
    # DeepSeekMath, arXiv:2402.03300. Its divergence penalty is a separate setting.
    "grpo": Algorithm(_PPO, aggregate="sequence_mean_token_mean"),
    # arXiv:2503.20783: neither the group's deviation nor the completion's length divides.
    "dr_grpo": Algorithm(_PPO, options={"scale": "none"}, aggregate="constant"),
    # arXiv:2503.14476. Dynamic sampling and the overlong penalty happen before the step. Truncated completions are
    # trained, because the penalty must reach them.
    "dapo": Algorithm(_PPO, options={"clip_low": 0.2, "clip_high": 0.28}),
    # arXiv:2507.18071.
    "gspo": Algorithm("starling.algo.loss.gspo:gspo", aggregate="sequence_mean_token_mean"),
    # MiniMax-M1, arXiv:2506.13585.
    "cispo": Algorithm("starling.algo.loss.cispo:cispo"),
    # arXiv:2402.14740: a completion is one action, so its log-probabilities add up.
    "rloo": Algorithm(_PPO, _LEAVE_ONE_OUT, aggregate="sequence_mean_token_sum"),
    # The same, clipped by one ratio for the whole completion, which is its only action.
    "rloo_sequence": Algorithm(
        "starling.algo.loss.sequence_clip:sequence_clip", _LEAVE_ONE_OUT, aggregate="sequence_mean_token_sum"
    ),
    # arXiv:2501.03262, without and with the mean of the group as a baseline.
    "reinforce_pp": Algorithm(_PPO, _BATCH),
    "reinforce_pp_baseline": Algorithm(_PPO, _BATCH, options={"baseline": "group"}),
    # arXiv:2601.05242: each scorer is normalised by itself.
    "gdpo": Algorithm(_PPO, _DECOUPLED, aggregate="sequence_mean_token_mean"),
    # LlamaRL, arXiv:2505.24034.
    "aipo": Algorithm("starling.algo.loss.aipo:aipo"),
    # arXiv:1912.09729.
    "dual_clip": Algorithm(_PPO, options={"dual_clip": 3.0}),
    # AReaL, arXiv:2505.24298, equation 5: the loss is exactly PPO's against the proximal policy, times the importance
    # weight of the proximal policy over the rollout; its implementation drops tokens whose weight is above a cap.
    "decoupled_ppo": Algorithm(_PPO, old="proximal", corrections=(Correction("mask", high=5.0),)),
}


def find(name: str) -> Algorithm:
    """Return the algorithm called `name`: one of `ALGORITHMS`, an entry point, or an object in a module or file.

    Raises:
        ConfigError: there is none, it cannot be imported, or it is not an `Algorithm`.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    if name in entries.names:
        found = import_object(f"{entries[name].module}:{entries[name].attr}", "the algorithm")
    elif ":" in name:
        found = import_object(name, "the algorithm")
    else:
        known = ", ".join([*ALGORITHMS, *sorted(entries.names)])
        raise ConfigError(f"there is no algorithm {name!r}: give one of {known}, or your own module:attribute")
    if not isinstance(found, Algorithm):
        raise ConfigError(f"the algorithm {name!r} has the type {type(found).__name__}: make it an Algorithm")
    return found


def bind(function: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return `function` with those of `options` bound that are among its keyword-only parameters.

    Other options are ignored here; `functions` reports those that no function has.
    """
    names = _options(function)
    return partial(function, **{key: value for key, value in options.items() if key in names})


def functions(
    algorithm: Algorithm, options: Mapping[str, Any], *, settings: Mapping[str, str] = MappingProxyType({})
) -> Functions:
    """Return the algorithm's functions with its options bound; `options` override the algorithm's own.

    An option of both functions is bound in both. Errors name an option as in `settings`, where it is among them.

    Raises:
        ConfigError: neither function has one of the options, or a function cannot be imported.
    """
    loss, advantage = _function(algorithm.loss), _function(algorithm.advantage)
    merged = {**algorithm.options, **options}
    for key in merged:
        if key not in _options(loss) and key not in _options(advantage):
            known = f"{_described(loss, settings)}, and {_described(advantage, settings)}"
            raise ConfigError(f"there is no option {settings.get(key, key)!r}: {known}")
    return Functions(bind(loss, merged), bind(advantage, merged))


def takes_scores(advantage: Callable[..., Any]) -> bool:
    """Say whether an advantage function takes the scores of each scorer besides the rewards."""
    parameter = inspect.signature(advantage).parameters.get(SCORES)
    return parameter is not None and parameter.kind is not parameter.KEYWORD_ONLY


def compares_scores(name: str) -> bool | None:
    """Say whether the advantage of an algorithm takes the scores of each scorer; None if it is not one of `ALGORITHMS`.

    Nothing is imported for the answer but the pure functions of this package.
    """
    return takes_scores(_function(ALGORITHMS[name].advantage)) if name in ALGORITHMS else None


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of `function` and their values, bound by `bind` or its own; those without one are left out."""
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is not parameter.empty
    }


def _function(given: Callable[..., Any] | str) -> Callable[..., Any]:
    found = import_object(given, "the function of an algorithm") if isinstance(given, str) else given
    if not callable(found):
        raise ConfigError(f"{given!r} has the type {type(found).__name__}: name a function")
    return found


def _options(function: Callable[..., Any]) -> Sequence[str]:
    """Return the names of the keyword-only parameters: positional ones are data."""
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def _described(function: Callable[..., Any], settings: Mapping[str, str]) -> str:
    name = getattr(function, "__name__", repr(function))
    return f"{name} takes {', '.join(settings.get(key, key) for key in _options(function)) or 'none'}"
