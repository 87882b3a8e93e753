"""Texts of tokens, by the tokenizer in the model's folder."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from starling.cli.run.attempt import Attempt
from starling.common.errors import ConfigError
from starling.common.settings import read_toml

MAX_TOKENIZERS: Final = 2
"""Tokenizers in memory: a large one takes a hundred MB."""
REPLACEMENT: Final = "\ufffd"
_lock = threading.Lock()
_tokenizers: OrderedDict[Path, Any] = OrderedDict()


def pieces(attempt: Attempt, ids: Sequence[int]) -> list[str] | None:
    """Return the text of each token, None where the model's folder has no tokenizer that can be read here.

    A character of several tokens stands with its last one.
    """
    with _lock:
        tokenizer = _tokenizer(attempt)
        return None if tokenizer is None else _texts(tokenizer, ids)


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the texts, by decoding windows of tokens: a token alone may lose the space before it."""
    texts, begin, shown = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
        if text.endswith(REPLACEMENT) and end - begin < 8:  # within a character
            texts.append("")
            continue
        texts.append(text[len(shown) :] if text.startswith(shown) else text)
        # Begin again with this token as the context of the next one.
        begin = end - 1
        shown = tokenizer.decode(ids[begin:end], skip_special_tokens=False)
    return texts


def _tokenizer(attempt: Attempt) -> Any:
    path = _folder(attempt) / "tokenizer.json"
    if path in _tokenizers:
        _tokenizers.move_to_end(path)
        return _tokenizers[path]
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises nothing more specific
        tokenizer = None
    _tokenizers[path] = tokenizer
    while len(_tokenizers) > MAX_TOKENIZERS:
        _tokenizers.popitem(last=False)
    return tokenizer


def _folder(attempt: Attempt) -> Path:
    """Return the model's folder, as the services' configuration names it."""
    try:
        model = read_toml(attempt.config).get("model")
    except ConfigError:
        return attempt.folder / "model"
    path = model.get("path") if isinstance(model, dict) else None
    return Path(path) if isinstance(path, str) and path else attempt.folder / "model"
