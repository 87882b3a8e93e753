"""Settings of one role, for a process that joins the run with a key and nothing else (`starling join`).

They are read from the controller's configuration files when the first process asks: a run that nobody joins pays
nothing. `starling.common.net.role_settings` says which sections a role gets, and what is withheld.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog
import xxhash

from starling.common.errors import ConfigError
from starling.common.files import open_regular
from starling.common.folder_digests import DIGESTS
from starling.common.net.role_settings import (
    LOCAL,
    MAX_FILE_BYTES,
    MAX_FILES,
    MAX_MODEL_BYTES,
    SECTIONS_OF,
    is_model_file,
    withhold_secrets,
)
from starling.common.settings import Tree, read_toml
from starling.common.wire.messages import ModelFile, RoleSettings
from starling.controller.settings import ControllerProcess

log = structlog.get_logger(__name__)

NO_CONFIG: Final = (
    "the controller has no configuration file with the sections of this role; start the replica with --config FILE"
)


class RoleSettingsSource:
    """Answers to requests for the settings of a role, made once for each."""

    def __init__(self, configs: Sequence[Path], settings: ControllerProcess) -> None:
        """Prepare; nothing is read yet. `configs`: files of the whole run, a later one wins."""
        self._configs, self._settings = configs, settings
        self._answers: dict[str, RoleSettings] = {}
        self._model: tuple[tuple[ModelFile, ...], tuple[bytes, ...], str] | None = None

    def answer(self, role: str, with_model: bool) -> tuple[RoleSettings, tuple[bytes, ...]]:
        """Return the settings of `role`, if asked with the small files of the model folder."""
        try:
            if role not in self._answers:
                self._answers[role] = self._make(role)
        except ConfigError as error:
            log.warning("no_settings", role=role, reason=str(error))
            return RoleSettings(problem=str(error)), ()
        settings = self._answers[role]
        if not with_model:
            return settings, ()
        if self._model is None:
            self._model = _read_model(settings.sections.get("model", {}).get("path", ""))
        files, buffers, problem = self._model
        return msgspec.structs.replace(settings, files=files, problem=problem), buffers

    def _make(self, role: str) -> RoleSettings:
        """Read the sections of `role`. Raises ConfigError when a file cannot be read."""
        tree: Tree = {}
        for path in self._configs:
            _merge(tree, read_toml(path))
        own = {name: section for name, section in tree.items() if name in SECTIONS_OF[role]}
        if role not in own and role == "reward":  # the others have defaults for everything
            return RoleSettings(problem=NO_CONFIG)
        for section, name in LOCAL:
            own.get(section, {}).pop(name, None)
        own["run"] = {**own.get("run", {}), "id": self._settings.run.id, "kind": self._settings.run.kind}
        own["network"] = {**own.get("network", {}), "curve": self._settings.network.curve}
        model = own.get("model", {})
        model.pop("scratch", None)
        if model.get("path"):
            model["path"] = str(Path(model["path"]).absolute())  # the same on all hosts of a shared file system
        sections, withheld = withhold_secrets(_plain(own))
        return RoleSettings(sections=sections, withheld=tuple(withheld))


def _merge(tree: Tree, more: Mapping[str, Any]) -> None:
    """Put `more` over `tree`."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = copy.deepcopy(value)


def _plain(value: Any) -> Any:
    """Return a value of TOML with its dates and times as texts, which messages cannot have otherwise."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | bool | int | float) else str(value)


def _read_model(path: str) -> tuple[tuple[ModelFile, ...], tuple[bytes, ...], str]:
    """Return the small files of the model folder at `path`, their bytes, and why there are none."""
    folder = Path(path)
    if not path or not (folder / "config.json").is_file():
        return (), (), f"the model folder {path or '(none)'} is not on the controller's machine"
    files, buffers = [], []
    try:
        names = sorted(one.name for one in folder.iterdir() if is_model_file(one.name) and one.is_file())
        for name in names:
            if name == DIGESTS:
                continue
            with open_regular(folder / name) as file:
                data = file.read(MAX_FILE_BYTES + 1)
            files.append(ModelFile(name=name, nbytes=len(data), digest=xxhash.xxh3_128(data).hexdigest()))
            buffers.append(data)
            if len(data) > MAX_FILE_BYTES or len(files) > MAX_FILES or sum(map(len, buffers)) > MAX_MODEL_BYTES:
                return (), (), f"{folder / name} is one file too many or too large to be sent; copy the folder"
    except OSError as error:
        return (), (), f"the model folder {folder} cannot be read: {error.strerror}"
    return tuple(files), tuple(buffers), ""
