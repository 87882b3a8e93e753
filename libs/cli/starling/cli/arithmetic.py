"""The arithmetic of a step, in words: one definition, printed before anything is started."""

from __future__ import annotations

import json
import math
from pathlib import Path

from starling.algo.staleness import num_slots
from starling.cli.recipe import Recipe
from starling.cli.scratch import SPECIAL_TOKENS
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
    lines.append(
        f"weight sync: {parameters:,} parameters x {item_bytes} bytes = {parameters * item_bytes:,} bytes "
        f"to each of {recipe.launch.num_rollouts} rollouts, after every step"
    )
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
    """Count the parameters of the recipe's model without making it. Raises ConfigError for a folder without one."""
    # Only for --dry-run: importing torch takes seconds.
    from starling.policy.train.model import count_parameters

    scratch = recipe.model.scratch
    if scratch is not None:
        num_tokens = len(scratch.alphabet) + len(SPECIAL_TOKENS)
        return count_parameters({"model_type": scratch.model_type, "vocab_size": num_tokens, **scratch.config})
    path = Path(recipe.model.path) / "config.json"
    if not path.is_file():
        raise ConfigError(f"the model folder {path.parent} has no config.json; give that of a Hugging Face model")
    return count_parameters(json.loads(path.read_text()))
