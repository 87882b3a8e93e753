"""Import of objects named in a recipe, or one sentence with the error and the remedy."""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.util
import sys
import threading
from pathlib import Path

import pytest

from starling.common.errors import ConfigError
from starling.common.importing import import_object, is_import_path, without_modules

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from beside import beside

@dataclass
class Point:
    x: int = 1
    origin = staticmethod(lambda: Point())

_hidden = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("def beside(): return 'beside'")
    return tmp_path


def test_import_path_has_a_module_and_an_attribute() -> None:
    assert is_import_path("a.b:c")
    assert is_import_path("/x/y.py:c")
    assert not any(map(is_import_path, ("gsm8k", ":c", "a:", "")))


def test_import_from_a_module_and_from_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, by absolute path and by relative path; attributes may have dots."""
    assert import_object("os.path:join", "It") is __import__("os").path.join
    origin = import_object(f"{folder}/mine.py:Point.origin", "It")
    assert origin().x == 1
    monkeypatch.chdir(folder)
    assert import_object("mine.py:Point.origin", "It") is origin
    assert import_object("mine.py:beside", "It")() == "beside"


def test_file_runs_once(folder: Path) -> None:
    """So that all parts of the system get the same class."""
    made = import_object(f"{folder}/mine.py:Point", "It")()
    assert isinstance(made, import_object(f"{folder}/../{folder.name}/mine.py:Point", "It"))
    assert dataclasses.is_dataclass(made)


def test_file_does_not_shadow_a_module(tmp_path: Path) -> None:
    """Neither a module, loaded or not, nor another file of the same name."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for stem in ("csv", "this"):
            (tmp_path / name / f"{stem}.py").write_text(f"def f(): return {name!r}")
    sys.modules.pop("this", None)
    assert [import_object(f"{tmp_path}/{name}/csv.py:f", "It")() for name in ("one", "two")] == ["one", "two"]
    assert import_object(f"{tmp_path}/one/this.py:f", "It")() == "one"
    assert sys.modules["csv"] is csv
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gsm8k", "It 'gsm8k': write `module:attribute` or `path/to/file.py:attribute`."),
        (":f", "It ':f': write `module:attribute`"),
        ("/nowhere/mine.py:f", "It '/nowhere/mine.py:f': there is no file '/nowhere/mine.py'."),
        ("no_such:f", "It 'no_such:f' cannot be imported: ModuleNotFoundError: No module named 'no_such'."),
        ("{folder}/exits.py:f", "cannot be imported: SystemExit: no licence ({folder}/exits.py:1)."),
        ("{folder}/lines.py:f", "cannot be imported: RuntimeError: one two ({folder}/lines.py:1)."),
        ("{folder}/wrong.py:f", "cannot be imported: SyntaxError: "),
        ("{folder}/mine.py:Piont", "no 'Piont' in there; did you mean 'Point'."),
        ("{folder}/mine.py:Point.origni", "no 'Point.origni' in there; "),
        ("{folder}/mine.py:zzz", "no 'zzz' in there; it has dataclass, beside, Point."),
        ("{folder}/empty.py:f", "no 'f' in there; it has nothing to call."),
    ],
)
def test_import_errors_are_one_sentence(folder: Path, name: str, sentence: str) -> None:
    (folder / "exits.py").write_text("raise SystemExit('no licence')")
    (folder / "lines.py").write_text("raise RuntimeError('one\\ntwo')")
    (folder / "wrong.py").write_text("def f(:")
    (folder / "empty.py").write_text("")
    with pytest.raises(ConfigError) as raised:
        import_object(name.format(folder=folder), "It")
    assert sentence.format(folder=folder) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_failed_file_can_be_imported_after_a_fix(folder: Path) -> None:
    path = folder / "late.py"
    path.write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        import_object(f"{path}:f", "It")
    path.write_text("def f(): return 'corrected, and longer'")
    assert import_object(f"{path}:f", "It")() == "corrected, and longer"


def test_keyboard_interrupt_during_import_is_raised(folder: Path) -> None:
    (folder / "held.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        import_object(f"{folder}/held.py:f", "It")


def test_file_imported_by_two_threads_runs_once(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import threading\nthreading.Event().wait(0.1)\nmade = object()\n")
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(import_object(f"{path}:made", "It"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 3
    assert len({id(one) for one in found}) == 1


def test_import_error_lists_some_of_many_names(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text("\n".join(f"def f{n:03}(): ..." for n in range(300)))
    with pytest.raises(ConfigError, match=r"no 'scorer' in there; it has f000, f001, .*, f009 and 290 more"):
        import_object(f"{path}:scorer", "The scorer")


def test_without_modules_hides_them_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with without_modules("colorsys", "json"):
        assert importlib.util.find_spec("colorsys") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("colorsys")
        assert importlib.import_module("json").loads("1") == 1, "it was imported before"
    assert importlib.import_module("colorsys").rgb_to_hls is not None


def test_without_modules_restores_them_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with pytest.raises(RuntimeError), without_modules("colorsys"):
        raise RuntimeError
    assert importlib.util.find_spec("colorsys") is not None
