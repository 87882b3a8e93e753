"""Loading of a prompt's images and videos, from files or data URLs, as RGB frames."""

from __future__ import annotations

import base64
import binascii
import io
import re
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from starling.common.wire.messages import Media
from starling.rollout.engine.base import RequestError

if TYPE_CHECKING:
    from PIL import Image

_SCHEME: Final = re.compile("[a-z][a-z0-9+.-]+:", re.IGNORECASE)
_SHOWN: Final = 80
"""Characters of a URI in an error message: a base64 one can have millions."""
_SHOWN_PATH: Final = 240
"""Characters of a path in an error message."""


class MediaBudget:
    """Memory budget for the images and videos of one prompt, checked before anything is decoded or resized.

    A file of a few kilobytes can hold an image of gigabytes, so the size in its header counts before it is decoded.
    """

    def __init__(self, max_bytes: int) -> None:
        """Create a budget of `max_bytes`, which is `rollout.max_media_bytes`."""
        self.max_bytes = max_bytes
        self._decoded = 0

    def decode(self, width: int, height: int) -> None:
        """Add an RGB frame that is about to be decoded. Raises RequestError if all frames exceed the budget."""
        self._decoded += width * height * 3
        self.check(self._decoded)

    def check(self, size_bytes: int) -> None:
        """Raise RequestError if `size_bytes` exceed the budget."""
        if size_bytes > self.max_bytes:
            raise RequestError(
                f"the images and videos of the prompt take {size_bytes} bytes or more and rollout.max_media_bytes is "
                f"{self.max_bytes}: give smaller or fewer ones, or raise it"
            )


def open_image(media: Media, budget: MediaBudget) -> Image.Image:
    """Return the image in RGB; of an animated one the first frame.

    Raises:
        RequestError: the file does not exist, does not decode, or exceeds the budget.
    """
    return _frames(media, _source(media), budget, most=1)[0]


def open_video(media: Media, budget: MediaBudget) -> list[Image.Image]:
    """Return the RGB frames, all of one size: those of an animated image, or the files of a folder in name order.

    Raises:
        RequestError: as for `open_image`; or the folder is empty, or the frames differ in size.
    """
    source = _source(media)
    if isinstance(source, Path) and source.is_dir():
        files = sorted(path for path in source.iterdir() if path.is_file())
        frames = [frame for path in files for frame in _frames(media, path, budget, most=1)]
    else:
        frames = _frames(media, source, budget)
    if not frames:
        raise RequestError(f"the video {_named(media)} is a folder without files: put its frames there as images")
    if len(sizes := {frame.size for frame in frames}) > 1:
        raise RequestError(
            f"the video {_named(media)} has frames of {' and '.join(f'{w}x{h}' for w, h in sorted(sizes))} pixels: "
            "make them all of one size"
        )
    return frames


def _source(media: Media) -> Path | bytes:
    """Return the path of `media`, or its bytes if the URI is a data URL."""
    uri = media.uri
    if uri.startswith("data:"):
        head, comma, body = uri.partition(",")
        if not comma or not head.endswith(";base64"):
            raise RequestError(f"the {media.kind} {_named(media)} is not a base64 data URL: write data:TYPE;base64,...")
        try:
            return base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(
                f"the {media.kind} {_named(media)} is not valid base64 ({error}): encode it again"
            ) from None
    if uri.startswith("file://"):
        return Path(unquote(urlsplit(uri).path))
    if _SCHEME.match(uri):
        raise RequestError(
            f"the {media.kind} {_named(media)} is not fetched from elsewhere: give a path on the rollout's host, "
            "or a data URL"
        )
    return Path(uri)


def _frames(media: Media, source: Path | bytes, budget: MediaBudget, most: int | None = None) -> list[Image.Image]:
    from PIL import Image, ImageSequence

    if isinstance(source, Path) and not source.exists():
        raise RequestError(f"the {media.kind} {_shown(str(source))} does not exist on the rollout's host")
    if isinstance(source, Path) and not (source.is_file() or source.is_dir()):  # to open a FIFO may take for ever
        raise RequestError(f"the {media.kind} {_shown(str(source))} is not a regular file: name an image")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as opened:
            frames = []
            for frame in islice(ImageSequence.Iterator(opened), most):
                budget.decode(*frame.size)
                frames.append(frame.convert("RGB"))
            return frames
    except RequestError:
        raise
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise RequestError(
            f"the {media.kind} {_named(media)} does not decode ({reason[0]:.120}): replace it"
        ) from error


def _named(media: Media) -> str:
    if media.uri.startswith("data:") and len(media.uri) > _SHOWN:
        return repr(f"{media.uri[:_SHOWN]}...")
    return _shown(media.uri)


def _shown(path: str) -> str:
    """Return a path for an error message, shortened to its end."""
    return repr(path if len(path) <= _SHOWN_PATH else f"...{path[-_SHOWN_PATH:]}")
