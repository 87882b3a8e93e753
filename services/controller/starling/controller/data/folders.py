"""Datasets in local folders, as the Hugging Face libraries write them, without what their author lets the library do.

The library reads a folder as its `README.md` says: with any files of this machine or URLs, and any parameters. Here
the README means nothing: the files of the folder are listed, and the library is told to read these and no others.
"""

from __future__ import annotations

import json
import re
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from starling.common.errors import ConfigError
from starling.common.files import open_regular

_KINDS: Final = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
"""Kind of a file of rows, by extension."""
_IMAGES: Final = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tiff"})
_IMAGE_ROWS: Final = frozenset({"metadata.jsonl", "metadata.csv", "metadata.parquet"})
_NO_ROWS: Final = frozenset({"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
"""Files beside the rows that have an extension of theirs."""
_SPLITS: Final = {
    "train": "train|training",
    "test": "test|testing|eval|evaluation",
    "validation": "validation|valid|val|dev",
}
"""Words in the names of the files, or of their folders, of each split."""
_SPECIAL: Final = re.compile(r"[*?\[\]{}]|::|://")
"""What the library takes for a pattern, or for a URL."""
_MAX_JSON: Final = 64 << 20
"""Bytes of a file that describes a saved dataset."""
DICT: Final = "dataset_dict.json"
STATE: Final = "state.json"
INFO: Final = "dataset_info.json"


def builder_of(folder: Path, config: str, cache: Path) -> Any:
    """Return the library's builder for the files of `folder`, or of its subfolder `config`.

    Args:
        folder: with files of one kind, and any others.
        config: name of a subfolder, empty for the folder itself.
        cache: folder for what the library writes.

    Raises:
        ConfigError: there is no such subfolder, it has no rows or those of several kinds, or one leads elsewhere.
    """
    from datasets.packaged_modules.arrow.arrow import Arrow
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    from datasets.packaged_modules.json.json import Json
    from datasets.packaged_modules.parquet.parquet import Parquet
    from datasets.packaged_modules.text.text import Text

    if config:
        _check_plain(config, f"config = {config!r}")
        if (folder / config).is_symlink() or not (folder / config).is_dir():
            raise ConfigError(f"the dataset {folder} has no subfolder {config!r}: correct config, or leave it out")
        folder = folder / config
    folder = folder.resolve()
    kind, files = _rows_of(folder)
    if kind == "arrow":
        for file in files:
            check_arrow(file)
    builders = {"json": Json, "csv": Csv, "tsv": Csv, "parquet": Parquet, "arrow": Arrow, "text": Text}
    options = {"sep": "\t"} if kind == "tsv" else {}
    builder = builders.get(kind, ImageFolder)
    return builder(cache_dir=str(cache), data_files=_by_split(folder, files), **options)


def _rows_of(folder: Path) -> tuple[str, list[Path]]:
    """Return the kind of the rows in a folder, and its files of that kind."""
    found: dict[str, list[Path]] = defaultdict(list)
    images, described = [], []
    for file in _files(folder):
        suffix = file.suffix.lower()
        if suffix in _IMAGES:
            images.append(file)
        elif file.name in _IMAGE_ROWS:
            described.append(file)
        elif suffix in _KINDS and file.name not in _NO_ROWS:
            found[_KINDS[suffix]].append(file)
    if not found and images:
        found["images"] = images + described
    else:
        for file in described:
            found[_KINDS[file.suffix]].append(file)
    known = ", ".join(_KINDS)
    if not found:
        raise ConfigError(f"the dataset {folder} has no files of rows: give a folder with files that end in {known}")
    if len(found) > 1:
        examples = ", ".join(files[0].name for files in found.values())
        raise ConfigError(f"the dataset {folder} has rows of several kinds ({examples:.400}): leave one kind there")
    ((kind, files),) = found.items()
    for file in files:
        if _SPECIAL.search(str(file)):
            raise ConfigError(f"{file} has a character in its path that marks a pattern or a URL: rename it")
        check_file(folder, file)
    return kind, files


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, in order, besides hidden ones; of links those to files."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        else:
            yield path


def _by_split(folder: Path, files: list[Path]) -> dict[str, list[str]]:
    """Return the files of each split by the words in their names and folders, all as `train` where none has one."""
    splits: dict[str, list[str]] = defaultdict(list)
    for file in files:
        name = file.relative_to(folder).as_posix()
        for split, words in _SPLITS.items():
            if re.search(rf"(?:^|[-._ 0-9/])(?:{words})(?=[-._ 0-9/]|$)", name):
                splits[split].append(str(file))
                break
    return dict(splits) or {"train": [str(file) for file in files]}


def check_file(folder: Path, file: Path) -> None:
    """Check that a file is a regular one in a folder, not a link out of it. Raises ConfigError."""
    try:
        target = file.resolve(strict=True)
        regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError) as error:  # the last for links to themselves
        raise ConfigError(f"{file} cannot be read ({error}): restore the dataset") from None
    if not target.is_relative_to(folder.resolve()):
        raise ConfigError(f"{file} is a link out of the dataset's folder: put the file itself there")
    if not regular:
        raise ConfigError(f"{file} is no regular file: remove it from the dataset")


def check_saved(folder: Path) -> None:
    """Check a dataset that `save_to_disk` wrote, before the library reads it: it opens what these files name.

    Raises:
        ConfigError: a file has another form, names one that is not in the folder, or has rows that are damaged.
    """
    if (folder / DICT).exists():
        splits = _read_json(folder, DICT).get("splits")
        if not isinstance(splits, list) or not splits:
            raise ConfigError(f"{folder / DICT} has no list of splits: save the dataset again")
        for split in splits:
            _check_plain(split, f"{folder / DICT} names the split {split!r:.255}, which")
            if (folder / split).is_symlink() or not (folder / split).is_dir():
                raise ConfigError(f"{folder / DICT} names the split {split!r:.255}, which is no folder: save it again")
            _check_one(folder / split)
        return
    _check_one(folder)


def _check_one(folder: Path) -> None:
    """Check a saved dataset of one split."""
    _read_json(folder, INFO)
    entries = _read_json(folder, STATE).get("_data_files")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{folder / STATE} has no list of files: save the dataset again")
    for entry in entries:
        name = entry.get("filename") if isinstance(entry, Mapping) else None
        _check_plain(name, f"{folder / STATE} names the file {name!r:.255}, which")
        check_file(folder, folder / str(name))
        check_arrow(folder / str(name))


def check_arrow(file: Path) -> None:
    """Check all rows of an Arrow file: at offsets beyond its end the library reads what lies in the memory there.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.ipc  # type: ignore[import-untyped]

    try:
        with pyarrow.memory_map(str(file)) as source:
            try:
                batches = iter(pyarrow.ipc.open_stream(source))
            except pyarrow.ArrowInvalid:
                opened = pyarrow.ipc.open_file(source)
                batches = (opened.get_batch(number) for number in range(opened.num_record_batches))
            for batch in batches:
                batch.validate(full=True)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{file} is damaged ({reason:.300}): restore the dataset") from None


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a small file of a folder."""
    check_file(folder, folder / name)
    with open_regular(folder / name) as file:
        content = file.read(_MAX_JSON + 1)
    try:
        found = json.loads(content) if len(content) <= _MAX_JSON else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{folder / name} is no JSON object of at most {_MAX_JSON} bytes: save the dataset again")
    return found


def _check_plain(name: object, what: str) -> None:
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name or _SPECIAL.search(name):
        raise ConfigError(f"{what} is no plain name: correct it")
