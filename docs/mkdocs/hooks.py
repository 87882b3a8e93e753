"""Hooks of MkDocs: the pages are written for GitHub and for editors, and the site is made of them unchanged.

- An entry of the navigation that ends in ``/`` becomes all pages of that folder that no other entry names.
- A link to a folder of pages leads to a generated list of them, and a link to a file of the repository outside docs/ to
  a generated page that shows it. So every link works in the site, which needs no address of a repository.
- Lists may be indented by two or three spaces, and may follow a paragraph without an empty line.
- Anchors are those of GitHub.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

LINK: Final = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE: Final = re.compile(r" *(`{3,}|~{3,})")
ITEM: Final = re.compile(r"( *)([-*+]|\d+[.)])( +)(?=\S)")
CODE_INDENT: Final = 4
SHOWN: Final = "source"
"""Folder of the site with the pages of files outside docs/."""
LANGUAGES: Final = {".py": "python", ".toml": "toml", ".md": "markdown", ".json": "json", ".yaml": "yaml", ".sh": "sh"}
FRONT_MATTER: Final = "---\nsearch:\n  exclude: true\n---\n\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write out the folders of the navigation, and choose the anchors of GitHub."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_slug
    docs = Path(config.docs_dir)
    named = {name for name in _names(config.nav or []) if not name.endswith("/")}
    entries = [_expanded(entry, docs, named) for entry in config.nav or []]
    config.nav = [entry for entry in entries if entry is not None]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each folder in docs/, and for each file or folder outside it, that a page links to."""
    docs = Path(config.docs_dir)
    targets = {_target(page.src_uri, link) for page in files.documentation_pages() for link in _links(page)}
    for target in sorted(targets):
        path = docs / target
        if path.is_dir() and target.startswith("../"):
            _add(files, config, _shown(target), _listing(target, path))
        elif path.is_dir() and not (path / "README.md").exists():
            listing = "".join(f"- [{title_of(page)}]({page.name})\n" for page in pages_in(path))
            name = target.rpartition("/")[2].capitalize()
            _add(files, config, f"{target}/index.md", f"# {name}\n\n{listing}")
        elif path.is_file() and target.startswith("../"):
            _add(files, config, _shown(target), _source(target, path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to generated pages, and write lists as Python-Markdown reads them."""
    origin = page.file.src_uri
    if origin.startswith(f"{SHOWN}/"):
        return markdown

    def replace(match: re.Match[str]) -> str:
        target = _target(origin, match[1])
        path = Path(config.docs_dir) / target
        if target.startswith("../") and path.exists():
            return posixpath.relpath(_shown(target), posixpath.dirname(origin))
        if path.is_dir():
            index = "README.md" if (path / "README.md").exists() else "index.md"
            return posixpath.relpath(f"{target}/{index}", posixpath.dirname(origin))
        return match[0]

    lines = [line if is_code else LINK.sub(replace, line) for line, is_code in with_code(markdown)]
    return with_deep_lists("\n".join(lines))


def github_slug(text: str, separator: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def with_code(markdown: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it belongs to a fenced block."""
    fence = ""
    for line in markdown.split("\n"):
        match = FENCE.match(line)
        if fence:
            yield line, True
            if match and match[1].startswith(fence) and not line.strip(" `~"):
                fence = ""
        else:
            yield line, match is not None
            fence = match[1] if match else ""


def with_deep_lists(markdown: str) -> str:
    """Indent what is in a list by four spaces a level, and put an empty line before each list.

    GitHub asks for the width of the marker only, which is two or three spaces.
    """
    result: list[str] = []
    widths: list[int] = []  # column of the text of each item around this line
    for line, is_code in with_code(markdown):
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        is_opening = is_code and FENCE.match(line) is not None
        follows_text = bool(result) and bool(result[-1].strip())
        item = None if is_code else ITEM.match(line)
        is_lazy = follows_text and not is_code and item is None
        while text and widths and indent < widths[-1] and not is_lazy and (not is_code or is_opening):
            widths.pop()
        base = widths[-1] if widths else 0
        if item and indent - base < CODE_INDENT:
            if follows_text and not widths and not ITEM.match(result[-1]) and not _continues(result):
                result.append("")
            result.append(" " * (4 * len(widths) + indent - base) + text)
            widths.append(len(item[0]))
        else:
            result.append(" " * (4 * len(widths) + max(0, indent - base)) + text if text else "")
    return "\n".join(result)


def _continues(lines: list[str]) -> bool:
    """Return whether the last line belongs to an item of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False


def pages_in(folder: Path) -> list[Path]:
    """Return the pages of a folder, not of those below it, in the order of their names."""
    return sorted(page for page in folder.glob("*.md") if page.name not in ("README.md", "index.md"))


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
    return found[1] if found else page.stem


def _names(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _names(part)


def _expanded(entry: Any, docs: Path, named: set[str]) -> Any:
    """Return an entry of the navigation with folders written out, or None if nothing is left of it."""
    if isinstance(entry, list):
        return [one for one in (_expanded(part, docs, named) for part in entry) if one is not None] or None
    if isinstance(entry, dict):
        title, value = next(iter(entry.items()))
        inner = _expanded(value, docs, named)
        return None if inner is None else {title: inner}
    if not entry.endswith("/"):
        return entry
    folder = docs / entry
    pages = [page.relative_to(docs).as_posix() for page in pages_in(folder)]
    left: list[Any] = [name for name in pages if name not in named]
    if (folder / "README.md").exists() or (left and f"{entry}index.md" in _linked_folders(docs)):
        index = "README.md" if (folder / "README.md").exists() else "index.md"
        left.insert(0, f"{entry}{index}")
    for below in sorted(part for part in folder.glob("*/") if entry == "operations/"):
        left += [page.relative_to(docs).as_posix() for page in pages_in(below)]
    return left or None


def _linked_folders(docs: Path) -> set[str]:
    """Return the index pages that `on_files` will make, as paths in docs/."""
    found = set()
    for page in docs.rglob("*.md"):
        origin = page.relative_to(docs).as_posix()
        for match in LINK.finditer(page.read_text()):
            target = _target(origin, match[1])
            if not target.startswith("../") and (docs / target).is_dir():
                found.add(f"{target}/index.md")
    return found


def _links(page: File) -> Iterator[str]:
    for line, is_code in with_code(page.content_string):
        if not is_code:
            yield from (match[1] for match in LINK.finditer(line))


def _target(origin: str, link: str) -> str:
    """Return where a link of the page `origin` leads, relative to docs/."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _shown(target: str) -> str:
    """Return the page of a file or folder outside docs/."""
    return f"{SHOWN}/{target.removeprefix('../')}.md"


def _add(files: Files, config: MkDocsConfig, name: str, content: str) -> None:
    is_new = files.get_file_from_path(name) is None
    if is_new:
        kind = InclusionLevel.NOT_IN_NAV if name.startswith(f"{SHOWN}/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, name, content=content, inclusion=kind))


def _listing(target: str, folder: Path) -> str:
    """Return a page that lists the files of a folder outside docs/."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    return f"{FRONT_MATTER}# `{target.removeprefix('../')}`\n\n" + "".join(f"- `{name}`\n" for name in names)


def _source(target: str, path: Path) -> str:
    """Return a page that shows a file outside docs/."""
    language = LANGUAGES.get(path.suffix, "text")
    return f"{FRONT_MATTER}# `{target.removeprefix('../')}`\n\n``````{language}\n{path.read_text()}``````\n"
