"""Header of a saved state (`state.json`), and the search for states. Imports no torch: the command line reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import structlog

from starling.common.errors import ConfigError
from starling.common.ids import TrainerKind, whole_number
from starling.policy.train.checkpoint.storage import MANIFEST, Storage
from starling.weightsync.offers.offer import digest_of

STATES: Final = "states"
"""Subfolder of a run's folder with its states."""
CHECKPOINTS: Final = "checkpoints"
"""Subfolder of a run's folder with its exports."""
PREFIX: Final = "version-"
_TWISTER_KEYS: Final = 624

log = structlog.get_logger(__name__)


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Position of the active trainer."""

    kind: TrainerKind
    num_steps: int
    """Steps made so far: its position in the learning-rate schedule."""
    total_steps: int
    begun_at: int = -1
    """Version of the reference model; -1 for none."""


class StateHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `state.json`."""

    run: str
    """Id of the run. With `version` it identifies the position in that run's journal."""
    version: int
    next_prompt: int
    """Position in the data of the first prompt that no step up to `version` has trained."""
    trainer: TrainerState | None
    """None before the first step."""
    python_random: tuple[int, tuple[int, ...], float | None]
    numpy_random: tuple[str, tuple[int, ...], int, int, float]
    metrics: dict[str, float]
    """Metrics of `version`."""
    parts: str
    """Name of the folder with the tensors, next to this file."""
    digests: dict[str, str]
    """Of the files in it, by name."""
    form: Literal[2] = 2
    """Version of the format."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    state: msgspec.Raw


class DamagedStateError(Exception):
    """A state that is missing, incomplete or corrupt."""


@dataclass(frozen=True)
class VerifiedState:
    """A state whose files match their digests."""

    storage: Storage
    """The folder of the state."""
    state: StateHeader

    @property
    def url(self) -> str:
        """URL of the folder."""
        return self.storage.url()


def encode_header(state: StateHeader) -> bytes:
    """Return the bytes of `state.json`."""
    encoded = msgspec.json.encode(state)
    return msgspec.json.encode(_Sealed(digest=digest_of(encoded), state=msgspec.Raw(encoded)))


def read_header(storage: Storage, *names: str) -> StateHeader:
    """Read the header of the state in the folder `names` of `storage`, without checking its other files.

    Raises:
        DamagedStateError: it is missing or corrupt.
    """
    data = storage.read(*names, MANIFEST)
    if data is None:
        raise DamagedStateError(f"it has no {MANIFEST}")
    return decode_header(data)


def decode_header(data: bytes) -> StateHeader:
    """Return the header that `encode_header` has encoded. Raises DamagedStateError if it is corrupt."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if digest_of(bytes(sealed.state)) != sealed.digest:
            raise DamagedStateError(f"{MANIFEST} does not match its digest")
        state = msgspec.json.decode(sealed.state, type=StateHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedStateError(f"{MANIFEST} cannot be decoded ({error})") from None
    for name in (state.parts, *state.digests):
        if "/" in name or "\0" in name or name == "..":
            raise DamagedStateError(f"{MANIFEST} names {name!r:.255}, which is no file of this state")
    if not _are_random_states(state):
        raise DamagedStateError(f"{MANIFEST} has states of random numbers that no generator has")
    return state


def _are_random_states(state: StateHeader) -> bool:
    """Return whether the generators can be in these states: NumPy reads beyond its keys at another position."""
    version, python, _ = state.python_random
    name, keys, position, has_gauss, _ = state.numpy_random
    return (
        (version, name) == (3, "MT19937")
        and _is_twister(python[:-1], *python[-1:])
        and _is_twister(keys, position)
        and has_gauss in (0, 1)
    )


def _is_twister(keys: Sequence[int], position: int = -1) -> bool:
    """Return whether a Mersenne Twister can have these keys, and this position in them."""
    return len(keys) == _TWISTER_KEYS and 0 <= position <= _TWISTER_KEYS and all(0 <= key < 1 << 32 for key in keys)


def verify_state(storage: Storage, *names: str) -> StateHeader:
    """Read the header of the state in the folder `names` of `storage`, and verify the digests of all files.

    Raises:
        DamagedStateError: a file is missing or corrupt.
    """
    state = read_header(storage, *names)
    for name, digest in state.digests.items():
        found = storage.digest(*names, state.parts, name)
        if found != digest:
            raise DamagedStateError(f"{name} {'is missing' if found is None else 'does not match its digest'}")
    return state


def state_versions(storage: Storage) -> Iterator[tuple[int, str]]:
    """Yield version and name of the state folders in `storage`, complete or not, newest first."""
    found = [(whole_number(name.removeprefix(PREFIX)), name) for name in storage.names() if name.startswith(PREFIX)]
    yield from sorted(((version, name) for version, name in found if version >= 0), reverse=True)


def newest_state(storage: Storage) -> VerifiedState | None:
    """Return the newest intact state in `storage`, None if there is none.

    A damaged state is logged and left in place.
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
    """Return the state at `url`: a state's own folder, or the newest in a folder of states or of a run.

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
            f"there is no intact state in {url}; give the folder of one, such as runs/mine/attempt-1/states/version-40"
        )
    return found
