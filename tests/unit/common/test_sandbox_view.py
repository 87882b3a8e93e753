"""The folders that a sandbox shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from starling.common.sandbox.settings import SandboxNeeds
from starling.common.sandbox.view import view_of


def test_link_to_itself_beside_the_users_file_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(*arguments):\n    return 1.0\n")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "loop.py").symlink_to("loop.py")
    view = view_of(SandboxNeeds(), ["mine.py:reward"])
    shown = {entry.source for entry in view.entries}
    assert str(tmp_path / "mine.py") in shown
    assert str(tmp_path / "loop") not in shown
