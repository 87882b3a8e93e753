"""The folders that a sandbox shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from starling.common.files import write_whole
from starling.common.net.keyring import make_keys
from starling.common.sandbox import view
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


def test_folder_of_run_in_a_package_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe may put its runs anywhere, as into the folder of the user's modules."""
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "project"
    keys = package / "runs" / "demo" / "attempt-1" / "keys"
    keys.mkdir(parents=True)
    (package / "other").mkdir()
    (package / "link").symlink_to("runs")
    (package / "into").symlink_to("runs/demo/attempt-1/keys")
    for file in (package / "tools.py", package / "words.txt", package / "other" / "more.py", keys / "allowed.json"):
        file.write_text("")
    (keys.parent / "journal.sqlite").write_text("")
    view = view_of(SandboxNeeds(), ["project/tools.py:reward"])
    shown = [Path(entry.source) for entry in view.entries]
    assert {package / "tools.py", package / "words.txt", package / "other"} <= set(shown)
    hidden = (keys, keys / "allowed.json", keys.parent, keys.parent / "journal.sqlite")
    assert [one for one in hidden if not {one, *one.parents}.isdisjoint(shown)] == []


@pytest.mark.parametrize("name", ["rollout-1.json", "mine.key"])
def test_single_key_file_in_a_package_is_hidden(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica on another machine needs only its own key file, which may be beside the code."""
    monkeypatch.chdir(tmp_path)
    make_keys(tmp_path / "keys", ["rollout-1"])
    package = tmp_path / "project"
    (package / "secrets").mkdir(parents=True)
    key = package / "secrets" / name
    (tmp_path / "keys" / "rollout-1.json").rename(key)
    (package / "link.json").symlink_to(key)
    (package / "hard.json").hardlink_to(key)
    for file in (package / "tools.py", package / "words.json", package / "secrets" / "words.json"):
        file.write_text('{"secret": 1}')
        file.chmod(0o600)
    view = view_of(SandboxNeeds(), ["project/tools.py:reward"])
    shown = {Path(entry.source) for entry in view.entries}
    assert {package / "tools.py", package / "words.json", package / "secrets" / "words.json"} <= shown
    hidden = (key, package / "link.json", package / "hard.json")
    assert [one for one in hidden if not {one, *one.parents}.isdisjoint(shown)] == []


def test_http_key_of_a_rollout_in_a_package_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On the machine of a rollout the run's folder has no journal by which it is known.
    package = tmp_path / "project"
    (package / "run" / "api").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    address = {"base_url": "http://127.0.0.1:8000/v1", "api_key": "secret", "model": "m"}
    write_whole(package / "run" / "api" / "rollout-0.json", json.dumps(address), private=True)
    monkeypatch.chdir(tmp_path)
    shown = {Path(path) for path in view_of(SandboxNeeds(), []).readable()}
    assert package / "__init__.py" in shown
    assert not any((package / "run" / "api" / "rollout-0.json").is_relative_to(path) for path in shown)


def test_link_out_of_a_package_shows_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside something hidden, each entry of a package is shown by itself: links led to folders of others."""
    monkeypatch.chdir(tmp_path)
    make_keys(tmp_path / "keys", ["rollout-1"])
    package = tmp_path / "project"
    (package / "run").mkdir(parents=True)
    (package / "run" / "journal.sqlite").touch()
    (package / "tools.py").touch()
    (package / "out").symlink_to(tmp_path / "keys")
    (package / "key.json").symlink_to(tmp_path / "keys" / "rollout-1.json")
    view = view_of(SandboxNeeds(), ["project/tools.py:reward"])
    shown = {Path(entry.source) for entry in view.entries}
    assert package / "tools.py" in shown
    assert not any(path.is_relative_to(tmp_path / "keys") for path in shown)


def test_views_of_a_starting_service_look_through_a_package_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And later views look again: a key may have been put there."""
    monkeypatch.chdir(tmp_path)
    (package := tmp_path / "package").mkdir()
    (package / "tools.py").write_text("")
    looked: list[str] = []

    def looking(path: str) -> set[str]:
        looked.append(path)
        return look_through(path)

    look_through = view._look_through
    monkeypatch.setattr(view, "_look_through", looking)
    for _ in range(3):
        assert str(package) in view_of(SandboxNeeds(), []).readable()
    assert looked == [str(package)]
    make_keys(tmp_path / "keys", ["rollout-1"])
    (tmp_path / "keys" / "rollout-1.json").rename(package / "mine.json")
    monkeypatch.setattr(view, "REUSED_S", 0.0)
    readable = view_of(SandboxNeeds(), []).readable()
    assert str(package / "tools.py") in readable
    assert not {str(package), str(package / "mine.json")}.intersection(readable)
