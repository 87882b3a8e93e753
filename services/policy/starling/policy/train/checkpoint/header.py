"""What a saved state says of itself, and how one is found. Needs no torch: the `starling` command reads it too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.storage import MANIFEST, Storage
from starling.weightsync.plan.offer import digest_of

STATES: Final = "states"
"""Where in a run's folder its states are."""
PREFIX: Final = "version-"

log = structlog.get_logger(__name__)


TrainerKind = Literal["sft", "rl", "dpo", "reward_model"]
"""What a trainer learns from: examples, scored groups, or pairs."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """How far the trainer in force has come."""

    kind: TrainerKind
    num_steps: int
    """Steps that it has made: where the schedule of its learning rate is."""
    total_steps: int
    begun_at: int = -1
    """The version whose weights are the reference of a KL term; -1 for none."""


class StateHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What `state.json` tells."""

    run: str
    """Whose state it is. With `version` it is the place in that run's journal: what led there, and no more."""
    version: int
    next_prompt: int
    """Position in the data of the first prompt that no step up to `version` has trained."""
    trainer: TrainerState | None
    """None before the first step."""
    python_random: tuple[int, tuple[int, ...], float | None]
    numpy_random: tuple[str, tuple[int, ...], int, int, float]
    metrics: dict[str, float]
    """What was known of `version`."""
    parts: str
    """The folder beside this file that holds the tensors."""
    digests: dict[str, str]
    """Of the files in it, by name."""
    form: Literal[2] = 2
    """How all this is written."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    state: msgspec.Raw


class DamagedStateError(Exception):
    """A state that is not what was written."""


@dataclass(frozen=True)
class VerifiedState:
    """A state whose files are as they were written."""

    storage: Storage
    """The folder that it is."""
    state: StateHeader

    @property
    def url(self) -> str:
        """Where it is."""
        return self.storage.url()


def encode_header(state: StateHeader) -> bytes:
    """Return the bytes of `state.json`."""
    encoded = msgspec.json.encode(state)
    return msgspec.json.encode(_Sealed(digest=digest_of(encoded), state=msgspec.Raw(encoded)))


def read_header(storage: Storage, *names: str) -> StateHeader:
    """Return what the state in the folder `names` of `storage` tells, without a look at its other files.

    Raises:
        DamagedError: there is none, or it is not what was written.
    """
    data = storage.read(*names, MANIFEST)
    if data is None:
        raise DamagedStateError(f"it has no {MANIFEST}")
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if digest_of(bytes(sealed.state)) != sealed.digest:
            raise DamagedStateError(f"{MANIFEST} is not what was written")
        return msgspec.json.decode(sealed.state, type=StateHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedStateError(f"{MANIFEST} is not what was written ({error})") from None


def verify_state(storage: Storage, *names: str) -> StateHeader:
    """Return what the state in the folder `names` of `storage` tells, after a look at every byte of it.

    Raises:
        DamagedError: it is not what was written.
    """
    state = read_header(storage, *names)
    for name, digest in state.digests.items():
        found = storage.digest(*names, state.parts, name)
        if found != digest:
            raise DamagedStateError(f"{name} is {'missing' if found is None else 'not what was written'}")
    return state


def state_versions(storage: Storage) -> Iterator[tuple[int, str]]:
    """Yield version and name of the folders of states in `storage`, whole or not, the newest first."""
    numbers = [(name.removeprefix(PREFIX), name) for name in storage.names() if name.startswith(PREFIX)]
    yield from sorted(((int(number), name) for number, name in numbers if _is_number(number)), reverse=True)


def newest_state(storage: Storage) -> VerifiedState | None:
    """Return the newest state in `storage` that is as it was written, None when there is none.

    One that is not is told of, and left where it is.
    """
    for version, name in state_versions(storage):
        try:
            state = verify_state(storage, name)
            if state.version != version:
                raise DamagedStateError(f"it is of version {state.version}")
        except DamagedStateError as error:
            log.warning("this saved state is damaged and not used", state=storage.url(name), reason=str(error))
        else:
            return VerifiedState(storage.below(name), state)
    return None


def find_state(url: str, options: dict[str, Any] | None = None) -> VerifiedState:
    """Return the state that `url` means: its own folder, or the newest in a folder of states or in that of a run.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    storage = Storage(url, options)
    names = storage.names()
    if MANIFEST in names:
        try:
            return VerifiedState(storage, verify_state(storage))
        except DamagedStateError as error:
            raise ConfigError(f"the state {url} is damaged: {error}; give an older one of that run") from None
    found = newest_state(storage.below(STATES) if STATES in names else storage)
    if found is None:
        raise ConfigError(
            f"there is no whole state in {url}; give the folder of one, such as runs/mine/attempt-1/states/version-40"
        )
    return found


def run_config_of(state: Path) -> Path | None:
    """Return the configuration of the run in whose folder a local `state` is, None when it lies elsewhere."""
    config = state.absolute().parent.parent / "config.toml"
    return config if config.is_file() else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
