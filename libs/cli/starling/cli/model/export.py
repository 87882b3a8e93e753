"""`starling export`: a model in Hugging Face form out of a saved state, without a run."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starling.common.errors import ConfigError
from starling.common.service import check_model_folder
from starling.common.settings import ModelSettings, validate


def main(argv: Sequence[str]) -> int:
    """Write the model of a state into a folder. Returns the exit code; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="starling export", allow_abbrev=False)
    parser.add_argument("source", help="a run's folder (its newest state), a state's folder, or a URL of either")
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--ema", action="store_true", help="the averaged weights instead of the newest ones")
    parser.add_argument("--model", default="", help="folder of the model that was trained; default: as the run says")
    parser.add_argument("--shard-mb", type=int, default=5000, help="most MiB of one file of weights")
    parser.add_argument("--storage-options", type=_table, default={}, help="JSON for fsspec, where SOURCE is a URL")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code in the model's folder")
    known = parser.parse_args(list(argv))
    if known.out.exists() and (not known.out.is_dir() or any(known.out.iterdir())):
        raise ConfigError(f"{known.out} exists and is not empty; give a folder that is to be made")
    source, config = _source(known.source)
    settings, seed = _model_of(config, known)
    check_model_folder(settings.path, weights=settings.lora is not None)
    from starling.policy.train.checkpoint.huggingface import export_state

    state = export_state(
        source, known.out, settings, known.storage_options, seed=seed, ema=known.ema, shard_mb=known.shard_mb
    )
    print(f"version {state.version} of run {state.run} is in {known.out}")
    return 0


def _source(text: str) -> tuple[str, Path | None]:
    """Return where to look for a state, and the configuration of the run that it is of, if that lies near it."""
    if "://" in text:
        return text, None
    path = Path(text)
    if not path.is_dir():
        raise ConfigError(f"{text} does not exist; give a run's folder, a state's folder or a URL")
    attempts = [found for found in path.glob("attempt-*") if found.name.removeprefix("attempt-").isdigit()]
    if attempts:
        path = max(attempts, key=lambda found: int(found.name.removeprefix("attempt-")))
    for near in (path, path.absolute().parent, path.absolute().parent.parent):
        if (near / "config.toml").is_file():
            return str(path), near / "config.toml"
    return str(path), None


def _model_of(config: Path | None, known: argparse.Namespace) -> tuple[ModelSettings, int]:
    """Return the model that the run of `config` trains, as far as the command line does not say, and the run's seed."""
    table: dict[str, Any] = {}
    try:
        tree = {} if config is None else tomllib.loads(config.read_text())
        table, seed = dict(tree.get("model", {})), int(tree.get("run", {}).get("seed", 0))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{config} is not the configuration of a run ({error}); move it away, and give --model"
        ) from None
    if known.model:
        table["path"] = known.model
    if known.trust_remote_code:
        table["trust_remote_code"] = True
    if not table.get("path"):
        where = f"nothing near {known.source} says" if config is None else f"{config} does not say"
        raise ConfigError(f"{where} which model it is of; give its folder with --model")
    try:
        return validate(ModelSettings, table), seed
    except ConfigError as error:
        raise ConfigError(f"model.{error}, says {config}") from None


def _table(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value
