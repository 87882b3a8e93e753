"""Sources of rows: a file, a Hugging Face dataset, a reasoning-gym task, or a user's function.

`load_rows` reads the whole dataset at the start of a run, so that a bad row is an error at once and not an hour later.
The libraries of a source are imported only when it is used, because some take seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.importing import import_object
from starling.common.raised import describe_raised
from starling.common.wire.messages import Prompt
from starling.controller.data.folders import DICT, STATE, builder_of, check_saved
from starling.controller.data.gym import read_entries
from starling.controller.data.media import MAX_INLINE_BYTES
from starling.controller.data.names import nearest
from starling.controller.data.settings import DataSettings

SOURCES = "a path to a .jsonl or .parquet file, hf:NAME, reasoning_gym:TASK, or MODULE:FACTORY"
_BATCH: Final = 1000
"""Rows of a Hugging Face dataset that are read at a time."""
_HUB_KINDS: Final = frozenset(
    {"csv", "json", "parquet", "arrow", "text", "imagefolder", "videofolder", "webdataset", "cache"}
)
"""Readers of the library for datasets of the hub, and for those in its cache. Files of others, such as HDF5 or Iceberg,
can name further files and URLs, which nothing here would check."""
LINE_BYTES: Final = 900_000_000
"""Longest line of a .jsonl: the journal stores no larger row, and a file without line ends is not read as a whole."""


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row of a dataset."""

    columns: Mapping[str, Any]
    """Its values by column name."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that the scorers of this source need, independent of `DataSettings.metadata_columns`."""


@dataclass(frozen=True)
class Rows:
    """The rows of a dataset."""

    rows: list[DataRow | Prompt]
    revision: str = ""
    """Of the source: a commit of the Hugging Face hub, or the version of the library that generated the rows."""


def load_rows(settings: DataSettings) -> Rows:
    """Read the rows of `settings.source`, at most `settings.limit` of them (0: all).

    Raises ConfigError when the source does not exist, cannot be read, or has no rows.
    """
    limit = settings.limit or None
    if settings.source.startswith("hf:"):
        rows = _read_hugging_face(settings.source.removeprefix("hf:"), settings, limit)
    elif settings.source.startswith("reasoning_gym:"):
        task = settings.source.removeprefix("reasoning_gym:")
        rows = Rows([*_read_reasoning_gym(task, settings, limit)], version("reasoning-gym"))
    elif names_a_function(settings.source):
        rows = Rows(_read_factory(settings.source, limit))
    else:
        rows = Rows([*_read_file(Path(settings.source).expanduser(), limit)])
    if not rows.rows:
        raise ConfigError(f"the dataset {settings.source!r} is empty: give one with at least one row")
    return rows


# --- files ---------------------------------------------------------------------------------------------------------


def _read_file(path: Path, limit: int | None) -> list[DataRow]:
    readers: dict[str, Callable[[Path, int | None], list[DataRow]]] = {
        ".jsonl": _read_jsonl,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix)
    if not path.is_file():
        if reader is None and path.parent == Path():
            raise ConfigError(f"source = {str(path)!r} is neither a file nor another known source: give {SOURCES}")
        _raise_missing(path)
    if reader is None:
        raise ConfigError(
            f"the dataset {path} ends in {path.suffix!r}: give a file that ends in .jsonl (one JSON object per line) "
            "or .parquet"
        )
    return reader(path, limit)


def _raise_missing(path: Path) -> NoReturn:
    if path.is_dir():
        raise ConfigError(f"the dataset {path} is a folder: name a file in it, or write hf:{path}")
    if not path.parent.is_dir():
        raise ConfigError(f"the dataset {path} does not exist, nor does its folder: correct the path")
    siblings = [sibling.name for sibling in path.parent.iterdir()]
    raise ConfigError(f"the dataset {path} does not exist; in its folder, {nearest(path.name, siblings)}")


def _read_jsonl(path: Path, limit: int | None) -> list[DataRow]:
    rows: list[DataRow] = []
    with path.open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, LINE_BYTES + 1), b""), start=1):
            if len(rows) == limit:
                break
            if len(line) > LINE_BYTES:
                raise ConfigError(f"line {number} of {path} is longer than {LINE_BYTES} bytes: write shorter rows")
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"line {number} of {path} is not JSON ({error}): write one JSON object per line"
                ) from None
            if not isinstance(value, dict):
                raise ConfigError(
                    f"line {number} of {path} holds {json.dumps(value)[:60]}: write a JSON object, column to value"
                )
            rows.append(DataRow(value))
    return rows


def _read_parquet(path: Path, limit: int | None) -> list[DataRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return [DataRow(row) for row in file.read().slice(0, limit).to_pylist()]
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # the last for texts that are no UTF-8
        raise ConfigError(f"{path} cannot be read as Parquet ({error}): give another file") from None


# --- Hugging Face --------------------------------------------------------------------------------------------------


def _read_hugging_face(name: str, settings: DataSettings, limit: int | None) -> Rows:
    import datasets

    path = Path(name).expanduser()
    if not path.exists() and (name.startswith(("/", ".", "~")) or not name):
        _raise_missing(path)
    if path.is_file():
        raise ConfigError(f"the dataset hf:{name} is a file: write its path without hf:, or name its folder")
    datasets.disable_progress_bars()
    with TemporaryDirectory(prefix="starling-data-") as cache:
        try:
            loaded = _load_folder(path, settings, Path(cache)) if path.is_dir() else _load_from_hub(name, settings)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises arbitrary exceptions for bad files
            reason = _first_line(error.__cause__ or error)  # the library's own error often says only that there is one
            raise ConfigError(
                f"the Hugging Face dataset {name!r} cannot be loaded ({reason:.500}): check its name, "
                f"split = {settings.split!r}, config = {settings.config!r} and the network, or give a local folder"
            ) from None
        if limit is not None:
            loaded = loaded.select(range(min(limit, len(loaded))))
        try:
            revision = commit_of(loaded.info.download_checksums or {})
            rows = [*_undecoded_rows(loaded, settings)]
        except Exception as error:  # noqa: BLE001 - as above
            raise ConfigError(
                f"a row of the Hugging Face dataset {name!r} cannot be read ({_first_line(error)}): correct the dataset"
            ) from None
    folders = _own_folders(path if path.exists() else None, name)
    return Rows([_hugging_face_row(row, number, settings, folders) for number, row in enumerate(rows)], revision)


def _load_folder(path: Path, settings: DataSettings, cache: Path) -> Any:
    """Return the dataset in a local folder, for which the library writes only into `cache`."""
    import datasets

    from starling.controller.data.archives import AsTheyAre, prepare

    if any((path / file).exists() for file in (STATE, DICT)):
        check_saved(path)
        loaded = datasets.load_from_disk(str(path))
        if not isinstance(loaded, datasets.DatasetDict):
            return loaded
        if settings.split not in loaded:
            raise ValueError(f"it has no split {settings.split!r}; {nearest(settings.split, loaded)}")
        return loaded[settings.split]
    builder = builder_of(path, settings.config, cache)
    prepare(builder, AsTheyAre)
    return builder.as_dataset(split=settings.split)


def _load_from_hub(name: str, settings: DataSettings) -> Any:
    """Return a dataset of the hub, or of the library's cache."""
    import datasets

    from starling.controller.data.archives import Checked, prepare

    described = datasets.load.dataset_module_factory(name).builder_configs_parameters.builder_configs
    check_hub_versions(name, described or [])
    builder = datasets.load_dataset_builder(name, settings.config or None)
    check_hub_versions(name, [builder.config])
    check_hub_files(name, builder)
    prepare(builder, Checked)
    return builder.as_dataset(split=settings.split)


def check_hub_files(name: str, builder: Any) -> None:
    """Check that a builder reads only files of the dataset `name` of the hub: its README may name any others.

    Raises:
        ConfigError: naming the other file, or the kind of files where it is one that can name others itself.
    """
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _HUB_KINDS:
        raise ConfigError(
            f"the Hugging Face dataset {name!r} has files of the kind {kind!r}, which are not read; known: "
            f"{', '.join(sorted(_HUB_KINDS))}"
        )
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not str(file).startswith(f"hf://datasets/{name}@"):
                raise ConfigError(
                    f"the Hugging Face dataset {name!r} names the file {file!r:.255}, which is not of it: give another "
                    "dataset, or a local folder with its files"
                )


def check_hub_versions(name: str, configs: Iterable[Any]) -> None:
    """Check the versions that a dataset's README gives: the library takes them for the path of a folder.

    Raises:
        ConfigError: one has another form than numbers.
    """
    for config in configs:
        if re.fullmatch(r"\d+\.\d+\.\d+", str(config.version)) is None:
            raise ConfigError(f"the Hugging Face dataset {name!r} has a version that is none: give another dataset")


def commit_of(files: Iterable[str]) -> str:
    """Return the commit of the hub that the first of the downloaded files is of, nothing for local files."""
    found = (re.search(r"@([0-9a-f]{40})/", file) for file in files)
    return next((match[1] for match in found if match is not None), "")


def _undecoded_rows(loaded: Any, settings: DataSettings) -> Iterator[dict[str, Any]]:
    """Yield the rows with their images, videos and other media as they are stored: the path or the bytes of a file.

    To decode them is to read what the author of the dataset names: any file of this machine, or a URL. Columns that
    the settings do not name are None.
    """
    unused = dict.fromkeys(loaded.column_names)
    used = [column for column in unused if column in settings.columns]
    if not used:
        yield from (dict(unused) for _ in range(len(loaded)))
        return
    chosen = loaded.select_columns(used)
    stored = type(chosen.features)({column: _stored(feature) for column, feature in chosen.features.items()})
    for table in chosen.with_format("arrow").iter(batch_size=_BATCH):
        for row in table.to_pylist():
            yield {**unused, **stored.decode_example(row)}


def _stored(feature: Any) -> Any:
    """Return the feature that reads a column without decoding the media in it, at any depth."""
    import datasets

    if isinstance(feature, Mapping):
        return {name: _stored(inner) for name, inner in feature.items()}
    if isinstance(feature, list):
        return [_stored(inner) for inner in feature]
    if isinstance(feature, datasets.List | datasets.LargeList):
        return replace(feature, feature=_stored(feature.feature))
    is_json = isinstance(feature, getattr(datasets, "Json", ()))  # it is a text that names no file
    return replace(feature, decode=False) if getattr(feature, "decode", False) and not is_json else feature


def _hugging_face_row(row: dict[str, Any], number: int, settings: DataSettings, folders: Sequence[Path]) -> DataRow:
    """Return a row with the bytes of its images, because rollouts may not have access to the library's files."""
    shown = settings.image_column
    if shown not in row:
        return DataRow(row)
    return DataRow({**row, shown: _embedded(row[shown], f"row {number} of {settings.source!r}", folders)})


def _own_folders(path: Path | None, name: str) -> list[Path]:
    """Return the folders with the files of a dataset: its own one, or those to which the library downloads it."""
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    downloads = [Path(datasets.config.DOWNLOADED_DATASETS_PATH), Path(datasets.config.EXTRACTED_DATASETS_PATH)]
    if path is not None:
        return [path if path.is_dir() else path.parent, *downloads]
    return [Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="dataset"), *downloads]


def _embedded(value: Any, where: str, folders: Sequence[Path]) -> Any:
    if isinstance(value, list):
        return [_embedded(item, where, folders) for item in value]
    if not isinstance(value, Mapping) or value.get("bytes") or not value.get("path"):
        return value
    return {**value, "bytes": _read_own(str(value["path"]), where, folders)}


def _read_own(named: str, where: str, folders: Sequence[Path]) -> bytes:
    """Return the bytes of an image that a row names, which must be a file of its dataset.

    The author of the dataset, who may be anyone, has named it. Raises ConfigError.
    """
    where = f"{where} names the image {named!r:.255}"
    try:
        path = (folders[0] / named).resolve(strict=True)
        content = None
        if any(path.is_relative_to(folder.resolve()) for folder in folders):
            with open_regular(path) as file:
                content = file.read(MAX_INLINE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # the last for links to themselves
        raise ConfigError(f"{where}, which cannot be read ({error}): correct the row") from None
    if content is None:
        raise ConfigError(f"{where}, which is no file of the dataset: put it there, or its bytes into the row")
    if len(content) > MAX_INLINE_BYTES:
        raise ConfigError(f"{where} of more than {MAX_INLINE_BYTES} bytes: give a smaller one")
    return content


# --- reasoning-gym -------------------------------------------------------------------------------------------------


def _read_reasoning_gym(task: str, settings: DataSettings, limit: int | None) -> Iterator[DataRow]:
    """Generate the rows of a task (`question`, `answer`, `metadata`), without repeated questions.

    Each row has, as `metadata["reasoning_gym"]`, the task and the entry that the task's `score_answer` takes. The entry
    has no question, which can be long and which no task's scorer reads.
    """
    for entry in read_entries(task, settings.options, settings.size, limit):
        yield _reasoning_gym_row(task, settings.options, entry)


def _reasoning_gym_row(task: str, options: Mapping[str, Any], entry: Mapping[str, Any]) -> DataRow:
    scorer: dict[str, Any] = {
        "task": task,
        "entry": {"answer": entry["answer"], "metadata": entry["metadata"]},
    }
    if options:
        scorer["options"] = dict(options)
    return DataRow(entry, {"reasoning_gym": scorer})


# --- functions of the user -----------------------------------------------------------------------------------------


def names_a_function(source: str) -> bool:
    """Return whether `source` is MODULE:FACTORY or FILE.py:FACTORY, and neither hf:NAME nor reasoning_gym:TASK."""
    if source.startswith(("hf:", "reasoning_gym:")):
        return False
    place, _, attribute = source.rpartition(":")
    return all(map(str.isidentifier, attribute.split("."))) and (
        place.endswith(".py") or all(map(str.isidentifier, place.split(".")))
    )


def _read_factory(source: str, limit: int | None) -> list[DataRow | Prompt]:
    factory = import_object(source, "the dataset")
    if not callable(factory):
        raise ConfigError(f"the dataset {source} is of type {type(factory).__name__}: name a function")
    try:
        made = factory()
        values = None if made is None or isinstance(made, str | bytes | Mapping) else list(islice(made, limit))
    except Exception as error:  # the user's function may raise anything
        raise ConfigError(f"the dataset {source} raised {describe_raised(error)}; correct the function") from error
    if values is None:
        raise ConfigError(f"the dataset {source} returned {made!r:.60}: return a sequence of rows")
    return [_custom_row(value, number, source) for number, value in enumerate(values)]


def _custom_row(value: object, number: int, source: str) -> DataRow | Prompt:
    if isinstance(value, Prompt):
        return value
    if isinstance(value, Mapping):
        return DataRow(value)
    raise ConfigError(f"row {number} of {source} is {value!r:.60}: return dicts (column to value) or Prompts")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
