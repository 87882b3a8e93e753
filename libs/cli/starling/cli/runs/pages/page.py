"""One self-contained HTML page: texts escaped, tables, light and dark, without scripts and without other files.

Names, reasons and completions are texts of others. Every text goes through `escape`, and the page's own content policy
lets a browser load and run nothing.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from starling.common.errors import ConfigError
from starling.common.files import write_whole
from starling.common.observe.terminal import printable

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
STYLE: Final = """
:root{color-scheme:light dark;--bg:#fff;--panel:#f7f8fa;--text:#1d2430;--dim:#616b7a;--rule:#e2e5ea;--accent:#2a5ea8;
--good:#1e7d4f;--bad:#b3372f;--c0:#2a6fbb;--c1:#c9611a;--c2:#2e8b57;--c3:#8a4fb0;--c4:#b8860b;--c5:#c2417c;--c6:#2a8f9d;
--c7:#6b6f76}
@media (prefers-color-scheme:dark){:root{--bg:#14181f;--panel:#1c222b;--text:#e3e7ee;--dim:#98a3b3;--rule:#303844;
--accent:#7fb0f0;--good:#62c492;--bad:#ef8078;--c0:#6aa9ee;--c1:#f0985a;--c2:#6cc795;--c3:#c190e6;--c4:#e0bd55;
--c5:#ee86b5;--c6:#6cc9d6;--c7:#a9afb8}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:18px;margin:44px 0 12px;padding-top:12px;border-top:1px solid var(--rule)}
h3{font-size:14px;margin:0 0 4px}.scroll+h3{margin-top:22px}.scroll+p{margin-top:10px}
p{margin:0 0 12px}.dim{color:var(--dim)}.small{font-size:13px}
nav{margin:14px 0 0;font-size:13px}nav a{color:var(--accent);margin-right:14px;white-space:nowrap}
.state{display:inline-block;padding:1px 9px;border-radius:10px;font-size:13px;font-weight:600;border:1px solid}
.running,.ended{color:var(--good)}.crashed{color:var(--bad)}.stopped{color:var(--dim)}
.figures{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:10px;margin:20px 0 0}
.figure{background:var(--panel);border-radius:8px;padding:10px 14px}
.figure b{display:block;font-size:18px;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.figure b.long{font-size:15px;line-height:27px;white-space:nowrap}
.figure span{color:var(--dim);font-size:12.5px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:22px 26px}
figure{margin:0;min-width:0;display:flex;flex-direction:column}
.plot{display:block;width:100%;height:auto;margin-top:auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 14px;font-size:12.5px;color:var(--dim);margin:0 0 4px}
.key{display:inline-flex;align-items:center;gap:6px;overflow-wrap:anywhere}
.key i{width:14px;height:3px;border-radius:2px;flex:none}
.line{fill:none;stroke-width:1.4;stroke-linejoin:round}.strong{stroke-width:2}.faint{opacity:.42;stroke-width:1}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--dim);fill:none}
.tick,.label{fill:var(--dim);font-size:11px;font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13.5px;width:100%}
th{text-align:left;font-weight:600;color:var(--dim);white-space:nowrap}
th,td{padding:5px 22px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
td{overflow-wrap:anywhere}td.short{white-space:nowrap}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.sample{background:var(--panel);border-radius:8px;padding:12px 16px;margin:0 0 12px}
.sample pre{margin:6px 0 0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:320px;overflow:auto;
font:12.5px/1.5 ui-monospace,Menlo,Consolas,monospace}
.sample pre.completion{border-left:3px solid var(--accent);padding-left:12px}
footer{margin-top:48px;color:var(--dim);font-size:12.5px}
@media print{main{max-width:none;padding:0}.sample pre{max-height:none}}
"""
NUM_COLOURS: Final = 8
MAX_UNBROKEN: Final = 44
"""Characters of a cell that stays on one line."""


def escape(text: object) -> str:
    """Return a text for HTML and its attributes, with control characters and changes of direction made visible."""
    return html.escape(printable(str(text)), quote=True)


def element(tag: str, text: object, css: str = "") -> str:
    """Return an element with an escaped text."""
    return f'<{tag} class="{css}">{escape(text)}</{tag}>' if css else f"<{tag}>{escape(text)}</{tag}>"


def table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, text: Collection[str] = ()) -> str:
    """Return a table of texts, which are escaped; None is an empty cell.

    `text`: the columns of texts, which are aligned to the left; the others are numbers.
    """
    css = ["" if column in text else "n" for column in columns]
    head = "".join(_cell("th", column, one) for column, one in zip(columns, css, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, one) for cell, one in zip(row, css, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def section(title: str, body: str, anchor: str) -> str:
    """Return a section with a heading that the navigation leads to."""
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>'


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Return the names of series with their colours."""
    keys = "".join(f'<span class="key"><i class="k{colour}"></i>{escape(name)}</span>' for name, colour in names)
    return f'<div class="legend">{keys}</div>'


def document(title: str, body: str) -> str:
    """Return the page."""
    colours = "".join(
        f".c{i}{{stroke:var(--c{i})}}.dot.c{i}{{fill:var(--c{i});stroke:none}}.k{i}{{background:var(--c{i})}}"
        for i in range(NUM_COLOURS)
    )
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{colours}</style></head>\n"
        f"<body><main>{body}<footer>Written by Starling, {written}</footer></main></body></html>\n"
    )


def write_page(path: Path, page: str) -> None:
    """Write a page whole or not at all. Raises ConfigError when it cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file, such as {path / 'report.html'}")
    try:
        write_whole(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {os.strerror(error.errno or 0)}; give another file") from None


def moment(seconds: float | None) -> str:
    """Return a time since 1970 as local date and time; empty for none, or for one beyond the calendar."""
    try:
        return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def figure_text(value: float | None, digits: int = 4) -> str:
    """Return a number with few digits: ``0.6406``, ``12,345``; empty for none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.{digits}g}"


def _cell(tag: str, value: object, css: str) -> str:
    text = "" if value is None else str(value)
    is_short = tag == "td" and not css and len(text) <= MAX_UNBROKEN
    return element(tag, text, "short" if is_short else css)
