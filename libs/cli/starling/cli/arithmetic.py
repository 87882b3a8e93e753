"""The arithmetic of a step, in words: one definition, printed before anything is started."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from starling.algo.staleness import num_slots
from starling.cli.recipe import Recipe
from starling.cli.scratch import make_model_folder
from starling.common.errors import ConfigError

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def arithmetic(recipe: Recipe) -> list[str]:
    """Return one line for each product that decides the size of a step."""
    lines = []
    if recipe.sft.num_steps:
        sft = recipe.sft
        total = sft.num_steps * sft.examples_per_step
        lines.append(f"supervised: {sft.num_steps} steps x {sft.examples_per_step} examples = {total} examples")
    if recipe.run.kind == "grpo" and recipe.rl.num_steps:
        lines += _reinforcement(recipe)
    parameters, item_bytes = num_parameters(recipe), ITEM_BYTES[recipe.model.dtype]
    size = f"{parameters:,} parameters x {item_bytes} bytes = {parameters * item_bytes:,} bytes"
    if recipe.plan().needs_rollouts:
        lines.append(f"weight sync: {size} to each of {recipe.launch.num_rollouts} rollouts, after every step")
    else:
        lines.append(f"model: {size}")
    return lines


def _reinforcement(recipe: Recipe) -> list[str]:
    rl, sampling = recipe.rl, recipe.sampling
    sequences = rl.prompts_per_step * rl.group_size
    slots = num_slots(rl.prompts_per_step, rl.max_staleness)
    tokens = sequences * sampling.max_tokens
    least = math.ceil(tokens / recipe.policy.tokens_per_microbatch)
    offered = recipe.launch.num_rollouts * recipe.rollout.num_slots
    return [
        f"a step: {rl.prompts_per_step} prompts x {rl.group_size} completions = {sequences} sequences, "
        f"at most {tokens:,} sampled tokens",
        f"microbatches: at most about {least} of {recipe.policy.tokens_per_microbatch:,} tokens (prompts come on top)",
        f"staleness: at most {rl.max_staleness}, so ({rl.max_staleness} + 1) x {rl.prompts_per_step} = {slots} groups "
        f"exist at a time; {recipe.launch.num_rollouts} rollouts x {recipe.rollout.num_slots} slots = {offered} can "
        "be generated at a time",
        f"the run: {rl.num_steps} steps x {rl.prompts_per_step} prompts = {rl.num_steps * rl.prompts_per_step} groups",
    ]


def num_parameters(recipe: Recipe) -> int:
    """Count the parameters of the recipe's model without making them. Raises ConfigError for what is no model."""
    # Only for --dry-run: importing torch takes seconds.
    from starling.policy.train.model import count_parameters

    with tempfile.TemporaryDirectory() as made:
        folder = Path(recipe.model.path)
        if recipe.model.scratch is not None:
            folder = Path(made) / "model"
            make_model_folder(recipe.model.scratch, folder)
        try:
            return count_parameters(json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = str(error).partition("\n")[0][:160]
            raise ConfigError(
                f"{folder / 'config.json'} describes no causal language model ({reason} ...); give another model.path"
            ) from None
