"""Download managers of the library `datasets` that do not believe the archives of a dataset's author.

The library unpacks what is an archive by its content, whatever its name says. Its own check of a tar file believes
symbolic links to stay in the folder as their text reads, and paths that are too long to be looked up: with both, an
archive has any file of this machine read as rows, or written. Imported late, because `datasets` takes seconds.
"""

from __future__ import annotations

import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import datasets
from datasets.utils.extract import Extractor

from starling.common.errors import ConfigError
from starling.controller.data.folders import check_arrow

_UNPACKED: Final = frozenset({None, "tar", "zip", "gzip", "xz", "bz2", "zstd", "lz4"})
"""Formats of archives that are unpacked, by the library's names; None for a file that is no archive."""


class AsTheyAre(datasets.DownloadManager):  # type: ignore[misc]
    """Gives the files of a local folder to a builder, and unpacks none of them."""

    def extract(self, path_or_paths: Any) -> Any:
        """Return the paths."""
        return path_or_paths


class Checked(datasets.DownloadManager):  # type: ignore[misc]
    """Downloads files of the hub; refuses Arrow files that are damaged, and archives with anything but files."""

    def download(self, url_or_urls: Any) -> Any:
        """Return the paths of downloaded files. Raises ConfigError."""
        paths = super().download(url_or_urls)
        for url, path in zip(_flat(url_or_urls), _flat(paths), strict=True):
            if url.endswith(".arrow"):
                check_arrow(Path(path))
        return paths

    def extract(self, path_or_paths: Any) -> Any:
        """Return the paths of unpacked files, or of folders with them. Raises ConfigError."""
        for path in _flat(path_or_paths):
            check_archive(path)
        return super().extract(path_or_paths)


def prepare(builder: Any, manager: type[datasets.DownloadManager]) -> None:
    """Have a builder read its files through a download manager of that type. Raises any exception of the library."""
    config = datasets.DownloadConfig(
        cache_dir=builder._cache_downloaded_dir,
        use_etag=False,
        token=builder.token,
        storage_options=builder.storage_options,
    )
    builder.download_and_prepare(
        dl_manager=manager(builder.dataset_name, download_config=config, base_path=builder.base_path)
    )


def check_archive(path: str) -> None:
    """Check that an archive unpacks to files and folders only: no links, pipes or devices.

    Raises:
        ConfigError: it has something else, or a file that runs as its owner, is damaged, or is of a format that is
            not read.
    """
    kind = Extractor.infer_extractor_format(path)
    if kind not in _UNPACKED:
        raise ConfigError(f"{path} is an archive of the format {kind}, which is not unpacked: give its files")
    if kind != "tar":
        return
    try:
        with tarfile.open(path) as archive:
            other = next((member for member in archive if not _is_harmless(member)), None)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise ConfigError(f"the archive {path} is damaged ({error}): restore the dataset") from None
    if other is not None:
        raise ConfigError(
            f"the archive {path} has {other.name!r:.255}, which is no file or folder, or a program that runs as its "
            "owner: give another dataset"
        )


def _is_harmless(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a folder, or a file that does not run with the rights of the user who unpacks it."""
    return member.isdir() or (member.isreg() and not member.mode & (stat.S_ISUID | stat.S_ISGID))


def _flat(value: Any) -> Iterator[str]:
    """Yield the paths or URLs in lists and dicts of them, in order."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield str(value)
