"""Hugging Face datasets whose author is hostile: no other file is read, nothing is fetched, nothing is written."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.hdf5.hdf5 import HDF5
from datasets.packaged_modules.json.json import Json

from starling.common.errors import ConfigError
from starling.controller.data.archives import Checked, prepare
from starling.controller.data.settings import DataSettings
from starling.controller.data.sources import check_hub_files, check_hub_versions, load_rows

SECRET = "the secret key"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder next to a secret file; the cache of the library is in the test's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "secret.csv").write_text(f"question\n{SECRET}\n")
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def questions(source: Path, **changes: Any) -> list[str]:
    """Return the questions of a dataset."""
    rows = load_rows(DataSettings(source=f"hf:{source}", reference_column="", **changes)).rows
    return [str(row.columns["question"]) for row in rows if not hasattr(row, "messages")]


@pytest.mark.parametrize(
    "config",
    [
        "data_files: [{split: train, path: [a.csv, ../secret.csv]}]",
        "data_files: [{split: train, path: [a.csv, '{there}/secret.csv']}]",
        "data_files: [{split: train, path: [a.csv, 'file://{there}/secret.csv']}]",
        "data_files: [{split: train, path: [a.csv, 'http://127.0.0.1:9/x.csv']}]",
        "data_dir: '{there}'\n  data_files: [{split: train, path: secret.csv}]",
        "version: '{there}/written'\n  data_files: [{split: train, path: a.csv}]",
        "version: ../../../written\n  data_files: [{split: train, path: a.csv}]",
        "header: null\n  names: [x]\n  data_files: [{split: train, path: a.csv}]",
        "data_files: [{split: ../../../../x, path: a.csv}]",
        "data_files: !!python/object/apply:os.system [exit]",
    ],
)
@pytest.mark.parametrize("name", ["README.md", ".huggingface.yaml"])
def test_readme_decides_nothing(folder: Path, name: str, config: str) -> None:
    (folder / "a.csv").write_text("question\nhonest\n")
    text = f"configs:\n- config_name: default\n  {config.replace('{there}', str(folder.parent))}\n"
    (folder / name).write_text(f"---\n{text}---\n" if name == "README.md" else text)
    assert questions(folder) == ["honest"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["secret.csv", "set"]


def test_links_out_of_the_folder_are_refused(folder: Path) -> None:
    (folder / "train.csv").symlink_to("../secret.csv")
    with pytest.raises(ConfigError, match=r"train\.csv is a link out of the dataset's folder"):
        questions(folder)
    (folder / "train.csv").unlink()
    (folder / "in.txt").write_text("question\nhonest\n")
    (folder / "in.txt").rename(folder / "rows")
    (folder / "train.csv").symlink_to("rows")
    (folder / "more").symlink_to(folder.parent)
    assert questions(folder) == ["honest"]


@pytest.mark.timeout(60)
def test_fifo_of_rows_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "train.csv")
    with pytest.raises(ConfigError, match=r"train\.csv is no regular file"):
        questions(folder)


def test_folder_without_one_kind_of_rows_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no files of rows"):
        questions(folder)
    (folder / "a.csv").write_text("question\nx\n")
    (folder / "b.txt").write_text("x\n")
    with pytest.raises(ConfigError, match=r"rows of several kinds \(a\.csv, b\.txt\)"):
        questions(folder)
    (folder / "b.txt").rename(folder / "a*.csv")
    with pytest.raises(ConfigError, match="marks a pattern or a URL: rename it"):
        questions(folder)


def test_files_of_each_kind_and_split(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"question": ["train"]})
    for kind, write in (("json", rows.to_json), ("csv", rows.to_csv), ("parquet", rows.to_parquet)):
        (folder / kind / "test").mkdir(parents=True)
        write(str(folder / kind / f"train-00000-of-00001.{kind}"))
        shutil.copy(folder / kind / f"train-00000-of-00001.{kind}", folder / kind / "test" / f"other.{kind}")
        assert questions(folder, config=kind) == questions(folder, config=kind, split="test") == ["train"]
    (folder / "tsv").mkdir()
    (folder / "tsv" / "rows.tsv").write_text("question\tother\nq,1\tx\n")
    assert questions(folder, config="tsv") == ["q,1"]
    monkeypatch.chdir(folder.parent)
    assert questions(Path("set"), config="tsv") == ["q,1"]
    (folder / "link").symlink_to(folder.parent)
    with pytest.raises(ConfigError, match="has no subfolder 'link'"):
        questions(folder, config="link")
    with pytest.raises(ConfigError, match="has no subfolder 'none'"):
        questions(folder, config="none")
    with pytest.raises(ConfigError, match="is no plain name"):
        questions(folder, config="../set")
    with pytest.raises(ConfigError, match="is a file: write its path without hf:"):
        questions(folder / "tsv" / "rows.tsv")


def test_rows_of_other_columns_are_one_sentence(folder: Path) -> None:
    (folder / "a.csv").write_text("question\nx\n")
    (folder / "b.csv").write_text("another\nx\n")
    with pytest.raises(ConfigError, match=r"cannot be loaded \(Schema at index 1 was different"):
        questions(folder)


def save(folder: Path) -> None:
    datasets.Dataset.from_dict({"question": ["A" * 36, "b", "c"]}).save_to_disk(str(folder))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("state.json", {"_data_files": [{"filename": "../other/data-00000-of-00001.arrow"}]}, "is no plain name"),
        ("state.json", {"_data_files": [{"filename": "{there}/other/data-00000-of-00001.arrow"}]}, "is no plain name"),
        ("state.json", {"_data_files": [{"filename": "link"}]}, "is a link out of the dataset's folder"),
        ("state.json", {"_data_files": [{"filename": "none"}]}, "cannot be read"),
        ("state.json", {"_data_files": []}, "no list of files"),
        ("state.json", {"_data_files": [5]}, "no plain name"),
        ("state.json", [], "is no JSON object"),
        ("dataset_info.json", [], "is no JSON object"),
        ("dataset_info.json", "deep", "is no JSON object"),
        ("dataset_info.json", {"features": {"question": {"_type": "Nope"}}}, "cannot be loaded"),
        ("dataset_info.json", {"features": {"question": {"_type": "Value", "dtype": "x"}}}, "cannot be loaded"),
        ("dataset_dict.json", {"splits": ["../other"]}, "is no plain name"),
        ("dataset_dict.json", {"splits": ["folder"]}, "is no folder"),
        ("dataset_dict.json", {"splits": 5}, "no list of splits"),
    ],
)
def test_saved_dataset_that_names_other_files_is_refused(folder: Path, file: str, content: Any, complaint: str) -> None:
    save(folder.parent / "other")
    save(folder)
    (folder / "link").symlink_to(folder.parent / "other" / "data-00000-of-00001.arrow")
    (folder / "folder").symlink_to(folder.parent / "other")
    text = "[" * 100_000 + "]" * 100_000 if content == "deep" else json.dumps(content)
    (folder / file).write_text(text.replace("{there}", str(folder.parent)))
    with pytest.raises(ConfigError, match=complaint):
        questions(folder)


@pytest.mark.parametrize("how", ["saved", "rows"])
def test_arrow_file_with_offsets_beyond_its_end_is_refused(folder: Path, how: str) -> None:
    # The library would give what lies there in the memory of the process, also its keys, as the text of a row.
    save(folder)
    (path,) = folder.glob("*.arrow")
    damage(path)
    if how == "rows":
        (folder / "state.json").unlink()
    with pytest.raises(ConfigError, match=r"data-00000-of-00001\.arrow is damaged"):
        questions(folder)


def damage(path: Path) -> None:
    """Let the offsets of an Arrow file that `save` wrote lead beyond its end."""
    content = bytearray(path.read_bytes())
    begin = content.find(b"".join(offset.to_bytes(4, "little") for offset in (0, 36, 37, 38)))
    assert begin > 0
    content[begin : begin + 16] = b"".join(offset.to_bytes(4, "little") for offset in (0, 3000, 3000, 3000))
    path.write_bytes(content)


def test_saved_dataset_and_arrow_files_are_read(folder: Path) -> None:
    save(folder)
    assert questions(folder) == ["A" * 36, "b", "c"]
    (folder / "state.json").unlink()
    assert questions(folder) == ["A" * 36, "b", "c"]


def test_hub_dataset_that_names_other_files_is_refused(folder: Path) -> None:
    builder = Csv(cache_dir=str(folder), data_files={"train": [str(folder.parent / "secret.csv")]})
    with pytest.raises(ConfigError, match=r"'a/b' names the file '.*secret\.csv', which is not of it"):
        check_hub_files("a/b", builder)
    commit = "0" * 40
    builder.config.data_files = {"train": [f"hf://datasets/a/b@{commit}/a.csv"]}
    check_hub_files("a/b", builder)
    builder.config.data_files = {"train": [f"hf://datasets/a/bc@{commit}/a.csv"]}
    with pytest.raises(ConfigError, match="is not of it"):
        check_hub_files("a/b", builder)
    builder.config.version = "../x"
    with pytest.raises(ConfigError, match="a version that is none"):
        check_hub_versions("a/b", [builder.config])


def test_hub_dataset_in_the_cache_is_read_offline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (folder / "a.csv").write_text("question\nhonest\n")
    # As the library leaves a dataset of the hub that it has read.
    builder = Csv(cache_dir=str(folder.parent / "other"), data_files={"train": [str(folder / "a.csv")]})
    builder.dataset_name = "rows"
    place = folder.parent / "cache" / "somebody___rows" / "default" / "0.0.0" / "0123456789abcdef"
    builder.download_and_prepare(str(place))
    assert questions(Path("somebody/rows")) == ["honest"]


def member(archive: tarfile.TarFile, name: str, kind: bytes, target: str = "", mode: int = 0o755) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    archive.addfile(info)


def write_archive(path: Path, attempt: str) -> None:
    """Write a tar file by which the library would read or write outside of the folder to which it unpacks it."""
    victim = str(path.parent.parent)[1:]
    with tarfile.open(path, "w") as archive:
        if attempt == "fifo":
            return member(archive, "a.csv", tarfile.FIFOTYPE)
        if attempt == "owner":  # other users of the machine could run it as the one of the controller
            return member(archive, "a.csv", tarfile.REGTYPE, mode=0o4755)
        # `s/t/t/../..` is the folder itself as it reads, and the one above it as it is followed.
        member(archive, "s", tarfile.DIRTYPE)
        member(archive, "s/t", tarfile.SYMTYPE, ".")
        up = "s/" + "t/" * 20 + "../" * 21
        if attempt == "read":
            return member(archive, "a.csv", tarfile.SYMTYPE, f"{up}{victim}/secret.csv")
        short = ""
        for letter in "abcdefghijklmnop":  # together too long for the library to follow
            member(archive, short + "d" * 254, tarfile.DIRTYPE)
            member(archive, short + letter, tarfile.SYMTYPE, "d" * 254)
            short += f"{letter}/"
        member(archive, f"{short}s", tarfile.DIRTYPE)
        member(archive, f"{short}s/t", tarfile.SYMTYPE, ".")
        member(archive, f"{short}x", tarfile.SYMTYPE, up)
        return member(archive, f"{short}x/{victim}/written", tarfile.REGTYPE)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attempt", ["read", "write", "fifo"])
@pytest.mark.parametrize("name", ["train.csv", "train.json"])
def test_archive_under_the_name_of_rows_is_not_unpacked(folder: Path, attempt: str, name: str) -> None:
    write_archive(folder / name, attempt)
    with pytest.raises(ConfigError):
        questions(folder)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["secret.csv", "set"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attempt", ["read", "write", "fifo", "owner"])
def test_archive_of_the_hub_with_links_or_pipes_is_refused(folder: Path, attempt: str) -> None:
    write_archive(folder / "train.csv", attempt)
    builder = Csv(cache_dir=str(folder / "cache"), data_files={"train": [str(folder / "train.csv")]})
    with pytest.raises(ConfigError, match="which is no file or folder, or a program"):
        prepare(builder, Checked)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["secret.csv", "set"]


def test_archive_of_the_hub_with_files_is_read(folder: Path) -> None:
    (folder / "a.json").write_text('{"question": "honest"}\n')
    with tarfile.open(folder / "train.json", "w") as archive:
        archive.add(folder / "a.json", "rows/a.json")
    builder = Json(cache_dir=str(folder / "cache"), data_files={"train": [str(folder / "train.json")]})
    prepare(builder, Checked)
    assert builder.as_dataset(split="train")["question"][:] == ["honest"]


def test_damaged_arrow_file_of_the_hub_is_refused(folder: Path) -> None:
    save(folder)
    (path,) = folder.glob("*.arrow")
    builder = Arrow(cache_dir=str(folder / "cache"), data_files={"train": [str(path)]})
    prepare(builder, Checked)
    assert builder.as_dataset(split="train")["question"][:] == ["A" * 36, "b", "c"]
    damage(path)
    builder = Arrow(cache_dir=str(folder / "other"), data_files={"train": [str(path)]})
    with pytest.raises(ConfigError, match=r"data-00000-of-00001\.arrow is damaged"):
        prepare(builder, Checked)


def test_hub_dataset_of_files_that_name_others_is_refused(folder: Path) -> None:
    (folder / "a.h5").touch()
    builder = HDF5(cache_dir=str(folder), data_files={"train": [str(folder / "a.h5")]})
    with pytest.raises(ConfigError, match="files of the kind 'hdf5', which are not read"):
        check_hub_files("a/b", builder)
