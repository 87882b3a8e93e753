"""What a model folder names for transformers and vLLM to load: only files of its own, and no code of a hub.

The settings of a model, tokenizer or processor can name another configuration, weights or a tokenizer elsewhere,
another model, or a kernel of a hub, an index of weights any file, and a link can lead to one. No digest of the folder
covers these, so that they are refused before they are read: a path by the file that it leads to, whatever setting has
it; names on a hub, and of files in the folder, by the settings that have them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.files import open_regular

OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0"}
"""Environment variables of processes that load models from local folders: whatever a folder names, nothing is fetched
from a hub, and transformers takes no kernels from there. Both are read when transformers is imported."""
_KERNEL_KEYS: Final = (
    "attn_implementation",
    "experts_implementation",
    "attn_implementation_internal",
    "experts_implementation_internal",
)
"""Ends of the names of settings in config.json by which transformers chooses kernels."""
_CODE_KEY: Final = "auto_map"
"""Name of the setting with the classes of custom code, as ``module.Class``."""
_MODEL_KEYS: Final = ("speculators_config", "text_model_id", "audio_model_id")
"""Settings in config.json with the path, or the name on a hub, of a model that vLLM loads in place of the folder's."""
_TOKENIZER: Final = "tokenizer_config.json"
_SPECIAL: Final = "special_tokens_map.json"
"""Its entries become arguments of the tokenizer's class, after transformers has checked those that are files."""
_SETTINGS: Final = (
    "config.json",
    "generation_config.json",
    _TOKENIZER,
    _SPECIAL,
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "adapter_config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
)
"""Files of settings, of which transformers or vLLM can take a value for the path of a file."""
_NOTES: Final = (
    *("_name_or_path", "name_or_path", "base_model_name_or_path"),
    *("tokenizer_file", "special_tokens_map_file"),
)
"""Settings with the paths of the author's files, which the loaders replace by those of the folder."""
_TOKEN_KEYS: Final = ("_token", "_tokens", "_token_id", "_token_ids")
_INDEXED: Final = (".safetensors", ".bin")
"""Endings of files of weights that an index can name."""


def leave_hub() -> None:
    """Switch the hub off for this process and those it starts, before transformers is imported.

    Variables that the user has set are left.
    """
    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)  # any other one would move in memory, and the title of the process with it


def check_named_files(folder: Path, *, runs_code: bool = False) -> None:
    """Refuse a configuration of a model or tokenizer that names files elsewhere, other models, or kernels of a hub.

    Where the package `kernels` is installed, transformers downloads and runs such a kernel, whatever
    `model.trust_remote_code` is. What is no JSON is left to the loader.

    Args:
        folder: a Hugging Face model folder.
        runs_code: whether its custom code is run: that of another folder or of a hub is then refused, because only the
            folder's own was reviewed.

    Raises:
        ConfigError: the text names the entry.
    """
    checks = {
        "config.json": _problem,
        "adapter_config.json": _problem_of_adapter,
        _TOKENIZER: _problem_of_tokenizer,
        _SPECIAL: _problem_of_special_token,
    }
    for name in _SETTINGS:
        if not (folder / name).is_file():
            continue
        for depth, key, value in _entries(folder / name):
            problem = checks[name](depth, key, value) if name in checks else ""
            problem = problem or _problem_of_path(folder, key, value)
            if problem or (runs_code and (problem := _problem_of_code(key, value))):
                raise ConfigError(f"{folder / name} has {key:.100} = {value!r:.200}, {problem}")


def check_links(folder: Path, *, root: Path | None = None) -> None:
    """Refuse links out of the folder, but for those of weights, and those into the blobs of a hub's cache.

    Other files are small, so that they can be copied; an export copies some of them, and any file could be behind a
    link. Weights are large, and nothing but tensors is taken from them.

    Args:
        folder: whose files are checked.
        root: the folder that links may not leave, if it is not `folder` itself but contains it.

    Raises:
        ConfigError: the text names the link.
    """
    home = (root or folder).resolve()
    places = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        is_left_alone = path.name.endswith(_INDEXED) or not path.is_file()
        if not is_left_alone and not any(path.resolve().is_relative_to(place) for place in places):
            raise ConfigError(
                f"{path} is a link to {path.resolve()}, outside of the model folder: copy the file into it"
            )


def check_indexes(folder: Path) -> None:
    """Refuse an index of weights that names anything but files of weights beside it.

    Raises:
        ConfigError: the text names the index, and what it names.
    """
    for ending in _INDEXED:
        for index in sorted(folder.glob(f"*{ending}.index.json")):
            other = next((name for name in _indexed(index) if not _is_plain(name, ending)), None)
            if other is not None:
                raise ConfigError(
                    f"{index} names {other!r:.255}, which is no file beside it that ends in {ending}: put the weights "
                    f"into {folder}"
                )


def _indexed(index: Path) -> list[object]:
    """Return the names in an index of weights, each once. Raises ConfigError."""
    try:
        with open_regular(index) as file:
            return sorted(set(json.load(file)["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"{index} is no index of weights ({reason}): replace it") from None


def _entries(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield depth, key and value of the entries of a JSON file; those of its object have depth 1.

    Entries below a key that chooses kernels or code have that key.

    Raises ConfigError for a file that cannot be read.
    """
    try:
        with open_regular(path) as file:
            pending: list[tuple[int, str, Any]] = [(0, "", json.load(file))]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the path of a Hugging Face folder") from None
    except (ValueError, RecursionError):  # the loader's to report
        return
    while pending:
        depth, key, value = pending.pop()
        yield depth, key, value
        if isinstance(value, dict):
            # The names of the parts of a model are keys below a key that chooses kernels.
            is_choice = key.endswith(_KERNEL_KEYS) or key == _CODE_KEY
            pending += [(depth + 1, key if is_choice else name, part) for name, part in value.items()]
        elif isinstance(value, list):
            pending += [(depth + 1, key, part) for part in value]


def _problem(_: int, key: str, value: Any) -> str:
    """Return what is wrong with an entry of a model's configuration, and the remedy; empty if nothing is."""
    if key.endswith(_KERNEL_KEYS) and isinstance(value, str) and "/" in value:
        return (
            "a kernel that transformers would download from a hub and run; remove it, or name an implementation of "
            "transformers, such as sdpa"
        )
    if key == "architecture" and isinstance(value, str) and ":" in value:
        return "a model that timm would load from a hub or another folder; name an architecture of timm"
    if key in _MODEL_KEYS and value is not None:
        return "which has another model loaded; remove it, or give that model's folder"
    if key == "configuration_files":
        return "which has other files read in its place; put the entries of the right one into it"
    if key == "transformers_weights" and value is not None:
        known = (".safetensors", ".safetensors.index.json")
        return "" if _is_plain(value, known) else "which is no file of weights beside it; remove it"
    return ""


def _problem_of_adapter(depth: int, key: str, value: Any) -> str:
    """Return what is wrong with an entry of an adapter's configuration, and the remedy; empty if nothing is."""
    is_other = depth == 1 and key == "peft_type" and value != "LORA"
    return "an adapter that can have others loaded from elsewhere; merge it into the weights" if is_other else ""


def _problem_of_tokenizer(depth: int, key: str, value: Any) -> str:
    """Return what is wrong with an entry of a tokenizer's configuration, and the remedy; empty if nothing is."""
    if key == "fast_tokenizer_files" and not isinstance(value, list):
        return "" if _is_plain(value, ".json") else "which is no file beside it; remove it"
    if depth == 1 and ((key == "gguf_file" and value is not None) or (key == "init_inputs" and value)):
        return "which can have another file read as the tokenizer; remove it, and add tokenizer.json"
    return ""


def _problem_of_path(folder: Path, key: str, value: Any) -> str:
    """Return what is wrong with the path of a file elsewhere, and the remedy; empty if `value` is none."""
    if key in _NOTES or not isinstance(value, str) or not _leads_elsewhere(folder, value):
        return ""
    return "which is a file of this machine outside of the folder, or in a subfolder; remove it, or copy the file there"


def _leads_elsewhere(folder: Path, value: str) -> bool:
    """Return whether a loader could take `value` for a path, which leads to anything but a file in `folder` itself."""
    path = os.path.expanduser(value.removeprefix("file://"))
    if not path.strip("./"):
        return False
    if os.sep not in path:  # a word, such as the name of a function: a folder of that name means nothing
        return os.path.isfile(path) and not _is_in(folder, path)
    found = (part for part in (path, os.path.join(folder, path)) if os.path.exists(part))
    return any(not _is_in(folder, part) for part in found)


def _is_in(folder: Path, path: str) -> bool:
    """Return whether an existing `path` is that of a file in `folder` itself, or of `folder`."""
    return os.path.samefile(path if os.path.isdir(path) else os.path.dirname(path) or ".", folder)


def _problem_of_special_token(depth: int, key: str, _: Any) -> str:
    """Return what is wrong with an entry among the special tokens, and the remedy; empty if nothing is."""
    return "which is no special token; remove it" if depth == 1 and not key.endswith(_TOKEN_KEYS) else ""


def _problem_of_code(key: str, value: Any) -> str:
    """Return what is wrong with an entry that names custom code, and the remedy; empty if nothing is."""
    if key == _CODE_KEY and isinstance(value, str) and ("--" in value or "/" in value):
        return (
            "code of a hub or of another folder, which model.trust_remote_code does not cover; copy the code into the "
            "folder, and name it as module.Class"
        )
    return ""


def _is_plain(name: object, endings: str | tuple[str, ...]) -> bool:
    """Return whether `name` is that of a file in the folder itself."""
    return isinstance(name, str) and "/" not in name and "\0" not in name and name.endswith(endings)
