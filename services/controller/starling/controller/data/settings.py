"""The settings of one dataset."""

from __future__ import annotations

from string import Formatter
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DataSettings(BaseModel):
    """One dataset: where its rows come from, how a row becomes a prompt, and in which order."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    source: str
    """Where the rows come from: a path to a .jsonl or .parquet file, `hf:NAME_OR_FOLDER`, `reasoning_gym:TASK`, or
    `MODULE:FACTORY` (also `path/file.py:FACTORY`), a function of no arguments that returns the rows."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    config: str = ""
    """Configuration (subset) of a Hugging Face dataset; empty for its only one."""
    size: int = Field(default=1000, ge=1)
    """Rows that a reasoning-gym task generates; a question that repeats is taken once, so there may be fewer."""
    options: dict[str, Any] = {}
    """Settings of a reasoning-gym task, for example `min_word_len`. Its `seed` (0 unless given here) decides the
    rows, so that another order of training leaves the held-out rows as they are."""

    prompt_column: str = "question"
    """Column of the prompt: a text, which becomes a user message, or a list of {role, content} messages."""
    reference_column: str = "answer"
    """Column of the reference answer, or of the response to learn (the better one of two); empty when the rows have
    none."""
    rejected_column: str = ""
    """Column of the worse of two responses, where preferences are learnt. A response is a text, or a list of messages
    that ends with the assistant's."""
    metadata_columns: tuple[str, ...] = ()
    """Columns that the scorers get besides, as the prompt's metadata."""
    image_column: str = ""
    """Column of the images, one or a list: paths (relative ones begin beside the dataset's file), data URLs, bytes, or
    what the library `datasets` makes of images. They stand where the prompt says `<image>`, else before its text."""
    video_column: str = ""
    """Column of the videos, likewise, at `<video>`: animated images, or folders of frames in the order of names."""
    video_fps: float = Field(default=0.0, ge=0.0)
    """Frames a second of the videos; 0 for not known, which counts as 2."""
    system: str = ""
    """Text of a system message put before each conversation that has none; empty for no system message."""
    format: str = ""
    """Format string over the columns of a row, for example `"{question}\\n"` or `"{metadata[word]}>"`. It makes
    a plain-text prompt, tokenized as it stands; empty to use `prompt_column` and the model's chat template."""

    shuffle: bool = True
    """Whether each pass takes the rows in another order."""
    seed: int = 0
    """Decides, with the number of the pass, the order of the rows."""
    limit: int = Field(default=0, ge=0)
    """How many of the first rows to use; 0 for all."""
    held_out: int = Field(default=0, ge=0)
    """Rows kept for evaluation and never trained: the last ones of an order that no setting changes."""

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        if self.format and self.system:
            raise ValueError(
                f"system = {self.system!r} is a chat message, but format makes plain text: "
                "put the text into format, or remove one of the two"
            )
        if self.format and (self.image_column or self.video_column):
            raise ValueError("format makes plain text, and images and videos stand in conversations: use prompt_column")
        try:
            fields = [name for _, name, _, _ in Formatter().parse(self.format) if name is not None]
        except ValueError as error:
            raise ValueError(
                f"format = {self.format!r} is not a format string ({error}): write {{column}}, and a brace "
                "that is meant as text twice"
            ) from None
        if any(not name or name[0] in "0123456789.[" for name in fields):
            raise ValueError(f"format = {self.format!r} has a field without a column: write {{column}}")
        return self
