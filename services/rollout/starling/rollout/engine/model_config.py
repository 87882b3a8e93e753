"""Configuration of a model folder in Hugging Face format: its end tokens, context length and trainable length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig

from starling.algo.architecture import context_length, remedy
from starling.common.errors import ConfigError


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the configuration of the model in `folder`, as transformers reads it.

    Raises:
        ConfigError: the folder or its configuration is missing or unreadable.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {str(folder)!r} does not exist; give a folder in Hugging Face format")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {str(folder)!r} has no config.json; give a folder in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # the user's folder: transformers and the folder's own code may raise anything
        raise unloadable_folder(folder, error, trust_remote_code) from error


def unloadable_folder(folder: Path, error: Exception, trust_remote_code: bool) -> ConfigError:
    """Return the error for a folder whose loading raised `error`."""
    reason = str(error).split("\n", 1)[0].rstrip(".") + remedy(folder, trust_remote_code)
    return ConfigError(f"model folder {str(folder)!r} cannot be loaded: {reason}")


def end_token_ids(tokenizer: Any, path: str | Path) -> tuple[int, ...]:
    """Return the ids that end a completion: the tokenizer's and those of `generation_config.json` in folder `path`.

    The defaults of the model's configuration class are ignored: they name tokens of another vocabulary.

    Raises:
        ConfigError: there is none, so that every completion would be truncated, or the file is damaged.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    if (Path(path) / "generation_config.json").is_file():
        found.update(_declared_end_tokens(Path(path)))
    if not found:
        raise ConfigError(
            f"the model in {path} has no end-of-sequence token, so every completion would go on to its token limit; "
            "set eos_token in tokenizer_config.json, or eos_token_id in generation_config.json"
        )
    return tuple(sorted(found))


def _declared_end_tokens(folder: Path) -> list[int]:
    """Return the ids that end a completion by `generation_config.json`. Raises ConfigError for anything else there."""
    path = folder / "generation_config.json"
    try:
        declared = GenerationConfig.from_pretrained(str(folder), local_files_only=True).eos_token_id
    except Exception as error:  # the user's folder: transformers may raise anything
        reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip(".")
        raise ConfigError(f"{path} cannot be read ({reason:.300}): replace it, or remove it") from error
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    if not all(type(one) is int for one in ids):
        raise ConfigError(f"{path} has eos_token_id = {declared!r:.100}: give a number, or a list of them")
    return ids


def max_trainable_length(config: Any, wanted: int | None) -> int | None:
    """Return the maximum number of tokens of a sequence for training: `wanted`, or the model's limit if that is None.

    Raises:
        ConfigError: `wanted` is more than the policy can train.
    """
    limit = context_length(config)
    if wanted is None or limit is None:
        return wanted or limit
    if wanted > limit:
        raise ConfigError(
            f"rollout.max_model_len = {wanted} is more than the {limit} tokens of a sequence that the policy can train "
            "(the model's context, for longrope that of its first pretraining): lower it"
        )
    return wanted
