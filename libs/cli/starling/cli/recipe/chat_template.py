"""Check that a model which is to read conversations has a chat template, before anything is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from starling.common.errors import ConfigError
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import names_a_function

if TYPE_CHECKING:
    from starling.cli.recipe.schema import Recipe

_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
"""Files of a model folder that hold chat templates, besides tokenizer_config.json."""


def check_chat_template(recipe: Recipe) -> None:
    """Refuse data that becomes conversations, for a model without a chat template.

    The rows of a function may be prompts of either kind, code in the model's folder may make a template, and a
    diffusion model needs none: such runs are not checked here. A file that does not exist is reported by the process
    that reads it.

    Raises:
        ConfigError: naming the data and the remedy.
    """
    if recipe.diffusion is not None or recipe.model.trust_remote_code or _has_template(recipe):
        return
    for key, data in _data(recipe):
        if not data.source or data.format or names_a_function(data.source) or _is_missing(data.source):
            continue
        flag = " (--plain of infer and evaluate)" if recipe.kind.answers_each_prompt else ""
        remedy = "a chat_template.jinja to the model folder" if recipe.model.path else "model.scratch.chat_template"
        raise ConfigError(
            f"{key}.source = {data.source!r} gives conversations, and the model's tokenizer has no chat template; "
            f"add {remedy}, or make plain text by {key}.format{flag}"
        )


def _is_missing(source: str) -> bool:
    return source.endswith((".jsonl", ".parquet")) and not Path(source).is_file()


def _has_template(recipe: Recipe) -> bool:
    if recipe.model.scratch is not None:
        scratch = recipe.model.scratch
        return scratch.chat_template is not None or bool(scratch.pipeline)  # diffusion models read no conversations
    folder = Path(recipe.model.path)
    file = folder / "tokenizer_config.json"
    if not file.is_file() or any((folder / name).exists() for name in _TEMPLATES):
        return True  # a missing tokenizer is reported by the process that reads it
    try:
        return bool(json.loads(file.read_bytes()).get("chat_template"))
    except (ValueError, AttributeError, RecursionError):
        return True


def _data(recipe: Recipe) -> Iterator[tuple[str, DataSettings]]:
    """Yield the sections of data that the run reads, with their keys."""
    if recipe.kind.serves_requests:
        return
    tasks = recipe.evaluation.tasks if recipe.kind.only_scores else ()
    if tasks:
        yield from (("evaluation.tasks.data", task.data) for task in tasks)
        return
    examples = recipe.examples
    own = examples.data if examples.num_steps else None
    if own is not None:
        yield f"{'preference' if recipe.kind.learns_from_pairs else 'sft'}.data", own
    is_read = recipe.plan().num_steps or not recipe.kind.trains or (examples.num_steps and own is None)
    if is_read and not recipe.kind.reads_trajectories:
        yield "data", recipe.data
