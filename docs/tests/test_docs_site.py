"""The site that `make site` has built: complete, and without anything from elsewhere."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from snippets import DOCS, ROOT

SITE = ROOT / "site"
PAGES = sorted(page.relative_to(DOCS) for page in DOCS.rglob("*.md"))
REMOTE = ("http:", "https:", "//")


class Assets(HTMLParser):
    """Addresses of all that a page loads by itself: scripts, styles, images, frames; not links to follow."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element loads."""
        values = {name: value or "" for name, value in attrs}
        loads = tag == "link" and values.get("rel") not in ("canonical", "next", "prev")
        self.addresses += [values[name] for name in ("src", "data", "srcset") if name in values]
        self.addresses += [values["href"]] if loads and "href" in values else []

    def handle_data(self, data: str) -> None:
        """Note the text."""
        self.texts.append(data)


def assets_of(page: Path) -> Assets:
    """Return what a page of the site loads, and its text."""
    parser = Assets()
    parser.feed(page.read_text())
    return parser


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not (SITE / "index.html").exists():
        pytest.fail("there is no site: run `make site`, or `make test-docs`, which does")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_page_is_in_the_site(page: Path) -> None:
    name = page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")
    assert (SITE / name).exists()


def test_pages_load_nothing_from_elsewhere() -> None:
    pages = sorted(SITE.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        for address in assets_of(page).addresses:
            assert not address.startswith(REMOTE), f"{page.relative_to(SITE)} loads {address}"
    for sheet in SITE.rglob("*.css"):
        for address in re.findall(r"url\(['\"]?([^'\")]+)", sheet.read_text()):
            assert not address.startswith(REMOTE), f"{sheet.relative_to(SITE)} loads {address}"


def test_all_that_pages_load_is_there() -> None:
    for page in sorted(SITE.rglob("*.html")):
        if page.name == "404.html":  # served under any address
            continue
        for address in assets_of(page).addresses:
            path = address.partition("?")[0].partition("#")[0]
            if path and not path.startswith("data:"):
                assert (page.parent / path).resolve().exists(), f"{page.relative_to(SITE)} loads {address}"


def test_lists_and_fences_are_rendered() -> None:
    """Markdown that was not understood stays in the text of a page."""
    for page in PAGES:
        name = page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html")
        text = re.sub(r"<(code|pre)\b.*?</\1>", "", (SITE / name).read_text(), flags=re.DOTALL)
        parser = Assets()
        parser.feed(text)
        shown = "".join(parser.texts)
        assert "```" not in shown, page
        assert not re.search(r"\]\([\w./#-]+\)|\*\*\w|^\s*\|.*\|\s*$", shown, re.MULTILINE), page


def test_search_finds_settings_and_pages() -> None:
    found = json.loads((SITE / "search/search_index.json").read_text())["docs"]
    texts = [entry["text"] for entry in found if entry["location"].startswith("how-to/troubleshoot")]
    assert any("starling why" in text for text in texts)
    assert not any(entry["location"].startswith("source/") for entry in found)
