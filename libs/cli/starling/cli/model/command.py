"""`starling export` and `starling scratch`: folders of models in Hugging Face format."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from starling.cli.command_line import Line, define
from starling.common.errors import ConfigError


def export(
    state: Annotated[
        str, Parameter(help="A run's folder (its newest state or checkpoint), a state's folder, or a URL of either.")
    ],
    out: Annotated[Path, Parameter(help="The folder to write; it must not exist, or be empty.")],
    /,
    *,
    ema: Annotated[bool, Parameter(help="Write the EMA of the weights instead of the newest weights.")] = False,
    model: Annotated[
        str, Parameter(metavar="DIR", help="The model that was trained; by default that of the run.")
    ] = "",
    shard_mb: Annotated[int, Parameter(help="Maximum MiB of one file of weights.")] = 5000,
    storage_options: Annotated[
        str, Parameter(metavar="JSON", help="Options of fsspec as JSON, where the state is a URL.")
    ] = "{}",
    trust_remote_code: Annotated[bool, Parameter(help="Run Python code from the model's folder.")] = False,
) -> int:
    """Write the model of a saved state in Hugging Face format."""
    from starling.cli.model.export import export_model

    export_model(
        state,
        out,
        model,
        ema=ema,
        shard_mb=shard_mb,
        storage_options=storage_options,
        trust_remote_code=trust_remote_code,
    )
    return 0


def scratch(
    recipe: Annotated[Path, Parameter(help="The recipe with the section [model.scratch].")],
    folder: Annotated[Path, Parameter(help="The folder to create.")],
    /,
    *,
    line: Line,
) -> int:
    """Make the folder of a recipe's [model.scratch]: configuration and tokenizer, no weights; or all of a pipeline but
    the weights of its transformer."""
    logging.disable(logging.WARNING)
    from starling.cli.model.scratch import make_model_folder
    from starling.cli.recipe.schema import load_recipe

    settings = load_recipe([recipe], line.settings).model.scratch
    if settings is None:
        raise ConfigError(f"{recipe} has no section [model.scratch]; add one, or use the folder of model.path")
    if not settings.pipeline:
        # transformers writes these files without torch, whose import would take most of the time; it warns of that.
        sys.modules["torch"] = None  # type: ignore[assignment]
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    make_model_folder(settings, folder)
    return 0


export_command = define(
    "export", export, "RUN_OR_STATE OUT [OPTIONS]", "Example:\n  starling export runs/mine mine-hf --ema"
)
scratch_command = define(
    "scratch",
    scratch,
    "RECIPE.toml FOLDER [--SECTION.KEY VALUE ...]",
    "Example:\n  starling scratch recipes/quickstart.toml model",
)
