"""`starling run --from`: a new run that goes on from a state of another one, of which nothing else is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starling.cli.recipe.schema import Recipe
from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.header import StateHeader, TrainerKind, find_state

STEPS: Final = {"rl": "rl.num_steps or sft.num_steps", "sft": "sft.num_steps"}
"""The settings that say how many steps a run has, by its kind; the others learn from pairs."""


def start_from_state(recipe: Recipe, state: str) -> Recipe:
    """Return `recipe` as a run that begins at the version of `state`, and where its data ended.

    Raises:
        ConfigError: there is no such state, it is of another kind of run, or the recipe's steps do not go on where it
            ends.
    """
    found = find_state(state, recipe.policy.saving.storage_options)
    problem = _problem(recipe, found.state)
    if problem is not None:
        raise ConfigError(f"the run cannot go on from {state}: {problem}")
    url = found.url if "://" in found.url else str(Path(found.url).absolute())
    saving = recipe.policy.saving.model_copy(update={"begin_from": url, "begin_kind": _next_kind(recipe, found.state)})
    begun = {"begin_version": found.state.version, "begin_prompt": found.state.next_prompt}
    return recipe.model_copy(
        update={
            "policy": recipe.policy.model_copy(update={"saving": saving}),
            "controller": recipe.controller.model_copy(update=begun),
        }
    )


def _next_kind(recipe: Recipe, state: StateHeader) -> TrainerKind:
    """Return what the first step after `state` learns from."""
    kind = recipe.run.learns_from
    assert kind is not None, "that is a problem"
    return "sft" if kind == "rl" and state.version < recipe.plan().num_supervised_steps else kind


def _problem(recipe: Recipe, state: StateHeader) -> str | None:
    plan, trainer, kind = recipe.plan(), state.trainer, recipe.run.learns_from
    if kind is None:
        return f"a run of run.kind = {recipe.run.kind!r} trains nothing; let model.path be what `starling export` makes"
    # Reinforcement begins with supervised steps, or goes on from those of a run that made nothing else.
    goes_on_from = ("sft", "rl") if kind == "rl" else (kind,)
    if trainer is not None and trainer.kind not in goes_on_from:
        return (
            f"its last step was one of {trainer.kind}, and the recipe has run.kind = {recipe.run.kind!r}; "
            "give a state of such a run, or let model.path be what `starling export` makes of this one"
        )
    if state.version >= plan.last_step:
        steps = STEPS.get(kind, "preference.num_steps")
        return f"it is of version {state.version}, and the recipe ends with version {plan.last_step}; raise {steps}"
    if trainer is None:
        return None
    begun_at = trainer.begun_at if trainer.kind == "rl" else None
    if begun_at is not None and begun_at != plan.num_supervised_steps:
        return (
            f"its run made {begun_at} supervised steps before reinforcement, and the recipe has "
            f"sft.num_steps = {plan.num_supervised_steps}; make them equal"
        )
    if begun_at is None and state.version > plan.num_supervised_steps:
        return (
            f"it is of supervised step {state.version}, and the recipe has "
            f"sft.num_steps = {plan.num_supervised_steps}; raise that to {state.version} or more"
        )
    return None
