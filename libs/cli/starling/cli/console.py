"""Rich's console for texts from a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from starling.common.observe.terminal import printable


class Console(rich.console.Console):
    """Rich's console with control characters escaped in all texts, but not in its own styles.

    Texts have no markup: a name such as ``[/x]`` would be an error, and styles are given by `rich.text.Text`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
