"""Images and videos of prompts: read only where the content is one, whatever the name says.

A video may be a folder of frames, in alphabetical order, as the data of a run has them.
"""

from __future__ import annotations

import base64
import binascii
import os
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from starling.common.errors import StarlingError
from starling.common.files import open_regular

MAX_BYTES: Final = 64 << 20
HEAD_BYTES: Final = 32
MAX_FRAMES: Final = 1024
"""Of a folder; further ones are not shown."""
MAX_ENTRIES: Final = 20_000
"""Files of a folder that are looked at."""


class MediaError(StarlingError):
    """It cannot be shown."""


def frames_of(uri: str) -> list[Path] | None:
    """Return the frames of a video that is a folder; None for any other. Raises MediaError."""
    path = _path(uri)
    if path is None or "\0" in uri or not path.is_dir():
        return None
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES) if entry.name[0] != ".")
    except OSError as error:
        raise MediaError(f"its folder cannot be read here: {error.strerror}") from None
    if not names:
        raise MediaError("its folder has no frames")
    return [path / name for name in names[:MAX_FRAMES]]


def _path(uri: str) -> Path | None:
    """Return the path of a file or folder; None for what is written into the address itself."""
    if uri.startswith("data:"):
        return None
    return Path(unquote(urlsplit(uri).path) if uri.startswith("file://") else uri)


def read_media(uri: str) -> tuple[bytes, str]:
    """Return the content and the type of an image or a video. Raises MediaError.

    The paths are those of the run's data, which may be anyone's: only a file that begins as an image or a video is
    read, and no device and no pipe.
    """
    path = _path(uri)
    if path is None:
        return _inline(uri)
    try:
        opened = open_regular(path)
    except (OSError, ValueError) as error:
        raise MediaError(f"it cannot be read here: {getattr(error, 'strerror', None) or error}") from None
    with opened as file:
        try:
            kind = kind_of(file.read(HEAD_BYTES))
            if kind is None:
                raise MediaError("it is no image and no video that a browser shows")
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                raise MediaError(f"it has {size >> 20} MiB, and at most {MAX_BYTES >> 20} are shown")
            file.seek(0)
            return file.read(MAX_BYTES), kind
        except OSError as error:
            raise MediaError(f"it cannot be read: {error.strerror}") from None


def kind_of(head: bytes) -> str | None:
    """Return the type of a file by its first bytes, None where it is no image and no video for a browser."""
    if head[4:8] == b"ftyp":
        return "image/avif" if head[8:12] in (b"avif", b"avis") else "video/mp4"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    kinds = {
        b"\x89PNG\r\n\x1a\n": "image/png",
        b"\xff\xd8\xff": "image/jpeg",
        b"GIF8": "image/gif",
        b"\x1aE\xdf\xa3": "video/webm",
        b"OggS": "video/ogg",
    }
    return next((kind for start, kind in kinds.items() if head.startswith(start)), None)


def _inline(uri: str) -> tuple[bytes, str]:
    head, _, text = uri.partition(",")
    if not head.endswith(";base64"):
        raise MediaError("its data is not in base64")
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaError("its data is damaged") from None
    kind = kind_of(content[:HEAD_BYTES])
    if kind is None:
        raise MediaError("it is no image and no video that a browser shows")
    return content, kind
