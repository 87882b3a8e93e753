"""Files that survive a power cut: written whole, and read up to their last complete line."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from small_disk import disk

from starling.common.errors import ConfigError
from starling.common.files import check_writable, complete_size, open_regular, parse_line, write_whole
from starling.common.settings import complete_toml, read_toml


def test_write_whole_replaces_a_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for content in ("old, and longer", b"new"):
        write_whole(path, content)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_whole_makes_private_files_private(tmp_path: Path) -> None:
    partial = tmp_path / ".key.json.partial"
    partial.write_text("of a crash, and readable by others")
    partial.chmod(0o644)
    write_whole(tmp_path / "key.json", "secret", private=True)
    assert (tmp_path / "key.json").stat().st_mode & 0o777 == 0o600
    write_whole(tmp_path / "plain.json", "x")
    assert (tmp_path / "plain.json").stat().st_mode & 0o400


def test_write_whole_does_not_write_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("kept")
    (tmp_path / ".key.json.partial").symlink_to(other)
    write_whole(tmp_path / "key.json", "secret", private=True)
    assert other.read_text() == "kept"
    assert not (tmp_path / "key.json").is_symlink()


def test_write_whole_gives_no_secret_to_a_process_with_the_partial_file_open(tmp_path: Path) -> None:
    with (tmp_path / ".key.json.partial").open("w+") as held:
        write_whole(tmp_path / "key.json", "secret", private=True)
        assert held.read() == ""


def test_open_regular_opens_files_and_links_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "fifo")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"x"
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="it is no regular file"):
            open_regular(path)


@pytest.mark.parametrize(
    ("content", "size"),
    [(b"", 0), (b"one\n", 4), (b"one\ntw", 4), (b"one", 0), (b"one\n" + bytes(200_000), 4), (b"x" * 200_000, 0)],
)
def test_complete_size_ends_behind_the_last_line(tmp_path: Path, content: bytes, size: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert complete_size(descriptor) == size
    finally:
        os.close(descriptor)


def test_parse_line_takes_complete_objects_only() -> None:
    assert parse_line('{"text": "ü", "loss": NaN}\n'.encode()) is not None
    for line in (b'{"a": 1}', b'{"a": 1\n', b'["a"]\n', b"\0\0\n", b'{"a": "\xff"}\n', b"\n", b"[" * 100_000 + b"\n"):
        assert parse_line(line) is None


def test_toml_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(complete_toml("[run]\nseed = 3\n[rl]\nnum_steps = 4\n"))
    assert read_toml(path) == {"run": {"seed": 3}, "rl": {"num_steps": 4}}
    path.write_text(path.read_text().partition("[rl]")[0])
    with pytest.raises(ConfigError, match=r"config\.toml is cut off: its last line is missing; restore it"):
        read_toml(path)
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    with pytest.raises(ConfigError, match=r"config\.toml is cut off"):
        read_toml(path)
    path.write_text("")
    with pytest.raises(ConfigError, match=r"config\.toml is empty; restore it"):
        read_toml(path)


def test_toml_that_people_write_needs_no_last_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("[run]\nseed = 3")
    assert read_toml(tmp_path / "recipe.toml") == {"run": {"seed": 3}}


def test_writable_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory") as error:
        check_writable(tmp_path / "file" / "states")
    assert error.value.filename == str(tmp_path / "file" / "states")


def test_folder_on_a_full_or_read_only_disk_is_named(tmp_path: Path) -> None:
    with disk(tmp_path / "small", size_mb=1) as small:
        small.fill()
        with pytest.raises(OSError, match="No space left on device") as error:
            check_writable(small.folder)
        assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(small.folder))
        assert [path.name for path in small.folder.iterdir()] == ["ballast"]
        small.free()
        check_writable(small.folder)
        small.allow_writes(allowed=False)
        with pytest.raises(OSError, match="Read-only file system") as error:
            check_writable(small.folder)
        assert (error.value.errno, error.value.filename) == (errno.EROFS, str(small.folder))
