"""Tables of docs/performance.md, made from the history of figures (`make figures`).

    python bench/figures.py [--check]

The page has a pair of comments for each table; between them is what this script wrote:

    <!-- figures: wire.py -->
    <!-- end of figures -->

A table has every figure that the script has printed: its values at the commit that was measured last, at full size and
by the quick form, and its goal. `--check` writes nothing, and exits with 1 if the page is not what would be written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from history import ROOT, Entry, read_history

PAGE = ROOT / "docs" / "performance.md"
TABLE = re.compile(r"<!-- figures: (\S+) -->\n.*?<!-- end of figures -->", re.DOTALL)
BUSY = 0.25
"""Cores taken by other work from which on a measurement is marked as one of a busy machine."""


def is_quick(entry: Entry) -> bool:
    """Say whether the figure comes from the quick form of its bench."""
    return "--quick" in entry.script


def render(page: str, history: Sequence[Entry]) -> str:
    """Return the page with its tables made anew."""
    return TABLE.sub(lambda found: framed(found[1], table(found[1], history)), page)


def framed(script: str, text: str) -> str:
    """Return a table between its comments; without the empty lines the comments would end it."""
    return f"<!-- figures: {script} -->\n\n{text}\n\n<!-- end of figures -->"


def table(script: str, history: Sequence[Entry]) -> str:
    """Return the table of a script, in the order in which its figures were recorded first."""
    by_figure: dict[str, list[Entry]] = {}
    for entry in history:
        if entry.file == script:
            by_figure.setdefault(entry.figure, []).append(entry)
    if not by_figure:
        return "No figure of this script has been recorded yet."
    kinds = [kind for kind in (False, True) if any(is_quick(e) is kind for es in by_figure.values() for e in es)]
    heads = {False: "full run", True: "quick run"}
    rows = ["| figure | " + " | ".join(heads[kind] for kind in kinds) + " | goal |", "|---" * (len(kinds) + 2) + "|"]
    for figure, entries in by_figure.items():
        cells = [latest([entry for entry in entries if is_quick(entry) is kind]) for kind in kinds]
        rows.append(f"| {' | '.join([named(figure), *cells, goal(entries[-1])])} |")
    return "\n".join(rows)


def named(figure: str) -> str:
    """Return the name as code where it is an identifier, else as text."""
    return f"`{figure}`" if re.fullmatch(r"[\w.]+", figure) else figure


def latest(entries: Sequence[Entry]) -> str:
    """Return the values of the commit that was recorded last, with commit and date."""
    if not entries:
        return ""
    commit = entries[-1].commit
    same = [entry for entry in entries if entry.commit == commit]
    values = ", ".join(shown(entry.value) for entry in same)
    unit = "" if same[-1].unit == "ratio" else f" {same[-1].unit}"
    loads = [entry.machine["other_cores"] for entry in same if entry.machine is not None]
    remark = ", from the page" if not loads else ", busy machine" if max(loads) > BUSY else ""
    return f"{values}{unit} (`{commit[:7]}`, {same[-1].date[:10]}{remark})"


def goal(entry: Entry) -> str:
    """Return the goal of a figure; empty if it has none."""
    if entry.goal is None:
        return ""
    if entry.goal == 0:
        return "0"
    return f"at {'most' if entry.better == 'lower' else 'least'} {shown(entry.goal)}"


def shown(value: float) -> str:
    """Return a value with at most three significant digits, and thousands apart."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{float(f'{value:.3g}'):,.6f}".rstrip("0").rstrip(".")


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    page = PAGE.read_text()
    written = render(page, read_history())
    if options.check:
        if page != written:
            print(f"{PAGE.relative_to(ROOT)} is not what bench/history.jsonl gives: run `make figures`")
        return int(page != written)
    PAGE.write_text(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
