"""Tools of a module that leaves files in `/tmp` when it is imported."""

from __future__ import annotations

import os
from pathlib import Path

PLACE = Path("/tmp/left-by-import")
SIZE = int((Path(__file__).with_name("size")).read_text()) if Path(__file__).with_name("size").exists() else 10

(PLACE / "deep").mkdir(parents=True)
(PLACE / "deep" / "words.txt").write_text("w" * SIZE)
(PLACE / "link").symlink_to("deep/words.txt")
os.mkfifo(PLACE / "pipe")
(PLACE / "deep" / "words.txt").chmod(0o640)


def read() -> str:
    """Return what the sessions find."""
    return f"{(PLACE / 'link').read_text()[:20]} {sorted(path.name for path in PLACE.iterdir())}"


def write() -> str:
    """Change it, and add to it."""
    (PLACE / "deep" / "words.txt").write_text("changed")
    (PLACE / "added").write_text("added")
    return read()
