"""Digests of the files of an exported model, in a file of its folder: a torn or damaged copy is found when it is read.

They detect damage, not malice. A folder without that file, such as a model from a hub, is not checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import xxhash

from starling.common.errors import ConfigError
from starling.common.files import write_whole

DIGESTS: Final = "starling-digests.json"
"""Name of each file in the folder, and its xxh3 digest of 128 bits, as 32 hexadecimal digits."""
_CHUNK: Final = 1 << 20


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
        digests = json.loads((folder / DIGESTS).read_bytes())
        expected = {str(name): str(digest) for name, digest in digests.items()}
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "it is cut off or damaged"
        raise ConfigError(
            f"{source or folder}/{DIGESTS} cannot be read ({reason}); copy the folder again, or remove this file if "
            "the others are right"
        ) from None
    for name, digest in expected.items():
        path = folder / name
        if any(path.match(pattern) for pattern in leave_out) and path.is_file():
            continue
        problem = _problem(path, digest)
        if problem:
            raise ConfigError(
                f"{source or folder}/{name} {problem}; copy the folder again, or export the model again (after a "
                f"deliberate change remove {DIGESTS})"
            )


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
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
