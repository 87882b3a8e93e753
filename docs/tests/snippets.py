"""Blocks of code in the documentation, and the commands in them.

A block that is marked by its title is more than an example::

    ```python title="my_scorers.py"      the tutorial writes this file
    ```sh title="First terminal"         the tutorial types these commands into that terminal

A line ``<!-- runnable -->`` before a Python block says that it runs by itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
GENERATED: Final = ("docs/reference/cli.md", "docs/reference/protocol.md")
"""Pages that are written by a program."""
PAGES: Final = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    if path.relative_to(ROOT).as_posix() not in GENERATED
)
FENCED: Final = re.compile(
    r"(?P<mark><!-- runnable -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w*)(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHELLS: Final = ("sh", "bash", "console")
SEPARATORS: Final = frozenset({";", "|", "||", "&", "&&", "(", ")"})
REDIRECTIONS: Final = frozenset({">", ">>", "<", ">&", "2>"})
KEYWORDS: Final = frozenset({"if", "then", "else", "do", "while", "for", "time", "exec", "nohup", "srun"})
GIVEN: Final = {"SLURM_NNODES": "4", "SLURM_PROCID": "1"}
"""Variables that a launcher sets."""
PROGRAM: Final = re.compile(r"(?:.*/)?(starling(?:-(?:controller|policy|rollout|reward|teacher))?)")


@dataclass(frozen=True)
class Snippet:
    """One fenced block."""

    page: str
    line: int
    language: str
    title: str
    text: str
    is_runnable: bool

    def __str__(self) -> str:
        """Return where it is, as editors and test reports name it."""
        return f"{self.page}:{self.line}"


def snippets_of(page: str) -> Iterator[Snippet]:
    """Yield the blocks of a page, in order."""
    text = (ROOT / page).read_text()
    for match in FENCED.finditer(text):
        title = re.search(r'title="([^"]*)"', match["info"])
        indent = match["indent"]
        yield Snippet(
            page=page,
            line=text.count("\n", 0, match.start("language")) + 1,
            language=match["language"],
            title=title[1] if title else "",
            text="".join(line.removeprefix(indent) for line in match["text"].splitlines(keepends=True)),
            is_runnable=match["mark"] is not None,
        )


def all_snippets(*languages: str) -> list[Snippet]:
    """Return the blocks of all pages in these languages."""
    return [one for page in PAGES for one in snippets_of(page) if one.language in languages]


def script_of(snippet: Snippet) -> str:
    """Return the commands of a shell block: without prompts, and without what they print."""
    if snippet.language != "console":
        return snippet.text
    lines: list[str] = []
    goes_on = False
    for line in snippet.text.splitlines():
        if line.startswith("$ ") or goes_on:
            lines.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\") or shlex_is_open("\n".join(lines))
    return "\n".join(lines) + "\n"


def shlex_is_open(text: str) -> bool:
    """Return whether a quotation in `text` has not ended."""
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


def starling_commands(script: str) -> Iterator[list[str]]:
    """Yield the words of each call of Starling in a shell script, the program's name first.

    Variables have the value that the script gives them, or that of `GIVEN`, or 1; the output of a command is 1, too.
    """
    script = re.sub(r"\\\n\s*", "", script)
    script = re.sub(r"'([^']*)'", _script_in_script, script)
    while "$(" in script and (shorter := re.sub(r'"\$\([^()]*\)"|\$\([^()]*\)', "1", script)) != script:
        script = shorter
    values = GIVEN | dict(re.findall(r"\b(\w+)=([^\s;]+)", script))
    for line in script.splitlines():
        for words in _simple_commands(line):
            while words and (words[0] in KEYWORDS or re.fullmatch(r"\w+=.*", words[0])):
                words.pop(0)
            if words and (program := PROGRAM.fullmatch(words[0])):
                yield [program[1], *(_filled(word, values) for word in words[1:])]


def _script_in_script(quoted: re.Match[str]) -> str:
    """Return the lines of a quotation that has several, as of a script in a script; others stay."""
    return f"\n{quoted[1]}\n" if "\n" in quoted[1] else quoted[0]


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Yield the commands that a line joins by pipes and the like, without redirections."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "" if line.startswith("#!") else "#"
    command: list[str] = []
    words = iter(lexer)
    for word in words:
        if word in SEPARATORS:
            yield command
            command = []
        elif word in REDIRECTIONS:
            next(words, "")
        else:
            command.append(word)
    yield command


def _filled(word: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)[^}\s/.,]*\}?", lambda match: values.get(match[1], "1"), word) if "$" in word else word
