"""The settings of one dataset."""

from __future__ import annotations

from string import Formatter
from typing import Any, Self

from pydantic import Field, model_validator

from starling.common.ranges import MAX_COUNT, MAX_GROUPS, MAX_WHOLE
from starling.common.settings import Seed, SettingsSection


class DataSettings(SettingsSection):
    """One dataset: where its rows come from, how a row becomes a prompt, and in which order."""

    source: str
    """Where the rows come from: a path to a .jsonl or .parquet file, `hf:NAME_OR_FOLDER`, `reasoning_gym:TASK`, or
    `MODULE:FACTORY` (also `path/file.py:FACTORY`), a function of no arguments that returns the rows."""
    split: str = "train"
    """Split of a Hugging Face dataset. In a local folder, the names of its files or subfolders have the word `train`,
    `test` or `validation`; where none has, all are `train`."""
    config: str = ""
    """Configuration (subset) of a Hugging Face dataset; empty for its only one. Of a local folder, a subfolder."""
    size: int = Field(default=1000, ge=1, le=10 * MAX_GROUPS)
    """Rows that a reasoning-gym task generates. Repeated questions are dropped, so there may be fewer."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of a reasoning-gym task, for example `min_word_len`. The task has its own `seed` (default 0), so that
    another order of training does not change the held-out rows."""

    prompt_column: str = "question"
    """Column of the prompt: a text, which becomes a user message, or a list of {role, content} messages."""
    reference_column: str = "answer"
    """Column of the reference answer, or of the response to learn (the chosen one of a pair); empty if the rows have
    none."""
    rejected_column: str = ""
    """Column of the rejected response of a pair, for preference learning. A response is a text, or a list of messages
    that ends with one of the assistant."""
    metadata_columns: tuple[str, ...] = ()
    """Columns that the scorers also get, as the prompt's metadata."""
    image_column: str = ""
    """Column of the images, one or a list: paths (relative to the dataset's file), data URLs, bytes, or images of the
    library `datasets`. Each replaces an `<image>` of the prompt; without these they come before its text."""
    video_column: str = ""
    """Column of the videos, likewise at `<video>`: animated images, or folders of frames in alphabetical order."""
    video_fps: float = Field(default=0.0, ge=0.0, le=MAX_COUNT)
    """Frames per second of the videos; 0 if unknown, which counts as 2."""
    system: str = ""
    """System message of conversations that have none; empty for no system message."""
    format: str = ""
    """Format string over the columns of a row, for example `"{question}\\n"` or `"{metadata[word]}>"`. The result is
    a plain-text prompt without chat template. Empty to use `prompt_column` and the model's chat template."""

    shuffle: bool = True
    """Whether to shuffle the rows anew in each epoch."""
    seed: Seed = 0
    """Seed of the shuffling, together with the number of the epoch."""
    limit: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Number of rows to use, from the first; 0 for all."""
    held_out: int = Field(default=0, ge=0, le=MAX_WHOLE)
    """Rows that are held out for evaluation and never trained. The choice does not depend on `seed`."""

    @property
    def columns(self) -> frozenset[str]:
        """Names of the columns of which a prompt is made."""
        parsed = [*Formatter().parse(self.format)]
        parsed += [inner for _, _, spec, _ in parsed for inner in Formatter().parse(spec or "")]  # as in {text:{width}}
        fields = [name for _, name, _, _ in parsed if name is not None]
        named = (self.prompt_column, self.reference_column, self.rejected_column, self.image_column, self.video_column)
        return frozenset({*named, *self.metadata_columns, *map(column_of, fields)})

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.format and self.system:
            raise ValueError(
                f"system = {self.system!r} is a chat message, but format makes plain text: "
                "put the text into format, or remove one of the two"
            )
        if self.format and (self.image_column or self.video_column):
            raise ValueError("format makes plain text, and images and videos need a conversation: use prompt_column")
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.format) if name is not None]
        except ValueError as error:
            raise ValueError(
                f"format = {self.format!r} is not a format string ({error}): write {{column}}, and double a brace "
                "that is meant as text"
            ) from None
        if any(not name or name[0] in "0123456789.[" for name in fields):
            raise ValueError(f"format = {self.format!r} has a field without a column: write {{column}}")
        return self


def column_of(field: str) -> str:
    """Return the column that a field of a format names, as in ``{metadata[word]}``."""
    return field.replace("[", ".").partition(".")[0]
