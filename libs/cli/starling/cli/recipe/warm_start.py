"""Warm start (`starling run --from`): a new run that continues from a saved state of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from starling.cli.recipe.schema import Recipe
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind
from starling.policy.train.checkpoint.header import StateHeader, find_state

STEPS: Final = {"rl": "rl.num_steps or sft.num_steps", "sft": "sft.num_steps"}
"""Settings with the number of steps, by trainer; all others learn from pairs."""


def start_from_state(recipe: Recipe, state: str) -> Recipe:
    """Return `recipe` as a run that begins at the version of `state` and at the next prompt of its data.

    Raises:
        ConfigError: there is no such state, it belongs to another kind of run, or the recipe has no steps after it.
    """
    found = find_state(state, recipe.policy.saving.storage_options)
    problem = _problem(recipe, found.state)
    if problem is not None:
        raise ConfigError(f"the run cannot continue from {state}: {problem}")
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
    """Return the kind of the first step after `state`."""
    trainer = recipe.kind.trainer
    assert trainer is not None, "_problem excludes it"
    return "sft" if trainer == "rl" and state.version < recipe.plan().num_supervised_steps else trainer


def _problem(recipe: Recipe, state: StateHeader) -> str | None:
    plan, trainer, kind = recipe.plan(), state.trainer, recipe.kind.trainer
    if kind is None:
        return (
            f"a run of run.kind = {recipe.run.kind!r} trains nothing; set model.path to the folder that "
            "`starling export` writes"
        )
    # Reinforcement learning begins with supervised steps, or continues after those of a purely supervised run.
    allowed = ("sft", "rl") if kind == "rl" else (kind,)
    if trainer is not None and trainer.kind not in allowed:
        return (
            f"its last step was of kind {trainer.kind}, and the recipe has run.kind = {recipe.run.kind!r}; "
            "give a state of such a run, or set model.path to the folder that `starling export` writes for this one"
        )
    if state.version >= plan.last_step:
        steps = STEPS.get(kind, "preference.num_steps")
        return f"it has version {state.version}, and the recipe ends with version {plan.last_step}; raise {steps}"
    if trainer is None:
        return None
    begun_at = trainer.begun_at if trainer.kind == "rl" else None
    if begun_at is not None and begun_at != plan.num_supervised_steps:
        return (
            f"its run had {counted(begun_at, 'supervised step')} before reinforcement, and the recipe has "
            f"sft.num_steps = {plan.num_supervised_steps}; make them equal"
        )
    if begun_at is None and state.version > plan.num_supervised_steps:
        return (
            f"it belongs to supervised step {state.version}, and the recipe has "
            f"sft.num_steps = {plan.num_supervised_steps}; raise that to {state.version} or more"
        )
    return None
