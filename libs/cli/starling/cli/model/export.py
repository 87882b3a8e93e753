"""Export of a saved state: its model in Hugging Face format, without a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from starling.cli.run.attempt import newest_attempt
from starling.common.errors import ConfigError
from starling.common.importing import without_modules
from starling.common.pipeline_folder import INDEX, check_pipeline_folder
from starling.common.service import check_model_folder
from starling.common.settings import ModelSettings, read_toml, validate

EXPORT_TRIES: Final = 5

T = TypeVar("T")


def export_model(
    source: str, out: Path, model: str, *, ema: bool, shard_mb: int, storage_options: str, trust_remote_code: bool
) -> None:
    """Write the model of a state or a checkpoint into the folder `out`. Raises ConfigError."""
    options = _options(storage_options)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; give a new folder")
    state_source, config = _source(source)
    settings, seed = _model_settings(config, source, model, trust_remote_code)
    _check_folder(settings)
    with without_modules("torchao"):  # transformers imports it for its quantisers; it takes time, and warns
        from transformers.utils.logging import disable_progress_bar

        from starling.policy.train.checkpoint.huggingface import export_newest

        disable_progress_bar()
        exported = while_states_are_replaced(
            state_source,
            lambda: export_newest(state_source, out, settings, options, seed=seed, ema=ema, shard_mb=shard_mb),
        )
    print(f"version {exported.version} is in {out}, from {exported.url}")


def _check_folder(settings: ModelSettings) -> None:
    """Check the folder of a language model or a pipeline of diffusers. Raises ConfigError."""
    has_adapters = settings.lora is not None
    if (Path(settings.path) / INDEX).is_file():
        check_pipeline_folder(settings.path, weights=has_adapters)
    else:
        check_model_folder(settings.path, weights=has_adapters, runs_code=settings.trust_remote_code)


def while_states_are_replaced(source: str, action: Callable[[], T]) -> T:
    """Return the result of `action`, which reads the newest state of `source`; repeat it if states changed meanwhile.

    A run that trains removes a state when two newer ones exist, also while it is being read.

    Raises:
        ConfigError: `action` failed though the states remained, or `EXPORT_TRIES` times.
    """
    for tries_left in range(EXPORT_TRIES - 1, -1, -1):
        before = _state_names(source)
        try:
            return action()
        except ConfigError:
            if not tries_left or _state_names(source) == before:
                raise
    raise AssertionError("the last try returns or raises")


def _state_names(source: str) -> frozenset[str]:
    """Return the names of the states in the folder of a run; none for other sources."""
    try:
        return frozenset(os.listdir(Path(source) / "states"))
    except OSError:
        return frozenset()


def _source(text: str) -> tuple[str, Path | None]:
    """Return where to look for a state, and the configuration file of its run, if there is one near it."""
    if "://" in text:
        return text, None
    path = Path(text)
    if not path.is_dir():
        raise ConfigError(f"{text} does not exist; give a run's folder, a state's folder or a URL")
    path = newest_attempt(path)
    for near in (path, path.absolute().parent, path.absolute().parent.parent):
        if (near / "config.toml").is_file():
            return str(path), near / "config.toml"
    return str(path), None


def _model_settings(config: Path | None, source: str, model: str, trusted: bool) -> tuple[ModelSettings, int]:
    """Return the model that the run of `config` trains, unless the command line gives one, and the run's seed."""
    table: dict[str, Any] = {}
    try:
        tree = {} if config is None else read_toml(config)
        table, seed = dict(tree.get("model", {})), int(tree.get("run", {}).get("seed", 0))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{config} is not the configuration of a run ({error}); move it away, and give --model"
        ) from None
    if model:
        table["path"] = model
    if trusted:
        table["trust_remote_code"] = True
    if not table.get("path"):
        where = f"no configuration near {source}" if config is None else f"no model.path in {config}"
        raise ConfigError(f"{where} that names the trained model; give its folder with --model")
    try:
        return validate(ModelSettings, table), seed
    except ConfigError as error:
        raise ConfigError(f"model.{error} (in {config})") from None


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise ConfigError(f"--storage-options {text!r} is not a JSON object; see starling export --help")
    return options
