"""Dialogs in front of the views: keys, details of a row, a question to confirm, and one line to type."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from starling.common.observe.terminal import one_line, printable

BOX = """
{name} {{ align: center middle; }}
{name} > .box {{ width: 90%; max-width: 110; height: auto; max-height: 90%; border: round ansi_cyan; padding: 0 1; }}
"""


class TextDialog(ModalScreen[None]):
    """A text of any length, which scrolls; escape, enter or q closes it."""

    DEFAULT_CSS = BOX.format(name="TextDialog")
    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter,question_mark", "dismiss", "close")]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title, self._text = printable(title), printable(text)

    def compose(self) -> ComposeResult:
        """Return the box."""
        with VerticalScroll(classes="box") as box:
            box.border_title = Text(self._title)
            box.border_subtitle = Text("escape closes")
            yield Static(Text(self._text))

    def on_mount(self) -> None:
        """Let the arrow keys scroll."""
        self.query_one(VerticalScroll).focus()


class Confirm(ModalScreen[bool]):
    """A question; y says yes, everything else that is a key of it no."""

    DEFAULT_CSS = BOX.format(name="Confirm")
    BINDINGS: ClassVar[list[BindingType]] = [("y", "answer(True)", "yes"), ("n,escape,q", "answer(False)", "no")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = printable(question)

    def compose(self) -> ComposeResult:
        """Return the box."""
        with Vertical(classes="box") as box:
            box.border_title = Text("confirm")
            yield Static(Text(f"{self._question}\n\n  y  yes      n  no"))

    def action_answer(self, answer: bool) -> None:
        """Close with the answer."""
        self.dismiss(answer)


class Ask(ModalScreen[str]):
    """One line to type; enter takes it, escape leaves with an empty one."""

    DEFAULT_CSS = BOX.format(name="Ask") + "Ask Input { border: none; height: 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "leave", "cancel")]

    def __init__(self, question: str, note: str = "", text: str = "") -> None:
        """`text` is there already, and may be changed."""
        super().__init__()
        self._question, self._note, self._text = printable(question), printable(note), one_line(text)

    def compose(self) -> ComposeResult:
        """Return the box."""
        with Vertical(classes="box") as box:
            box.border_title = Text(self._question)
            yield Input(self._text)
            yield Static(Text(f"\n{self._note}" if self._note else "", style="dim"))

    def on_mount(self) -> None:
        """Take the keys."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Close with what was typed."""
        event.stop()
        self.dismiss(event.value.strip())

    def action_leave(self) -> None:
        """Close with nothing."""
        self.dismiss("")
