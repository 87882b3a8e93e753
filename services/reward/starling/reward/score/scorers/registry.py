"""Scorers by name.

A scorer is a function of four positional arguments: the completion's text, the prompt's reference answer, the
prompt's text and the prompt's metadata. It returns a finite number, greater for better. When it cannot judge it
raises: the trajectory then has no reward. One that has a parameter called `num_tokens`, `status` or `reward` after the
four is told by that name how many tokens were sampled, whether the length limit ended them (`"truncated"`) or not
(`"ok"`), and what the environment gave for it (None where none judged): text alone does not say. This module imports
nothing heavy; what a scorer needs is imported by `resolve`, in the worker processes that use it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path

Scorer = Callable[..., float]
Key = Literal["completion", "reference", "prompt", "metadata", "num_tokens", "reward"]

FACTS: Final = ("num_tokens", "status", "reward")
"""What a scorer may ask to be told of a completion, by the names of fields of `CompletionText`."""

GYM_PREFIX: Final = "reasoning_gym:"
_NUM_POSITIONAL: Final = 4


@dataclass(frozen=True, slots=True)
class ScorerDeclaration:
    """A scorer as the service knows it before anything of it is imported."""

    place: str
    """``module:maker``; the maker takes the scorer's options by name and returns the scorer."""
    keys: tuple[Key, ...]
    """What it reads of a trajectory."""
    media: Literal["text"] = "text"
    """The form in which it reads completions."""
    scope: Literal["trajectory", "group"] = "trajectory"
    """Whether it judges each trajectory by itself, or a group together."""


_HERE: Final = "starling.reward.score.scorers"
BUILT_IN: Final[dict[str, ScorerDeclaration]] = {
    "exact_match": ScorerDeclaration(f"{_HERE}.matching:make_exact_match", ("completion", "reference")),
    "prefix_match": ScorerDeclaration(f"{_HERE}.matching:make_prefix_match", ("completion", "reference")),
    "format": ScorerDeclaration(f"{_HERE}.matching:make_format", ("completion",)),
    "gsm8k": ScorerDeclaration(f"{_HERE}.gsm8k:make_gsm8k", ("completion", "reference")),
    "math": ScorerDeclaration(f"{_HERE}.mathematics:make_math", ("completion", "reference")),
    "environment": ScorerDeclaration(f"{_HERE}.environment:make_environment", ("reward",)),
    "overlong": ScorerDeclaration(f"{_HERE}.overlong:make_overlong", ("num_tokens",)),
}
GYM: Final = ScorerDeclaration(f"{_HERE}.gym:make_gym", ("completion", "reference", "prompt", "metadata"))


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is built in or has the form of a user's scorer; imports nothing."""
    if name in BUILT_IN or is_import_path(name):
        return
    raise ConfigError(
        f"There is no scorer {name!r}: {nearest(name, [*BUILT_IN, GYM_PREFIX + '<task>'])}; a function of yours "
        "is named `module:function` or `path/to/file.py:function`."
    )


def resolve_scorer(name: str, options: dict[str, Any]) -> Scorer:
    """Import what scorer `name` needs and return it, ready to call. ConfigError when that is impossible."""
    check_name(name)
    if name not in BUILT_IN and not name.startswith(GYM_PREFIX):
        scorer = import_scorer(name)
        check_arguments(name, scorer, ("completion", "reference", "prompt_text", {}), options, facts_wanted(scorer))
        return partial(scorer, **options) if options else scorer
    declaration = GYM if name.startswith(GYM_PREFIX) else BUILT_IN[name]
    subject = (name.removeprefix(GYM_PREFIX),) if name.startswith(GYM_PREFIX) else ()
    module, _, maker = declaration.place.partition(":")
    make: Callable[..., Scorer] = getattr(importlib.import_module(module), maker)
    check_arguments(name, make, subject, options)
    return make(*subject, **options)


def facts_wanted(scorer: Scorer) -> tuple[str, ...]:
    """Return which of `FACTS` are parameters of `scorer` after the four positional ones."""
    try:
        parameters = list(inspect.signature(scorer).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have none
        return ()
    ordinary = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:_NUM_POSITIONAL]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in ordinary]
    return tuple(fact for fact in FACTS if fact in named)


def check_arguments(
    name: str,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    options: dict[str, Any],
    facts: tuple[str, ...] = (),
) -> None:
    """Raise ConfigError when `function` cannot be called with these arguments and `facts`; calls nothing."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    parameters = signature.parameters.values()
    accepted = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in facts
    ]
    for fact in facts:
        if fact in options:
            raise ConfigError(f"Scorer {name!r} is told {fact!r} of each completion: give its option another name.")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in accepted:
                known = ", ".join(accepted[len(positional) :]) or "none"
                raise ConfigError(f"Scorer {name!r} has no option {option!r}; its options are: {known}.")
    try:
        signature.bind(*positional, **options, **dict.fromkeys(facts))
    except TypeError as error:
        raise ConfigError(
            f"Scorer {name!r} must take (completion, reference, prompt_text, metadata) and its options by name, "
            f"here {sorted(options)}; it takes {signature}: {error}."
        ) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause that names what `name` was probably meant to be, or else everything known."""
    import difflib  # costs as much as a scorer's whole start, and only a mistake needs it

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}" if close else f"known are {', '.join(names)}"


# JOINED from starling.reward.score.imported: The user's own scorers: `module:function` or
# `path/to/file.py:function`.


def import_scorer(name: str) -> Scorer:
    """Import the function that `name` names. ConfigError when it cannot be had, or is none that can score."""
    found = import_object(name, "Scorer")
    if not callable(found):
        raise ConfigError(f"Scorer {name!r} is a {type(found).__name__}, not a function.")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigError(f"Scorer {name!r} must be a plain function that returns a number, not async or a generator.")
    scorer: Scorer = found
    return scorer
