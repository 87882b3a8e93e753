"""Files of one attempt at a recipe: folder, keys, configuration, lock, metrics."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from starling.cli.recipe.schema import Recipe, resolved, to_toml
from starling.common.errors import ConfigError, StarlingError
from starling.common.files import CONTROLLER_FILES, check_own, open_own, parse_line, read_lines, write_whole
from starling.common.kinds import KINDS
from starling.common.net.curve import ALLOWED
from starling.common.net.keyring import make_keys
from starling.common.settings import ServiceSettings, complete_toml, read_toml

OBSERVER = "observer-0"
OPERATOR = "operator-0"
OWN_FILES: Final = (*CONTROLLER_FILES, "config.toml", "recipe.toml", "lock", "logs/*.log")
"""Files of the controller and of the supervisor in the folder of an attempt."""
ADDRESS_BYTES: Final = 1 << 16
"""Limit on controller.json."""


@dataclass(frozen=True)
class Attempt:
    """The files of one attempt at a recipe."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """The recipe, all files and flags in one: `starling run` reads it again."""
        return self.folder / "recipe.toml"

    @property
    def config(self) -> Path:
        """The services' configuration: the recipe with the run's id and the model's folder."""
        return self.folder / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: steps, adoptions, evaluations, failures."""
        return self.folder / "metrics.jsonl"

    @property
    def journal(self) -> Path:
        """What the controller needs to recover."""
        return self.folder / "journal.sqlite"

    @property
    def address(self) -> Path:
        """The controller's addresses, as it wrote them; present while it listens."""
        return self.folder / "controller.json"

    @property
    def logs(self) -> Path:
        """Output of each process, over all its restarts."""
        return self.folder / "logs"

    def key(self, name: str) -> Path:
        """The key file of `name`."""
        return self.folder / "keys" / f"{name}.json"

    @classmethod
    def create(cls, recipe: ServiceSettings) -> Attempt:
        """Make the folder of the next attempt. Raises ConfigError when it cannot be made."""
        parent = recipe.run.folder / recipe.run.name
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = parent / f"attempt-{max(map(_number, attempts_in(parent)), default=0) + 1}"
        except OSError as error:
            raise ConfigError(f"cannot make a folder in {parent}: {error.strerror}; set run.folder") from None
        try:
            folder.mkdir()
        except FileExistsError:
            raise ConfigError(
                f"another process has just made {folder} for a run of this name; start this one again, or set run.name"
            ) from None
        except OSError as error:
            raise ConfigError(f"cannot make a folder in {parent}: {error.strerror}; set run.folder") from None
        return cls(folder.absolute())

    @classmethod
    def create_at(cls, folder: Path) -> Attempt:
        """Make `folder` that of an attempt. Raises ConfigError when it cannot be made."""
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}; give another one") from None
        return cls(folder.absolute())

    @classmethod
    def find(cls, folder: Path | None) -> Attempt:
        """Return the attempt in `folder`, or the newest of the run in it, or of the runs below ``./runs`` for None.

        Raises ConfigError when there is none.
        """
        if folder is not None and _is_attempt(folder):
            return cls(folder.absolute())._checked()
        where = Path("runs") if folder is None else folder
        parents = [path for path in where.glob("*") if path.is_dir()] if folder is None else [where]
        found = [path for parent in parents for path in attempts_in(parent) if _is_attempt(path)]
        if not found:
            raise ConfigError(f"there is no run in {where}; give the folder of one, such as runs/quickstart")
        # Of several runs the one that was started last; of one run the greatest number, whatever was copied when.
        newest = max(found, key=_number if folder is not None else lambda path: path.stat().st_mtime)
        return cls(newest.absolute())._checked()

    def _checked(self) -> Attempt:
        """Return this attempt. Raises ConfigError when a file by which it is reached is a link, or no file."""
        check_own(self.folder, ("config.toml", "recipe.toml", "controller.json"))
        return self

    def read_address(self) -> Any:
        """Return what the controller has written about its addresses. Raises OSError, ValueError or RecursionError."""
        with os.fdopen(open_own(self.address), "rb") as file:
            return json.loads(file.read(ADDRESS_BYTES))

    def check_folders(self) -> None:
        """Raise ConfigError when something else is where a folder or a file of the attempt belongs."""
        check_own(self.folder, OWN_FILES)
        for folder in (self.folder / "keys", self.logs):
            if folder.exists() and not folder.is_dir():
                raise ConfigError(f"{folder} is not a folder; move it away, and start again")

    def prepare(self, recipe: Recipe, names: list[str]) -> None:
        """Write keys, recipe and configuration for the processes `names`, unless they exist.

        Raises ConfigError when recipe and configuration of a run that is resumed differ.
        """
        if not (self.folder / "keys" / ALLOWED).exists():
            # Replace the keys of an interrupted start.
            make_keys(self.folder / "keys", [*names, OBSERVER, OPERATOR], replace=True)
        if not self.config.exists():
            write_whole(self.recipe, complete_toml(to_toml(recipe)))
            write_whole(self.config, complete_toml(to_toml(resolved(recipe, self.folder))))
        else:
            self._check_unedited()

    def add_key(self, name: str) -> None:
        """Make the key of a replica that is placed during the run, unless it has one. Raises ConfigError."""
        if not self.key(name).exists():
            make_keys(self.folder / "keys", [name], replace=True)

    def _check_unedited(self) -> None:
        """Raise ConfigError when one of recipe.toml, which the supervisor reads, and config.toml was edited.

        They were written with the same settings, but for those that `resolved` changes; so the files are compared as
        they are, and may be of an older version.
        """
        recipe, config = _leaves(read_toml(self.recipe)), _leaves(read_toml(self.config))
        ours = (
            "run.id",
            "rollout.pools",
            *(("model.", "policy.init") if any(key.startswith("model.scratch.") for key in recipe) else ()),
        )
        keys = sorted(key for key in {*recipe, *config} if not key.startswith(ours))
        for key in keys:
            if recipe.get(key) != config.get(key):
                shown = [f"{key} = {found[key]!r:.100}" if key in found else f"no {key}" for found in (recipe, config)]
                raise ConfigError(
                    f"{self.recipe} has {shown[0]}, and {self.config} has {shown[1]}: one of them was edited since the "
                    "run began; undo that, or edit both alike to resume with the change (`starling run RECIPE.toml "
                    f"--from {self.folder}` begins a new run from its states)"
                )

    def acquire(self) -> int:
        """Lock the attempt for this process. Returns the descriptor that holds the lock.

        Raises ConfigError when another process runs it.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW  # it is truncated
            descriptor = os.open(self._lock, flags, 0o600)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise ConfigError(f"{self._lock} is not a regular file; remove it, and start again")
        except OSError as error:
            raise ConfigError(
                f"{self._lock} cannot be opened: {error.strerror}; the folder of a run has to be writable, and its "
                "lock a file"
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            who = f"process {owner}" if owner else "another process"
            raise ConfigError(
                f"{self.folder} is being run by {who}; `starling status {self.folder}` shows its state"
            ) from None
        try:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"{self._lock} cannot be written: {error.strerror}; free some space") from None
        return descriptor

    def check_journal(self) -> None:
        """Raise ConfigError for a journal with a schema of others; a missing one is the controller's to report."""
        from starling.controller.shell.journal.journal import check_before_resume

        if self.journal.exists():
            check_before_resume(self.journal)

    def is_complete(self) -> bool:
        """Return whether the run has reached its end; a journal that cannot be read does not say so."""
        from starling.controller.shell.journal.journal import has_ended  # only here: most commands need no journal

        try:
            return has_ended(self.journal)
        except StarlingError:
            return False

    def trains(self) -> bool:
        """Return whether the run makes versions of a model."""
        run = read_toml(self.config).get("run", {})
        return KINDS[run["kind"]].trains if isinstance(run, dict) and run.get("kind") in KINDS else True

    def num_steps(self) -> int:
        """Return the number of the newest step, 0 before the first."""
        return max(
            (one for line in iter_metrics(self.metrics, "step") if type(one := line.get("step")) is int), default=0
        )

    def is_over(self) -> bool:
        """Return whether a supervisor on this machine ran the attempt and has exited."""
        try:
            descriptor = open_own(self._lock)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    @property
    def _lock(self) -> Path:
        return self.folder / "lock"


def iter_metrics(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl of these kinds, or of all kinds: those of a long run do not fit into memory.

    A line that cannot be read is left out: a full disk, a crash or a power cut may have damaged it. Raises ConfigError
    when `path` is something else than a file.
    """
    for text in read_lines(path):
        line = parse_line(text)
        if line is not None and isinstance(kind := line.get("kind"), str) and (not kinds or kind in kinds):
            yield line


@contextmanager
def damaged_lines(path: Path, what: str) -> Iterator[None]:
    """Convert what lines of other types raise to one sentence: metrics.jsonl may be damaged, or be of others.

    `what`: which lines are read. Raises ConfigError.
    """
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} has a damaged line {what} ({error!r:.300}); remove the line") from None


def read_metrics(path: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the lines of `iter_metrics`, of a run that is known to be short."""
    return list(iter_metrics(path, *kinds))


def attempts_in(parent: Path) -> list[Path]:
    """Return the folders of attempts in the folder of a run."""
    return [path for path in parent.glob("attempt-*") if path.name.removeprefix("attempt-").isdecimal()]


def has_run(folder: Path) -> bool:
    """Return whether a folder is that of an attempt, or of a run that has one."""
    return _is_attempt(folder) or any(map(_is_attempt, attempts_in(folder)))


def newest_attempt(folder: Path) -> Path:
    """Return the newest attempt in the folder of a run; any other folder itself."""
    return max(attempts_in(folder), key=_number, default=folder)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree of TOML by their keys, such as ``rl.num_steps``; empty tables have none."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _number(attempt: Path) -> int:
    return int(attempt.name.removeprefix("attempt-"))


def _is_attempt(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.toml", "controller.json", "metrics.jsonl"))
