"""Prompts from the rows of a dataset, as an endless, reproducible stream.

The stream is a function of one integer: the prompt at position `i` of a run is the same in every process and after
every restart, so a run resumes from its position alone. Epoch `e` over `n` training rows has the positions
`e * n .. e * n + n - 1` and visits every row once, in an order that follows from `(seed, e)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count, islice
from random import Random
from string import Formatter
from typing import Any, Final, Literal

import msgspec

from starling.common.counts import counted
from starling.common.errors import ConfigError
from starling.common.wire.codec import MAX_MESSAGE_BYTES
from starling.common.wire.messages import ChatMessage, Media, Prompt
from starling.controller.data.media import text_of_parts, with_media
from starling.controller.data.names import nearest
from starling.controller.data.settings import DataSettings, column_of
from starling.controller.data.sources import DataRow, load_rows

MAX_DEPTH: Final = 64
MAX_PROMPT_BYTES: Final = MAX_MESSAGE_BYTES * 3 // 4
"""A quarter of a message is left for the completions to be scored, and for what else travels with a prompt."""
MAX_EXAMPLES_BYTES: Final = MAX_MESSAGE_BYTES - (1 << 16)
"""Of the examples of a step: they travel in one message, with the settings that operators have changed."""
_ID_BYTES: Final = 32
"""What the id of a prompt in a run takes more than that of its row."""
_encode: Final = msgspec.msgpack.Encoder().encode
_HELD_OUT_SEED: Final = "starling/held-out"

Needs = Literal["prompt", "response", "pair"]
"""Required fields of a row: a prompt only, also a response to learn, or a chosen and a rejected response."""


class PromptSource:
    """The prompts of one dataset: an endless stream for training, and a fixed list for evaluation."""

    def __init__(
        self,
        train: Mapping[int, Prompt],
        held_out: Mapping[int, Prompt],
        *,
        shuffle: bool,
        seed: int,
        revision: str = "",
    ) -> None:
        """Take the prompts by row number; `train` must not be empty. `revision`: of the source, if it has one."""
        assert train, "a stream needs at least one prompt"
        self._train = dict(train)
        self._rows = tuple(self._train)
        self._held_out = [_named(prompt, f"eval/{row}") for row, prompt in held_out.items()]
        self._shuffle = shuffle
        self._seed, self.revision = seed, revision
        # Two epochs: near the end of one, groups of the next are admitted while some of this one are retried.
        self._order = lru_cache(maxsize=2)(self._make_order)

    def __len__(self) -> int:
        """Return the number of training prompts of one epoch."""
        return len(self._rows)

    def prompt(self, index_in_run: int) -> Prompt:
        """Return the prompt at position `index_in_run` >= 0 of the run; its id is ``train/<epoch>/<row>``."""
        if index_in_run < 0:
            raise ValueError(f"index_in_run = {index_in_run} must be 0 or more")
        epoch, offset = divmod(index_in_run, len(self._rows))
        row = self._order(epoch)[offset]
        return _named(self._train[row], f"train/{epoch}/{row}")

    def check_steps(self, num_steps: int, per_step: int, setting: str) -> None:
        """Check that a message holds the examples of each step: `per_step` prompts, from the first one of the run.

        `setting`: the name of the setting of their number. Raises ConfigError.
        """
        sizes = {row: len(_encode(prompt)) + _ID_BYTES for row, prompt in self._train.items()}
        if per_step * max(sizes.values()) <= MAX_EXAMPLES_BYTES:
            return
        stream = (sizes[row] for epoch in count() for row in self._order(epoch))
        for step in range(1, num_steps + 1):
            size_bytes = sum(islice(stream, per_step))
            if size_bytes > MAX_EXAMPLES_BYTES:
                raise ConfigError(
                    f"the {counted(per_step, 'example')} of step {step} have {size_bytes} bytes, and a step can have "
                    f"{MAX_EXAMPLES_BYTES}: lower {setting}, or leave out large rows (row "
                    f"{max(sizes, key=lambda row: sizes[row])} has {max(sizes.values())})"
                )

    def held_out_prompts(self) -> list[Prompt]:
        """Return the prompts that are never trained, in the order of their rows; ids are ``eval/<row>``."""
        return list(self._held_out)

    def _make_order(self, epoch: int) -> Sequence[int]:
        if not self._shuffle:
            return self._rows
        order = list(self._rows)
        Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def load_prompts(settings: DataSettings, needs: Needs = "prompt") -> PromptSource:
    """Read a dataset and return its prompts, each with the responses that it `needs`.

    A training row with the same question as a held-out row is left out of training.
    Raises ConfigError for a source or a row that cannot be used, and when no training rows are left.
    """
    loaded = load_rows(settings)
    rows = loaded.rows
    if settings.held_out >= len(rows):
        raise ConfigError(
            f"held_out = {settings.held_out} leaves no training rows of the {counted(len(rows), 'row')} of "
            f"{settings.source!r}: make it smaller"
        )
    prompts = [make_prompt(row, number, settings, needs) for number, row in enumerate(rows)]
    order = list(range(len(prompts)))
    Random(_HELD_OUT_SEED).shuffle(order)
    held_out = {row: prompts[row] for row in sorted(order[len(order) - settings.held_out :])}
    questions = {_question(prompt) for prompt in held_out.values()}
    train = {
        row: prompt for row, prompt in enumerate(prompts) if row not in held_out and _question(prompt) not in questions
    }
    if not train:
        raise ConfigError(
            f"every training row of {settings.source!r} has the same question as one of the {settings.held_out} "
            "held-out rows: make held_out smaller, or give other rows"
        )
    return PromptSource(train, held_out, shuffle=settings.shuffle, seed=settings.seed, revision=loaded.revision)


def make_prompt(row: DataRow | Prompt, number: int, settings: DataSettings, needs: Needs = "prompt") -> Prompt:
    """Return the prompt of row `number` (from 0): plain text with `settings.format`, else a conversation.

    Raises ConfigError when a column is missing or has a value of the wrong kind, and when the row lacks what it
    `needs`.
    """
    where = f"row {number} of {settings.source!r}"
    prompt = row if isinstance(row, Prompt) else _prompt_of(row, number, where, settings, needs)
    if not prompt.messages and not prompt.text:
        raise ConfigError(f"{where} is a Prompt without messages and text: set one")
    if needs != "prompt" and not prompt.reference:
        raise ConfigError(f"{where} has no response to learn: {_remedy('reference', settings.reference_column)}")
    if needs == "pair" and not prompt.rejected:
        raise ConfigError(f"{where} has no rejected response: {_remedy('rejected', settings.rejected_column)}")
    _check_encodable(prompt, where)
    return prompt


def _check_encodable(prompt: Prompt, where: str) -> None:
    """Raise ConfigError for a prompt that no message can carry: by half a character, a large number, depth or size."""
    try:
        size_bytes = len(_encode(prompt))
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{where} has half of a surrogate pair ({error.object[error.start : error.end]!r}), which is no text: "
            "correct the row"
        ) from None
    except OverflowError:
        raise ConfigError(f"{where} has a number beyond 64 bits: make it a text, or a smaller number") from None
    except (RecursionError, ValueError, TypeError) as error:
        raise ConfigError(f"{where} has a value that no message can carry ({error}): correct the row") from None
    if size_bytes > MAX_PROMPT_BYTES:
        raise ConfigError(
            f"{where} has {size_bytes} bytes with its metadata and images, and a prompt can have {MAX_PROMPT_BYTES}: "
            "shorten the row, leave it out, or name fewer metadata_columns"
        )
    if _is_deeper(prompt.metadata, MAX_DEPTH):  # its receivers have less of a stack left
        raise ConfigError(f"{where} has more than {MAX_DEPTH} lists or tables in each other: write it flatter")


def _is_deeper(value: object, limit: int) -> bool:
    """Return whether a value has more than `limit` lists or tables in each other."""
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return limit < 0 or any(_is_deeper(item, limit - 1) for item in items)


def _remedy(field: str, column: str) -> str:
    """Return how to supply a missing response."""
    if not column:
        return f"name its column in {field}_column, or set {field} if the rows are Prompts"
    return f"put a text into its column {column!r}, or leave the row out"


def _prompt_of(row: DataRow, number: int, where: str, settings: DataSettings, needs: Needs) -> Prompt:
    is_response = needs != "prompt"
    messages = () if settings.format else _conversation(row, where, settings)
    for setting in ("image_column", "video_column"):
        if name := getattr(settings, setting):
            _column(row, name, where, setting)
    messages, media = with_media(messages, row.columns, where, settings)
    return Prompt(
        id=f"row/{number}",
        text=_fill_format(row, where, settings.format) if settings.format else "",
        messages=messages,
        reference=_reference(row, where, settings.reference_column, is_response=is_response),
        metadata={**row.metadata, **_chosen_metadata(row, where, settings.metadata_columns)},
        rejected=_response(row, where, settings.rejected_column, "rejected_column") if needs == "pair" else "",
        media=media,
    )


def _column(row: DataRow, name: str, where: str, setting: str) -> Any:
    if name not in row.columns:
        raise ConfigError(
            f"{where} has no column {name!r}, which {setting} names; {nearest(name, map(str, row.columns))}"
        )
    return row.columns[name]


def _fill_format(row: DataRow, where: str, format_: str) -> str:
    names = [name for _, name, _, _ in Formatter().parse(format_) if name is not None]
    for name in names:
        _column(row, column_of(name), where, "format")
    try:
        values = {name: Formatter().get_field(name, (), row.columns)[0] for name in names}
        text = format_.format_map(row.columns)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, MemoryError) as error:
        raise ConfigError(
            f"{where} does not fit format = {format_!r} ({type(error).__name__}: {error}): correct the format"
        ) from None
    for name, value in values.items():
        if value is None:  # the text "None" must not become part of a prompt
            raise ConfigError(f"{where} has no value in {name!r}, which format names: give it a text or remove the row")
    if not text or (values and all(value == "" for value in values.values())):
        raise ConfigError(f"{where} gives an empty prompt by format = {format_!r}: correct the row or the format")
    return text


def _conversation(row: DataRow, where: str, settings: DataSettings) -> tuple[ChatMessage, ...]:
    name = settings.prompt_column
    value = _column(row, name, where, "prompt_column")
    if isinstance(value, str) and value:
        messages: tuple[ChatMessage, ...] = (ChatMessage(role="user", content=value),)
    elif isinstance(value, list | tuple) and value:
        messages = tuple(_message(item, f"column {name!r} of {where}") for item in value)
    else:
        raise ConfigError(
            f"column {name!r} of {where} holds {value!r:.60}: give a text or a list of {{role, content}} messages"
        )
    if settings.system and messages[0].role != "system":
        messages = (ChatMessage(role="system", content=settings.system), *messages)
    return messages


def _message(item: object, where: str) -> ChatMessage:
    if isinstance(item, Mapping):
        role, content = item.get("role"), item.get("content")
        if isinstance(content, list | tuple):
            content = text_of_parts(content)
        if isinstance(role, str) and isinstance(content, str):
            return ChatMessage(role=role, content=content)
    raise ConfigError(
        f"{where} holds the message {item!r:.60}: a message has a role and a content, both texts, "
        "or a content of parts (text, image, video)"
    )


def _reference(row: DataRow, where: str, name: str, *, is_response: bool) -> str:
    if not name:
        return ""
    if is_response:
        return _response(row, where, name, "reference_column")
    value = _column(row, name, where, 'reference_column (empty: "" for none)')
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(
        f"column {name!r} of {where} holds {value!r:.60}: a reference is a text or a number; pass other values to "
        "the scorers with metadata_columns"
    )


def _response(row: DataRow, where: str, name: str, setting: str) -> str:
    """Return a response: a text, or the content of the last message of a conversation. Empty if there is none."""
    if not name:
        return ""
    value = _column(row, name, where, setting)
    if value is None or value == []:
        return ""
    if isinstance(value, list | tuple):
        last = _message(value[-1], f"column {name!r} of {where}")
        if last.role != "assistant":
            raise ConfigError(
                f"column {name!r} of {where} ends with a message of the {last.role}: a response is the assistant's"
            )
        return last.content
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(
        f"column {name!r} of {where} holds {value!r:.60}: a response is a text, or a list of messages that ends with "
        "the assistant's"
    )


def _chosen_metadata(row: DataRow, where: str, names: Iterable[str]) -> dict[str, Any]:
    chosen = {name: _column(row, name, where, "metadata_columns") for name in names}
    try:
        json.dumps(chosen)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the metadata_columns of {where} are not JSON values ({error}): choose other columns"
        ) from None
    return chosen


def _named(prompt: Prompt, id_: str) -> Prompt:
    return msgspec.structs.replace(prompt, id=id_)


def _question(prompt: Prompt) -> tuple[str, tuple[ChatMessage, ...], tuple[Media, ...]]:
    """Return the parts of a prompt that are equal for equal questions."""
    return prompt.text, prompt.messages, prompt.media
