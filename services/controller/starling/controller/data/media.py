"""Images and videos of a row, as paths or data URLs that a rollout can open."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from msgspec.structs import replace

from starling.algo.text import markers
from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.wire.messages import ChatMessage, Media
from starling.controller.data.settings import DataSettings

MAX_INLINE_BYTES: Final = 8 << 20
"""Maximum bytes of the media inside a prompt. A control message may have twice as many."""

_PNG_MODES: Final = {mode: mode for mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")} | {"I": "I;16"}
"""PNG modes of Pillow's modes. All other modes (such as CMYK) are converted to RGB, as a rollout would do."""

Kind = Literal["image", "video"]
_SCHEME: Final = re.compile("[a-z][a-z0-9+.-]+:", re.IGNORECASE)


def with_media(
    messages: tuple[ChatMessage, ...], columns: Mapping[str, Any], where: str, settings: DataSettings
) -> tuple[tuple[ChatMessage, ...], tuple[Media, ...]]:
    """Return the conversation with a marker for each image and video of the row, and the media in that order.

    In a conversation without markers, all media come before the text of the first user message.

    Raises:
        ConfigError: a value is not an image, markers and media differ in number, or the media are too large.
    """
    by_kind = {"image": _media("image", columns, where, settings), "video": _media("video", columns, where, settings)}
    if not (settings.image_column or settings.video_column):
        return messages, ()
    kinds = markers(messages)
    if not kinds:
        kinds = [kind for kind, media in by_kind.items() for _ in media]
        messages = _marked(messages, "".join(f"<{kind}>" for kind in kinds))
    for kind, media in by_kind.items():
        if kinds.count(kind) != len(media):
            raise ConfigError(
                f"{where} has {counted(len(media), kind)} and its messages contain <{kind}> "
                f"{counted(kinds.count(kind), 'time')}: write it once for each, or not at all "
                "to have them before the text"
            )
    inline = sum(len(item.uri) for media in by_kind.values() for item in media)
    if inline > MAX_INLINE_BYTES:
        raise ConfigError(
            f"{where} has images or videos of {inline} bytes in base64, and a prompt holds at most "
            f"{MAX_INLINE_BYTES}: give paths that the rollouts can open"
        )
    each: dict[str, Iterator[Media]] = {kind: iter(media) for kind, media in by_kind.items()}
    return messages, tuple(next(each[kind]) for kind in kinds)


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
    """Return the path or URL of `value`, or a data URL of its bytes."""
    if isinstance(value, Mapping):  # an image that the library `datasets` has not decoded
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        return value if _SCHEME.match(value) else str(_folder(settings) / _expanded(value))
    if isinstance(value, bytes) and value:
        return _inline(value)
    if hasattr(value, "save") and hasattr(value, "convert"):  # an image of Pillow, from a dataset that decodes them
        return _inline(_png(value, where))
    raise ConfigError(
        f"{where} holds {value!r:.60}: give a path, a data URL, the bytes of a file, an image of Pillow, "
        "or a list of these"
    )


def _expanded(path: str) -> Path:
    """Return `path` with the home folder of a user for ``~``; unchanged if there is none, as a shell has it."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # no such user, or a name with a null character
        return Path(path)


def _png(image: Any, where: str) -> bytes:
    file = io.BytesIO()
    try:
        image.convert(_PNG_MODES.get(image.mode, "RGB")).save(file, "png")
    except (OSError, ValueError) as error:  # Pillow reads lazily, and the file may be damaged
        raise ConfigError(f"{where} holds an image that cannot be written as PNG ({error}): replace it") from error
    return file.getvalue()


def _inline(content: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(content).decode()}"


def _folder(settings: DataSettings) -> Path:
    """Return the base of relative paths: the folder of the dataset's file, else the working directory."""
    source = Path(settings.source).expanduser()
    return (source.parent if source.is_file() else Path()).absolute()


def text_of_parts(parts: Sequence[object]) -> str | None:
    """Return the text of a message given as parts, as in chat templates; None if a part is of another kind."""
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
