"""Digests of the files of a model folder: a torn or damaged copy is found, and two folders can be compared.

An exported model has the digests of its files in a file of its folder. They detect damage, not malice. A folder without
that file, such as a model from a hub, is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import xxhash

from starling.common.errors import ConfigError
from starling.common.files import open_regular, write_whole

DIGESTS: Final = "starling-digests.json"
"""Name of each file in the folder, and its xxh3 digest of 128 bits, as 32 hexadecimal digits."""
_CHUNK: Final = 1 << 20
_MAX_NAME_BYTES: Final = 255
"""Of a file or folder, as Linux has it."""
_MAX_PATH_CHARACTERS: Final = 1024
_WEIGHTS: Final = (".safetensors", ".bin")
"""Endings of files of weights, in the order in which transformers and vLLM prefer them."""
_PREFERRED: Final = frozenset({"model.safetensors", "model.safetensors.index.json"})
"""Files beside which transformers loads no other weights of a model."""
_ADAPTER: Final = "adapter_config.json"
_TEMPLATES: Final = "additional_chat_templates"
"""Subfolder in which transformers looks for chat templates; one of them, `default`, replaces that of the tokenizer."""
_PIPELINE: Final = "model_index.json"
"""Of a folder of diffusers, which has each part of a pipeline in a subfolder."""
_UNREAD: Final = (
    *("README", "LICENSE", "NOTICE", ".md", ".pdf", ".png", ".jpg", ".jpeg", ".gif", ".svg"),
    *(".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot", ".pth", "optimizer.pt", "scheduler.pt"),
)
"""Ends of the names of files that no engine reads: texts and pictures, weights of other formats, states of trainers.

All others count: tokenizers have files of many names, such as ``source.spm``, ``bpe.codes`` and ``tokenizer.model.v3``.
"""
_OF_TOOLS: Final = frozenset({".gitattributes", ".gitignore", ".DS_Store", ".mdl", ".msc", ".mv"})
"""Files of git, macOS and ModelScope's downloads. Other hidden files count: an index of weights can name them."""


def write_digests(folder: Path) -> None:
    """Write the digests of all files in `folder`, which is complete otherwise. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != DIGESTS)
    digests = {path.relative_to(folder).as_posix(): _digest_of(path) for path in files}
    write_whole(folder / DIGESTS, json.dumps(digests, indent=1) + "\n")


def check_digests(folder: Path, *, leave_out: Sequence[str] = (), source: str = "") -> None:
    """Compare the files of `folder` with its digests, if it has any.

    Args:
        folder: as it was written, or copied.
        leave_out: patterns of the names of files that are not read.
        source: where it was copied from, named in errors; by default `folder`.

    Raises:
        ConfigError: a file differs or is missing; the text names it.
    """
    try:
        expected = _listed(folder)
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is cut off or damaged"
        raise ConfigError(
            f"{source or folder}/{DIGESTS} cannot be read ({reason}); copy the folder again, or remove this file if "
            "the others are right"
        ) from None
    for name, digest in expected.items():
        if not _is_within(name):
            raise ConfigError(
                f"{source or folder}/{DIGESTS} lists {name!r:.255}, which is no file of this folder; copy the folder "
                "again from a source that you trust"
            )
        path = folder / name
        if any(path.match(pattern) for pattern in leave_out) and path.is_file():
            continue
        problem = _problem(path, digest)
        if problem:
            raise ConfigError(
                f"{source or folder}/{name:.255} {problem}; copy the folder again, or export the model again (after a "
                f"deliberate change remove {DIGESTS})"
            )


def model_digest(folder: Path) -> str:
    """Return one digest of the files of a model folder that an engine reads: 32 hexadecimal digits.

    It is that of the names and digests of all files in it, and equal for copies. Left out are those that no engine
    reads (`_UNREAD`, `_OF_TOOLS`), weights that are not loaded, and subfolders but that of chat templates and, of a
    pipeline of diffusers, those of its parts. Digests that the folder has are used: compare them first
    (`check_digests`). Other files are read, at the speed of the disk or, in memory, of some GB/s; a thread of its own
    can do that.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        listed = _listed(folder) if (folder / DIGESTS).is_file() else {}
        found = [*folder.iterdir(), *folder.glob(f"{_TEMPLATES}/*.jinja")]
        if (folder / _PIPELINE).is_file():
            found += (path for path in folder.glob("*/*") if not path.parent.name.startswith("."))
        files = {path.relative_to(folder).as_posix(): path for path in found if path.is_file()}
        files.pop(DIGESTS, None)
        unread = (*_UNREAD, *_unloaded_weights(files))
        read = sorted(name for name in files if name not in _OF_TOOLS and not name.endswith(unread))
        digests = {name: str(listed.get(name) or _digest_of(files[name])) for name in read}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the files of the model folder {folder} cannot be read ({reason}); copy it again") from None
    return xxhash.xxh3_128(json.dumps(digests).encode()).hexdigest()


def _unloaded_weights(names: Collection[str]) -> tuple[str, ...]:
    """Return the endings of files of weights that are not loaded from a folder.

    Of an unusual one transformers may take other files than vLLM, or others than the model's for an adapter.
    """
    is_usual = not _PREFERRED.isdisjoint(names) and _ADAPTER not in names
    return _WEIGHTS[1:] if is_usual else ()


def _listed(folder: Path) -> dict[str, str]:
    """Return the digests that the folder has, by name. Raises OSError, ValueError, AttributeError, RecursionError."""
    with open_regular(folder / DIGESTS) as file:
        digests = json.loads(file.read())
    return {str(name): str(digest) for name, digest in digests.items()}


def _is_within(name: str) -> bool:
    """Return whether `name` can only be that of a file below the folder, its links aside."""
    path = PurePosixPath(name)
    try:
        longest = max(map(len, name.encode().split(b"/")))
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    fits = longest <= _MAX_NAME_BYTES and len(name) <= _MAX_PATH_CHARACTERS
    return fits and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _problem(path: Path, digest: str) -> str:
    """Return in words how a file differs from its digest; empty if it does not."""
    try:
        return "" if _digest_of(path) == digest else f"does not match its digest in {DIGESTS}: it is damaged or changed"
    except FileNotFoundError:
        return f"is missing, and {DIGESTS} lists it"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _digest_of(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
