"""The screen of `starling top`: a header, one of several views, and a line with the keys.

A thread follows the run (`runs.live`) and tells the screen when something is new; only the view that is shown is drawn.
All texts of a run are hostile: they are escaped where they are made, and `EscapeControls` looks at every character that
leaves for the terminal once more.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

from rich.segment import Segment
from rich.text import Text
from textual import on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import VerticalScroll
from textual.filter import LineFilter, NoColor
from textual.widgets import ContentSwitcher, DataTable, Input, Static

from starling.cli.run.screen import Pace
from starling.cli.runs.live import LiveRun
from starling.cli.top import control, overview, tables
from starling.cli.top.dialogs import Ask, Confirm, TextDialog
from starling.common.errors import ConfigError
from starling.common.observe.terminal import one_line, printable

POLL_S: Final = 0.5
"""How long the thread waits for a snapshot, at most."""
WHY_EVERY_S: Final = 3.0
"""How often `starling why` is asked while its answer is shown."""
NOTICE_S: Final = 12.0
"""How long an answer of the controller is shown."""
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
VIEWS: Final = ("overview", "replicas", "curves", "evaluations", "waits", "events", "completions")
TABLES: Final = ("replicas", "evaluations", "events", "completions")
KEYS: Final = """\
1 to 7            show a view
tab, shift+tab    show the next view, the previous one
arrows, page up   scroll; in a table, choose a row
enter             show everything about the chosen row
s                 sort by the next column
r                 reverse the order
/                 show only rows, or curves, with a text
escape            show all again
space             pause, go on
?                 show this help
q, ctrl+c         quit"""
CONTROL_KEYS: Final = """\
e                 evaluate the newest version
c                 save a state before the next step
x                 set a setting from the next step on
d                 drain a replica: the chosen one of the view "replicas", or one by its name
n                 scale: set the number of replicas of a role"""
READ_ONLY: Final = "This view only reads: start it with --allow-control."


class EscapeControls(LineFilter):
    """Replaces every control character that a text still has, so that none reaches the terminal."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the segments of a line without control characters."""
        return [
            one if one.control or one.text.isprintable() else one._replace(text=_inert(one.text)) for one in segments
        ]


def _inert(text: str) -> str:
    return "".join(one if one.isprintable() or one_line(one) == one else "\N{REPLACEMENT CHARACTER}" for one in text)


class LiveTable(DataTable[Text]):
    """A table that is drawn again and again, and keeps its cursor at the same row."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False, cell_padding=1)
        self.order = tables.Order()
        self._titles: tuple[str, ...] = ()
        self._rows: list[tables.Row] = []

    def show(self, table: tables.Table, needle: str) -> None:
        """Draw the rows that contain `needle`, in the chosen order."""
        rows, chosen = table.chosen(self.order, needle), self.chosen_row()
        titles = tuple(self._title(index, title) for index, title in enumerate(table.columns))
        is_new = titles != self._titles
        if is_new:
            self.clear(columns=True)
            for title, name in zip(titles, table.columns, strict=True):
                self.add_column(Text(title, justify="right" if name in table.numbers else "left"), key=name)
            self._titles = titles
        if is_new or not rows or [row.key for row in rows] != [row.key for row in self._rows]:
            self._fill(table, rows, chosen)
        else:
            self._update(table, rows)
        self._rows = rows

    def _title(self, index: int, title: str) -> str:
        return title if index != self.order.column else f"{title} {'▼' if self.order.descending else '▲'}"

    def _fill(self, table: tables.Table, rows: Sequence[tables.Row], chosen: tables.Row | None) -> None:
        self.clear()
        if not rows:
            said = table.empty if not table.rows else "No row has this text; escape shows all."
            self.add_row(Text(said, style="dim"), *(Text() for _ in table.columns[1:]))
        for row in rows:
            self.add_row(*_cells(table, row), key=row.key)
        keys = [row.key for row in rows]
        if chosen is not None and chosen.key in keys:
            self.move_cursor(row=keys.index(chosen.key), animate=False)

    def _update(self, table: tables.Table, rows: Sequence[tables.Row]) -> None:
        for before, row in zip(self._rows, rows, strict=True):
            if before == row:
                continue
            for name, cell in zip(table.columns, _cells(table, row), strict=True):
                self.update_cell(row.key, name, cell, update_width=True)

    def chosen_row(self) -> tables.Row | None:
        """Return the row at the cursor."""
        return self._rows[self.cursor_row] if 0 <= self.cursor_row < len(self._rows) else None

    def sort_by_next(self, num_columns: int) -> None:
        """Sort by the next column; after the last one, as it happened."""
        column = self.order.column + 1
        self.order = tables.Order(column if column < num_columns else -1, self.order.descending)


def _cells(table: tables.Table, row: tables.Row) -> list[Text]:
    return [
        Text(tables.cell_text(cell), style=row.style, justify="right" if name in table.numbers else "left")
        for name, cell in zip(table.columns, row.cells, strict=True)
    ]


class TopApp(App[int]):
    """The live view of one run."""

    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = None
    CSS = """
    Screen { layout: vertical; }
    #header { height: 1; text-style: reverse; }
    #status { height: auto; max-height: 6; }
    #tabs { height: 1; margin-bottom: 1; }
    ContentSwitcher { height: 1fr; }
    #overview { height: 1fr; }
    DataTable { height: 1fr; scrollbar-size: 0 1; }
    DataTable > .datatable--header { text-style: bold underline; color: ansi_default; background: ansi_default; }
    DataTable > .datatable--cursor { text-style: reverse; color: ansi_default; background: ansi_default; }
    DataTable > .datatable--hover { background: ansi_default; }
    VerticalScroll { scrollbar-size-vertical: 1; }
    #filter { height: 1; border: none; padding: 0; display: none; }
    #notice { height: auto; max-height: 4; display: none; }
    #keys { height: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(n + 1), f"view('{view}')", view, show=False) for n, view in enumerate(VIEWS)),
        Binding("tab", "turn(1)", "next view", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", "previous view", show=False, priority=True),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("space", "pause", "pause"),
        Binding("question_mark,h", "help", "help"),
        Binding("e", "evaluate", "evaluate", show=False),
        Binding("c", "checkpoint", "checkpoint", show=False),
        Binding("x", "set", "set", show=False),
        Binding("d", "drain", "drain", show=False),
        Binding("n", "scale", "scale", show=False),
        Binding("escape", "all", "all", show=False),
        Binding("q", "leave", "quit"),
        Binding("ctrl+c", "leave", "quit", show=False, priority=True),
    ]

    def __init__(self, live: LiveRun, name: str, operator: control.Operator | None, *, allow_control: bool) -> None:
        """Show the run `name`, which `live` follows; this app closes it.

        Args:
            operator: asks the controller why the run waits; None where no operator's key is known.
            allow_control: whether the keys of an operator do anything.
        """
        super().__init__()
        self.theme = "ansi-dark"  # the colours of the terminal itself, dark or light, or none
        self._live, self._run_name = live, name
        self._operator, self._allow_control = operator, allow_control
        self._pace, self._needle = Pace(), dict.fromkeys(VIEWS, "")
        self._is_paused, self._is_over = False, threading.Event()
        self._why, self._why_at, self._is_asking = "", float("-inf"), False
        self._samples: list[dict[str, Any]] = []
        self._notice_until = float("-inf")

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Return the filters of textual, the one for control characters, and with NO_COLOR the one for all colours."""
        return [EscapeControls(), *super().get_line_filters(), *([NoColor()] if self.no_color else [])]

    def compose(self) -> ComposeResult:
        """Return the parts of the screen."""
        yield Static(id="header")
        yield Static(id="status")
        yield Static(id="tabs")
        with ContentSwitcher(initial=VIEWS[0]):
            yield Static(id="overview")
            yield LiveTable(id="replicas")
            with VerticalScroll(id="curves"):
                yield Static(id="curves-text")
            yield LiveTable(id="evaluations")
            with VerticalScroll(id="waits"):
                yield Static(id="waits-text")
            yield LiveTable(id="events")
            yield LiveTable(id="completions")
        yield Static(id="notice")
        yield Input(id="filter", placeholder="text of the rows to show", disabled=True)
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Begin to follow the run, and restore the terminal when a signal ends this process."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in SIGNALS:
                loop.add_signal_handler(number, self.exit, 128 + number)
        self.run_worker(self._follow, thread=True, exit_on_error=True)
        self.set_interval(1.0, self._draw)
        self._draw()

    def on_unmount(self) -> None:
        """End the thread."""
        self._is_over.set()

    def on_resize(self) -> None:
        """Draw anew."""
        self.call_after_refresh(self._draw)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            while not self._is_over.is_set():
                if self._live.poll(POLL_S) and not self._is_over.is_set():
                    self._from_thread(self._draw)
        finally:
            self._live.close()

    def _from_thread(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call `callback` in the thread of the screen, unless that has ended."""
        if self._loop is not None and not self._is_over.is_set():
            self._loop.call_soon_threadsafe(self.call_later, callback, *arguments)

    # --- drawing ---------------------------------------------------------------------------------------------------

    @property
    def _view(self) -> str:
        return self.query_one(ContentSwitcher).current or VIEWS[0]

    def _draw(self) -> None:
        if not self.is_running or len(self.screen_stack) != 1:  # a dialog stands still
            return
        width = self.size.width
        self.query_one("#tabs", Static).update(self._tabs(width))
        self.query_one("#keys", Static).update(self._keys(width))
        if time.monotonic() > self._notice_until:
            self.query_one("#notice").display = False
        if self._is_paused:
            return
        self.query_one("#header", Static).update(
            overview.header(self._run_name, self._live.snapshot, self._pace, width)
        )
        self.query_one("#status", Static).update(overview.status(self._live, width))
        self._draw_view(self._view)

    def _draw_view(self, view: str) -> None:
        needle = self._needle[view]
        if view in TABLES:
            table = self._table(view)
            self.query_one(f"#{view}", LiveTable).show(table, needle)
        elif view == "overview":
            place = self.query_one("#overview", Static)
            place.update(overview.overview(self._live, max(1, place.size.width), max(1, place.size.height)))
        elif view == "curves":
            width = self.query_one("#curves").scrollable_content_region.width
            self.query_one("#curves-text", Static).update(overview.curves(self._live, max(1, width), needle))
        else:
            self._draw_waits()

    def _table(self, view: str) -> tables.Table:
        if view == "replicas":
            return tables.replica_table(self._live.snapshot)
        if view == "evaluations":
            return tables.evaluation_table(self._live.evaluations())
        if view == "events":
            return tables.event_table(self._live.events())
        return tables.sample_table(self._samples)

    def _draw_waits(self) -> None:
        snapshot = self._live.snapshot
        brief = f"The run waits for {snapshot.waiting_for}." if snapshot is not None and snapshot.waiting_for else ""
        if self._operator is None:
            text = (
                f"{brief}\n\nAll waits, with their deadlines, need an operator's key: give --key, or see starling why."
            )
        else:
            text = self._why or brief
            self._ask_why()
        self.query_one("#waits-text", Static).update(Text(printable(text)))

    def _tabs(self, width: int) -> Text:
        line = Text()
        for number, view in enumerate(VIEWS):
            name = view if width >= 92 else {"evaluations": "evals", "completions": "samples"}.get(view, view)
            line.append(f" {number + 1} {name} ", style="bold reverse" if view == self._view else "")
        line.truncate(width)
        return line

    def _keys(self, width: int) -> Text:
        line, needle = Text(style="dim"), self._needle[self._view]
        if self._is_paused:
            line.append(" paused ", style="bold yellow not dim")
        if needle:
            line.append(f" /{one_line(needle)} ", style="bold yellow not dim")
        shown = [("q", "quit"), ("?", "help"), ("/", "filter"), ("space", "pause")]
        if self._view in TABLES:
            shown += [("s", "sort"), ("r", "reverse"), ("enter", "details")]
        if self._allow_control:
            shown += [("e", "evaluate"), ("c", "checkpoint"), ("x", "set"), ("d", "drain"), ("n", "scale")]
        for key, what in shown:
            line.append(f" {key}", style="bold not dim").append(f" {what} ")
        line.truncate(width)
        return line

    def _notice(self, text: str, style: str = "") -> None:
        place = self.query_one("#notice", Static)
        place.update(Text(one_line(text), style=style))
        place.display = True
        self._notice_until = time.monotonic() + NOTICE_S

    # --- keys ------------------------------------------------------------------------------------------------------

    def action_view(self, view: str) -> None:
        """Show another view."""
        if len(self.screen_stack) != 1:
            return
        self.query_one(ContentSwitcher).current = view
        focused = self.query_one(f"#{view}")
        if focused.can_focus:
            focused.focus()
        else:
            self.set_focus(None)
        if view == "completions":
            self.run_worker(self._read_samples, thread=True, exclusive=True, group="samples")
        self.call_after_refresh(self._draw)

    def action_turn(self, by: int) -> None:
        """Show the next view, or the one before."""
        self.action_view(VIEWS[(VIEWS.index(self._view) + by) % len(VIEWS)])

    def action_sort(self) -> None:
        """Sort by the next column."""
        if self._view in TABLES:
            self.query_one(f"#{self._view}", LiveTable).sort_by_next(len(self._table(self._view).columns))
            self._draw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        if self._view in TABLES:
            table = self.query_one(f"#{self._view}", LiveTable)
            table.order = tables.Order(table.order.column, not table.order.descending)
            self._draw()

    def action_filter(self) -> None:
        """Type the text of a filter."""
        entry = self.query_one("#filter", Input)
        entry.value, entry.display, entry.disabled = self._needle[self._view], True, False
        entry.focus()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        """Filter by what is typed so far."""
        self._needle[self._view] = event.value
        self._draw()

    @on(Input.Submitted, "#filter")
    def filter_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        self._leave_filter()

    def _leave_filter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.display, entry.disabled = False, True
        self.action_view(self._view)

    def action_all(self) -> None:
        """Show all rows again."""
        self._needle[self._view] = ""
        self._leave_filter()

    def action_pause(self) -> None:
        """Stop, or go on."""
        self._is_paused = not self._is_paused
        self._draw()

    def action_help(self) -> None:
        """Show the keys."""
        more = f"\n\nWith --allow-control:\n{CONTROL_KEYS}" + ("" if self._allow_control else f"\n{READ_ONLY}")
        self._open(TextDialog("keys", KEYS + more))

    def action_leave(self) -> None:
        """Quit."""
        self.exit(0)

    @on(DataTable.RowSelected)
    def show_details(self, event: DataTable.RowSelected) -> None:
        """Show everything about a row."""
        row = self.query_one(f"#{event.data_table.id}", LiveTable).chosen_row()
        if row is not None and row.detail:
            self._open(TextDialog(self._view.removesuffix("s"), row.detail))

    def _open(self, dialog: TextDialog) -> None:
        if len(self.screen_stack) == 1:
            self.push_screen(dialog)

    def _read_samples(self) -> None:
        try:
            self._samples = self._live.samples()
        except ConfigError as error:
            self._from_thread(self._notice, str(error), "yellow")
        self._from_thread(self._draw)

    # --- an operator's requests ------------------------------------------------------------------------------------

    def action_evaluate(self) -> None:
        """Ask for an evaluation."""
        if self._may_control():
            self._confirm(control.evaluation())

    def action_checkpoint(self) -> None:
        """Ask for a saved state."""
        if self._may_control():
            self._confirm(control.checkpoint())

    def action_set(self) -> None:
        """Ask for a setting and its value, and change it."""
        if self._may_control():
            self._ask("set: KEY VALUE", control.change, control.changeable())

    def action_drain(self) -> None:
        """Ask for the name of a replica, and drain it."""
        if not self._may_control():
            return
        row = self.query_one("#replicas", LiveTable).chosen_row() if self._view == "replicas" else None
        replicas = self._live.snapshot.replicas if self._live.snapshot is not None else ()
        self._ask("drain: NAME", control.draining, "  ".join(one.name for one in replicas), row.key if row else "")

    def action_scale(self) -> None:
        """Ask for a role and a number of replicas, and scale."""
        if self._may_control():
            roles = Counter(one.role for one in self._live.snapshot.replicas) if self._live.snapshot is not None else {}
            present = "  ".join(f"{role} {num}" for role, num in roles.items())
            self._ask("scale: ROLE NUMBER", control.scaling, f"present: {present}" if present else "")

    def _ask(self, question: str, make: Callable[[str], control.Request], note: str, text: str = "") -> None:
        """Have one line typed, which makes a request that is then confirmed."""

        def typed(words: str | None) -> None:
            if not words:
                return
            try:
                request = make(words)
            except ConfigError as error:
                self._notice(str(error), "red")
                return
            self._confirm(request)

        self.push_screen(Ask(question, note, text), typed)

    def _may_control(self) -> bool:
        if len(self.screen_stack) != 1:
            return False
        if not self._allow_control:
            self._notice(READ_ONLY, "yellow")
        return self._allow_control

    def _confirm(self, request: control.Request) -> None:
        def answered(is_confirmed: bool | None) -> None:
            if is_confirmed:
                self._notice("asking the controller ...")
                self.run_worker(lambda: self._send(request), thread=True, group="operator")

        self.push_screen(Confirm(request.question), answered)

    def _send(self, request: control.Request) -> None:
        assert self._operator is not None, "control has an operator's key"
        ok, text = self._operator.ask(request.make)
        self._from_thread(self._notice, text, "green" if ok else "red")

    def _ask_why(self) -> None:
        now = time.monotonic()
        if not self._is_asking and now - self._why_at >= WHY_EVERY_S:
            self._is_asking, self._why_at = True, now
            self.run_worker(self._read_why, thread=True, group="why")

    def _read_why(self) -> None:
        assert self._operator is not None, "only an operator is asked"
        _, self._why = self._operator.why()
        self._is_asking = False
        self._from_thread(self._draw)
