"""The images and videos of a row: what its columns hold, as the rollout can open it."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec.structs import replace

from starling.algo.text import markers
from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Media
from starling.controller.data.settings import DataSettings

MAX_INLINE_BYTES: Final = 8 << 20
"""Of all media of a prompt that travel inside it; a control message may have twice as many."""

_PNG_MODES: Final = {mode: mode for mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")} | {"I": "I;16"}
"""What Pillow's modes are in a PNG; all others, as that of printing (CMYK), become RGB, as a rollout makes of them."""

Kind = Literal["image", "video"]
_SCHEME: Final = re.compile("[a-z][a-z0-9+.-]+:", re.IGNORECASE)


def with_media(
    messages: tuple[ChatMessage, ...], columns: Mapping[str, Any], where: str, settings: DataSettings
) -> tuple[tuple[ChatMessage, ...], tuple[Media, ...]]:
    """Return the conversation, with a marker for each of the row's images and videos, and these in that order.

    A conversation without markers has all of them before the text of its first user message.

    Raises:
        ConfigError: a value is no image, there are not as many as markers, or they are too large to travel.
    """
    found = {"image": _media("image", columns, where, settings), "video": _media("video", columns, where, settings)}
    if not (settings.image_column or settings.video_column):
        return messages, ()
    wanted = markers(messages)
    if not wanted:
        wanted = [kind for kind, media in found.items() for _ in media]
        messages = _marked(messages, "".join(f"<{kind}>" for kind in wanted))
    for kind, media in found.items():
        if wanted.count(kind) != len(media):
            raise ConfigError(
                f"{where} has {len(media)} {kind}s and its messages say <{kind}> {wanted.count(kind)} times: "
                "write it once for each, or nowhere to have them before the text"
            )
    inline = sum(len(item.uri) for media in found.values() for item in media)
    if inline > MAX_INLINE_BYTES:
        raise ConfigError(
            f"{where} holds images or videos of {inline} bytes in base64, and a prompt carries at most "
            f"{MAX_INLINE_BYTES}: give paths that the rollouts can open"
        )
    each: dict[str, Iterator[Media]] = {kind: iter(media) for kind, media in found.items()}
    return messages, tuple(next(each[kind]) for kind in wanted)


def _marked(messages: tuple[ChatMessage, ...], text: str) -> tuple[ChatMessage, ...]:
    first = next((at for at, message in enumerate(messages) if message.role == "user"), len(messages) - 1)
    marked = replace(messages[first], content=text + messages[first].content)
    return (*messages[:first], marked, *messages[first + 1 :])


def _media(kind: Kind, columns: Mapping[str, Any], where: str, settings: DataSettings) -> list[Media]:
    name = settings.image_column if kind == "image" else settings.video_column
    value = columns[name] if name else None
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    fps = settings.video_fps if kind == "video" else 0.0
    return [Media(kind=kind, uri=_uri(item, f"column {name!r} of {where}", settings), fps=fps) for item in values]


def _uri(value: object, where: str, settings: DataSettings) -> str:
    """Return where the rollout finds `value`: a path, or the bytes themselves."""
    if isinstance(value, Mapping):  # as the library `datasets` has it undecoded
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        return value if _SCHEME.match(value) else str(_folder(settings) / Path(value).expanduser())
    if isinstance(value, bytes) and value:
        return _inline(value)
    if hasattr(value, "save") and hasattr(value, "convert"):  # an image of Pillow, of a dataset that makes its own
        return _inline(_png(value, where))
    raise ConfigError(
        f"{where} holds {value!r:.60}: give a path, a data URL, the bytes of a file, or an image of Pillow, "
        "or a list of such"
    )


def _png(image: Any, where: str) -> bytes:
    file = io.BytesIO()
    try:
        image.convert(_PNG_MODES.get(image.mode, "RGB")).save(file, "png")
    except (OSError, ValueError) as error:  # it is read only now, and its file may be damaged
        raise ConfigError(f"{where} holds an image that cannot be written as PNG ({error}): replace it") from error
    return file.getvalue()


def _inline(content: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"


def _folder(settings: DataSettings) -> Path:
    """Return where relative paths begin: beside the file that names them, else where the controller was started."""
    source = Path(settings.source).expanduser()
    return (source.parent if source.is_file() else Path()).absolute()


def text_of_parts(parts: Sequence[object]) -> str | None:
    """Return the content of a message given as parts, as chat templates take it; None where it is something else."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind in ("image", "video"):
            texts.append(f"<{kind}>")
        elif kind == "text" and isinstance(text, str):
            texts.append(text)
        else:
            return None
    return "".join(texts)
