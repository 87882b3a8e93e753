"""Scorers by name: the built-in ones, reasoning-gym's tasks, installed plug-ins, and the user's functions and classes.

A scorer is a function of four positional arguments: the completion's text, the prompt's reference answer, the prompt's
text and the prompt's metadata. It returns a finite number, greater for better, or raises when it cannot score: the
trajectory then has no reward. A scorer with further parameters called `num_tokens`, `status` or `reward` gets, by these
names, the number of sampled tokens, whether the length limit ended them (`"truncated"`) or not (`"ok"`), and the
environment's reward (None without one). A class scores whole batches, see `batch`. This module imports nothing heavy;
`load_scorer` imports what a scorer needs, in the worker processes that use it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path
from starling.common.raised import describe_raised
from starling.common.sandbox.execution import has_executor
from starling.reward.score.scorers.batch import LoadedScorer, class_scorer, function_scorer
from starling.reward.score.scorers.reward_models import COSMOS_TYPES, REWARD_MODELS, check_reward_model

Scorer = Callable[..., float]

COMPLETION_FIELDS: Final = ("num_tokens", "status", "reward")
"""Fields of `CompletionText` that a scorer may have as parameters."""

PLUG_INS: Final = "starling.scorers"
"""Group of the entry points of installed scorers."""
REASONING_GYM_PREFIX: Final = "reasoning_gym:"
_NUM_POSITIONAL: Final = 4

_PACKAGE: Final = "starling.reward.score.scorers"
BUILT_IN: Final[dict[str, str]] = {
    "exact_match": f"{_PACKAGE}.matching:make_exact_match",
    "prefix_match": f"{_PACKAGE}.matching:make_prefix_match",
    "regex": f"{_PACKAGE}.matching:make_regex",
    "choice": f"{_PACKAGE}.matching:make_choice",
    "format": f"{_PACKAGE}.matching:make_format",
    "json_schema": f"{_PACKAGE}.schema:make_json_schema",
    "gsm8k": f"{_PACKAGE}.gsm8k:make_gsm8k",
    "math": f"{_PACKAGE}.mathematics:make_math",
    "code": f"{_PACKAGE}.code.scorer:make_code",
    "environment": f"{_PACKAGE}.environment:make_environment",
    "length": f"{_PACKAGE}.length:make_length",
    "overlong": f"{_PACKAGE}.overlong:make_overlong",
    "repetition": f"{_PACKAGE}.repetition:make_repetition",
}
"""The function that makes each built-in scorer from its options, as ``module:function``."""
_MEDIA: Final = f"{_PACKAGE}.media"
BUILT_IN_CLASSES: Final[dict[str, str]] = {
    "brightness": f"{_MEDIA}.colour:Brightness",
    "target_colour": f"{_MEDIA}.colour:TargetColour",
    "colourfulness": f"{_MEDIA}.colour:Colourfulness",
    "motion": f"{_MEDIA}.motion:Motion",
    "smoothness": f"{_MEDIA}.motion:Smoothness",
    "flicker": f"{_MEDIA}.motion:Flicker",
    "first_frame_consistency": f"{_MEDIA}.motion:FirstFrameConsistency",
    "sharpness": f"{_MEDIA}.detail:Sharpness",
    "jpeg_compressibility": f"{_MEDIA}.detail:JpegCompressibility",
    "latent_target": f"{_MEDIA}.latents:LatentTarget",
    "ocr": f"{_MEDIA}.ocr:WrittenText",
}
"""The class of each built-in scorer of pixels or latents, as ``module:class``."""
_REASONING_GYM: Final = f"{_PACKAGE}.gym:make_gym"
_RUNS_PROGRAMS: Final = "code"


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` is built in, installed, or has the form of a user's scorer; imports nothing."""
    if name in BUILT_IN or name in BUILT_IN_CLASSES or is_import_path(name) or name in (installed := plug_ins()):
        return
    if name in REWARD_MODELS or name in COSMOS_TYPES:
        check_reward_model(name)
        return
    known = nearest(name, [*BUILT_IN, *BUILT_IN_CLASSES, *REWARD_MODELS, *installed, REASONING_GYM_PREFIX + "<task>"])
    raise ConfigError(
        f"There is no scorer {name!r}: {known}; your own function or class is named `module:function` or "
        "`path/to/file.py:function`."
    )


def plug_ins() -> dict[str, str]:
    """Return the scorers of installed distributions: their names, and where each is, as ``module:attribute``."""
    from importlib.metadata import entry_points  # imported where a recipe names one: it reads all distributions

    return {one.name: one.value for one in entry_points(group=PLUG_INS)}


def load_scorer(name: str, options: dict[str, Any]) -> LoadedScorer:
    """Import scorer `name`, a function or a class, and set it up. Raises ConfigError when that is impossible."""
    check_name(name)
    if name in BUILT_IN or name.startswith(REASONING_GYM_PREFIX):
        scorer = resolve_scorer(name, options)
        return function_scorer(scorer, wanted_fields(scorer))
    found = _import(name)
    if inspect.isclass(found):
        _check_class(name, found, options)
        return class_scorer(name, _instance(name, found, options))
    scorer = _bound(name, found, options)
    return function_scorer(scorer, wanted_fields(scorer))


def check_scorer(name: str, options: dict[str, Any]) -> None:
    """Import scorer `name` and check its options, without setting it up. Raises ConfigError when it cannot be used."""
    check_name(name)
    if name in BUILT_IN or name.startswith(REASONING_GYM_PREFIX):
        resolve_scorer(name, options)
        return
    found = _import(name)
    if inspect.isclass(found):
        _check_class(name, found, options)
        if name in REWARD_MODELS and REWARD_MODELS[name].checks_early:
            found(**options)
    else:
        _bound(name, found, options)


def resolve_scorer(name: str, options: dict[str, Any]) -> Scorer:
    """Import scorer `name`, a function, and return it with its options bound. Raises ConfigError when that fails."""
    check_name(name)
    if name.startswith(REASONING_GYM_PREFIX):
        return _make(name, _REASONING_GYM, (name.removeprefix(REASONING_GYM_PREFIX),), options)
    if name in BUILT_IN:
        return _make(name, BUILT_IN[name], (), options)
    return _bound(name, _import(name), options)


def check_executor(name: str) -> None:
    """Raise ConfigError when scorer `name` runs programs of a model and this process, a worker, cannot."""
    if name == _RUNS_PROGRAMS and not has_executor():
        raise ConfigError(
            f"Scorer {name!r} runs programs that a model wrote, in the reward service's workers, and this machine "
            "offers no sandbox for them: install bubblewrap, or set reward.sandbox to 'process' to run them all the "
            "same."
        )


def wanted_fields(scorer: Scorer) -> tuple[str, ...]:
    """Return which of `COMPLETION_FIELDS` are parameters of `scorer` after the four positional ones."""
    try:
        parameters = list(inspect.signature(scorer).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have none
        return ()
    ordinary = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:_NUM_POSITIONAL]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in ordinary]
    return tuple(field for field in COMPLETION_FIELDS if field in named)


def check_arguments(
    name: str,
    function: Callable[..., Any],
    positional: tuple[Any, ...],
    options: dict[str, Any],
    fields: tuple[str, ...] = (),
) -> None:
    """Raise ConfigError when `function` cannot be called with these arguments and `fields`; does not call it."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    parameters = signature.parameters.values()
    accepted = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in fields
    ]
    for field in fields:
        if field in options:
            raise ConfigError(f"Scorer {name!r} gets {field!r} of each completion: give its option another name.")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in accepted:
                known = ", ".join(accepted[len(positional) :]) or "none"
                raise ConfigError(f"Scorer {name!r} has no option {option!r}; its options are: {known}.")
    for parameter in list(parameters)[len(positional) :]:
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if is_named and parameter.default is parameter.empty and parameter.name not in (*options, *fields):
            raise ConfigError(
                f"Scorer {name!r} needs the option {parameter.name!r}: set `options = {{ {parameter.name} = ... }}`."
            )
    try:
        signature.bind(*positional, **options, **dict.fromkeys(fields))
    except TypeError as error:
        wanted = "(completion, reference, prompt_text, metadata) and its options" if positional else "its options"
        raise ConfigError(
            f"Scorer {name!r} must take {wanted} by name, here {sorted(options)}; it takes {signature}: {error}."
        ) from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause that suggests what `name` was meant to be, or else lists what is known."""
    import difflib  # imported on a mistake only: it takes as long as the start of a scorer

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(map(repr, close))}" if close else f"known are {', '.join(names)}"


def _make(name: str, maker: str, subject: tuple[str, ...], options: dict[str, Any]) -> Scorer:
    """Call a maker of scorers, ``module:function``, with `subject` and the options."""
    module, _, function = maker.partition(":")
    make: Callable[..., Scorer] = getattr(importlib.import_module(module), function)
    check_arguments(name, make, subject, options)
    return make(*subject, **options)


def _import(name: str) -> Any:
    """Import what a user's or an installed scorer is, or a built-in class. Raises ConfigError."""
    if is_import_path(name):
        return import_object(name, "Scorer")
    if name in BUILT_IN_CLASSES:
        return import_object(BUILT_IN_CLASSES[name], "Scorer")
    installed = plug_ins()
    return import_object(installed[name] if name in installed else REWARD_MODELS[name].scorer, "Scorer")


def _bound(name: str, found: Any, options: dict[str, Any]) -> Scorer:
    """Return a user's function with its options. Raises ConfigError when it cannot be a scorer."""
    if not callable(found) or inspect.isclass(found):
        raise ConfigError(f"Scorer {name!r} is a {type(found).__name__}, not a function.")
    if inspect.iscoroutinefunction(found) or inspect.isgeneratorfunction(found):
        raise ConfigError(f"Scorer {name!r} must be a plain function that returns a number, not async or a generator.")
    scorer: Scorer = found
    check_arguments(name, scorer, ("completion", "reference", "prompt_text", {}), options, wanted_fields(scorer))
    return partial(scorer, **options) if options else scorer


def _check_class(name: str, found: type, options: dict[str, Any]) -> None:
    """Raise ConfigError when a user's class cannot be a scorer, or has not these options."""
    score = getattr(found, "score", None)
    if not callable(score) or inspect.iscoroutinefunction(score):
        raise ConfigError(f"Scorer {name!r} is a class without a plain method `score(self, batch)`.")
    check_arguments(name, found, (), options)


def _instance(name: str, found: type, options: dict[str, Any]) -> Any:
    """Return an instance of a user's class, set up. Raises ConfigError when that fails."""
    try:
        scorer = found(**options)
        setup = getattr(scorer, "setup", None)
        if setup is not None:
            setup()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise ConfigError(f"Scorer {name!r} cannot be set up: {describe_raised(error)}.") from error
    return scorer
