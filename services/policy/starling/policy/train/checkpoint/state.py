"""Saved states of a policy: everything needed to make the next step bitwise as if the run had never stopped.

    states/version-<n>/
        state.json      position of the run, generators of random numbers, digests of the files
        parts/          tensors in DCP's format:
                            weights/<Hugging Face name>     the version itself
                            trainer/<field>:<parameter>     the optimizer's moments, master weights, EMA weights
                            reference/<name>                the model of the KL term, where it is not the initial one
                            random/<device>                 the states of torch's generators

A snapshot is copied into host memory at once, and written while steps continue. A state is complete when its
`state.json` exists, which is written last; digests of all files are verified before anything is read. Nothing in it is
code: see `starling.policy.train.checkpoint.dcp`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.header import (
    PREFIX,
    DamagedStateError,
    StateHeader,
    TrainerState,
    VerifiedState,
    encode_header,
    read_header,
    state_versions,
)
from starling.policy.train.checkpoint.storage import MANIFEST, Storage

if TYPE_CHECKING:  # its import takes half a second, which only a process that writes or reads a state needs
    from torch.distributed import ProcessGroup

    from starling.policy.train.checkpoint.dcp import SavedTensors, Shape
    from starling.policy.train.checkpoint.parts import Part

NUM_KEPT: Final = 2
"""Number of states to keep: the newest, and the one before in case that is damaged."""
WEIGHTS, TRAINER, REFERENCE, RANDOM = "weights/", "trainer/", "reference/", "random/"

T = TypeVar("T")
log = structlog.get_logger(__name__)


class HostBuffers:
    """Pinned host memory for copies of tensors, reused for each copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of `tensors`, which overwrite the copies taken before."""
        buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._buffers |= buffers
        return buffers

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer


@dataclass(frozen=True)
class StateSnapshot:
    """A state in host memory that is not yet written."""

    state: StateHeader
    """Without `parts` and `digests`."""
    tensors: Mapping[str, Tensor]
    """Of this process; where others have parts of the same state, see `take_parts`."""

    def write(self, storage: Storage, path: str) -> dict[str, str]:
        """Write the tensors into the folder `path` of the file system of `storage`. Returns the digest of each file.

        Raises:
            ConfigError: the storage fails.
        """
        from starling.policy.train.checkpoint.dcp import write_tensors

        with storage.explained("written"):
            return write_tensors(storage.fs, path, self.tensors)


@dataclass(frozen=True)
class PartsSnapshot(StateSnapshot):
    """The part of a state that one of several ranks holds."""

    parts: Mapping[str, Part]
    """The same tensors, as parts of whole ones."""

    def write_parts(self, storage: Storage, path: str, group: ProcessGroup) -> dict[str, str]:
        """Write the parts of all ranks of `group`, each of which calls this; see `write`."""
        from starling.policy.train.checkpoint.dcp import write_parts

        with storage.explained("written"):
            return write_parts(storage.fs, path, self.parts, group)


@dataclass(frozen=True)
class StateMetadata:
    """Position of a run, saved with the tensors of its state."""

    run: str
    version: int
    next_prompt: int = 0
    trainer: TrainerState | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def take_state(
    metadata: StateMetadata, tensors: Mapping[str, Tensor], device: torch.device, buffers: HostBuffers
) -> StateSnapshot:
    """Take a snapshot of the present state.

    Args:
        metadata: position of the run.
        tensors: by section and name, as in the files; without the generators of random numbers.
        device: whose generator is included.
        buffers: memory of the copies, which are valid until it is used again.
    """
    return StateSnapshot(header_of(metadata), buffers.take({**tensors, **random_states(device)}))


def take_parts(
    metadata: StateMetadata, parts: Mapping[str, Part], device: torch.device, buffers: HostBuffers
) -> PartsSnapshot:
    """Take a snapshot of this rank's `parts`; see `take_state`."""
    from starling.policy.train.checkpoint.parts import Part

    parts = {**parts, **{name: Part.whole(tensor) for name, tensor in random_states(device).items()}}
    copies = buffers.take({name: part.local for name, part in parts.items()})
    moved = {name: part.moved(copies[name]) for name, part in parts.items()}
    return PartsSnapshot(header_of(metadata), copies, moved)


def header_of(metadata: StateMetadata) -> StateHeader:
    """Return the header of a state that is not written, with the present generators of random numbers."""
    return StateHeader(
        run=metadata.run,
        version=metadata.version,
        next_prompt=metadata.next_prompt,
        trainer=metadata.trainer,
        metrics={name: value for name, value in metadata.metrics.items() if np.isfinite(value)},
        python_random=random.getstate(),
        numpy_random=_numpy_random(),
        parts="",
        digests={},
    )


class StateStore:
    """The states of one run, each in a folder of `storage`."""

    def __init__(self, storage: Storage, *, max_keep: int = NUM_KEPT, best: str = "") -> None:
        """Keep the newest `max_keep` states, and the best by the metric `best` (with ``-`` before it: the lowest)."""
        self.storage, self._max_keep = storage, max_keep
        self._best, self._sign = best.lstrip("+-"), -1.0 if best.startswith("-") else 1.0

    def write(self, snapshot: StateSnapshot) -> str:
        """Write a state, then remove old ones. Returns its URL, once it is durable.

        Raises:
            ConfigError: the storage fails; the states before are kept.
        """
        name = f"{PREFIX}{snapshot.state.version}"
        with self.storage.writing(name) as draft:
            with self.storage.explained("written", name):
                digests = snapshot.write(self.storage.below(name), draft.path)
            draft.manifest = encode_header(msgspec.structs.replace(snapshot.state, parts=draft.parts, digests=digests))
        if self._best and self._best not in snapshot.state.metrics:
            log.warning(
                "this state cannot be the best: its metric is missing",
                state=self.storage.url(name),
                metric=self._best,
                available=sorted(snapshot.state.metrics),
            )
        try:
            self._remove_old(snapshot.state.version)
        except ConfigError as error:
            log.warning("old states could not be removed", reason=str(error))
        return self.storage.url(name)

    def _remove_old(self, version: int) -> None:
        """Remove the states up to `version` that are not kept, and incomplete ones left by crashes."""
        names = [name for found, name in state_versions(self.storage) if found <= version]
        complete = [name for name in names if MANIFEST in self.storage.names(name)]
        kept = {*complete[: self._max_keep], *self._best_of(complete)}
        for name in names:
            if name not in kept:
                self.storage.remove(name)

    def _best_of(self, names: list[str]) -> list[str]:
        """Return the name of the state with the best metric; of equal ones the newest."""
        values = {}
        for name in names if self._best else ():
            with suppress(DamagedStateError):
                metrics = read_header(self.storage, name).metrics
                if self._best in metrics:
                    values[name] = self._sign * metrics[self._best]
        return [max(values, key=lambda name: values[name])] if values else []


@dataclass(frozen=True)
class SavedState:
    """A state to resume from."""

    state: StateHeader
    _storage: Storage
    _parts: SavedTensors

    @classmethod
    def of(cls, verified: VerifiedState) -> SavedState:
        """Open a verified state for reading."""
        from starling.policy.train.checkpoint.dcp import SavedTensors

        storage = verified.storage
        state = verified.state
        return cls(state, storage, SavedTensors(storage.fs, storage.path(state.parts), state.digests.keys()))

    @property
    def url(self) -> str:
        """URL of its folder."""
        return self._storage.url()

    def has(self, section: str, like: Callable[[str], bool] = bool) -> bool:
        """Return whether `section` has a tensor whose name satisfies `like`."""
        return any(name.startswith(section) and like(name.removeprefix(section)) for name in self._shapes())

    def dtype(self, section: str) -> torch.dtype:
        """Return the element type of the first floating-point tensor in `section`."""
        kinds = (dtype for name, (dtype, _) in self._shapes().items() if name.startswith(section))
        return next((dtype for dtype in kinds if dtype.is_floating_point), torch.float32)

    def narrowest(self, section: str) -> torch.dtype:
        """Return the floating-point type of fewest bytes in `section`: some modules stay in float32."""
        kinds = (dtype for name, (dtype, _) in self._shapes().items() if name.startswith(section))
        return min((dtype for dtype in kinds if dtype.is_floating_point), key=_size_of, default=torch.float32)

    def restore(self, section: str, live: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `section` into `live`. Raises ConfigError if they are of another model."""
        shapes = self._shapes()
        saved = {name.removeprefix(section): shape for name, shape in shapes.items() if name.startswith(section)}
        difference = _difference(saved, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in live.items()})
        if difference is not None:
            raise ConfigError(
                f"the state {self._storage.url()} is of another model: {difference}; "
                "give the model of that run as model.path, or start a new run"
            )
        with self._storage.explained("read"):
            self._parts.read_into(in_section(section, live))

    def restore_parts(self, section: str, parts: Mapping[str, Part], *, what: str, whole: bool) -> None:
        """Copy this rank's parts of the tensors of `section` into `parts`, by name.

        Args:
            section: of the state.
            parts: filled in place.
            what: the section, in words.
            whole: whether this rank has a part of each tensor, so that more in the state is an error.

        Raises:
            ConfigError: they are of another model, or of other settings.
        """
        saved = {
            name.removeprefix(section): shape for name, shape in self._shapes().items() if name.startswith(section)
        }
        live = {name: (part.local.dtype, part.shape) for name, part in parts.items()}
        difference = _difference(saved if whole else {name: saved[name] for name in saved.keys() & live.keys()}, live)
        if difference is not None:
            raise ConfigError(
                f"{what} of the state {self._storage.url()} does not fit: {difference}; "
                "use the model and the settings of that run, or start a new one"
            )
        with self._storage.explained("read"):
            self._parts.read_parts({f"{section}{name}": part for name, part in parts.items()})

    def read(self, section: str) -> dict[str, Tensor]:
        """Return the tensors of `section`, on the CPU."""
        with self._storage.explained("read"):
            return self._parts.read(section)

    def _shapes(self) -> Mapping[str, Shape]:
        with self._storage.explained("read"):
            return self._parts.shapes()

    def restore_random(self, device: torch.device) -> None:
        """Set the generators of random numbers."""
        restore_random(self.state, self.read(RANDOM), device)


def restore_random(state: StateHeader, states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators of random numbers: of Python and numpy from `state`, of torch from `states`, by device."""
    random.setstate(state.python_random)
    name, keys, position, has_gauss, gauss = state.numpy_random
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_random(seed: int) -> None:
    """Seed the generators of random numbers for version 0."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def in_section(section: str, tensors: Mapping[str, T]) -> dict[str, T]:
    """Return `tensors` under their names in a state: prefixed by the section."""
    return {f"{section}{name}": tensor for name, tensor in tensors.items()}


def _difference(saved: Mapping[str, Shape], live: Mapping[str, Shape]) -> str | None:
    """Describe the first difference between two sets of weights, values aside."""
    for name in sorted(saved.keys() | live.keys()):
        if name not in live:
            return f"it has {name}, which this model does not have"
        if name not in saved:
            return f"it has no {name}, which this model has"
        if saved[name] != live[name]:
            return f"its {name} is {_kind(saved[name])}, and this model's is {_kind(live[name])}"
    return None


def _kind(shape: Shape) -> str:
    return f"{str(shape[0]).removeprefix('torch.')} {list(shape[1])}"


def _numpy_random() -> tuple[str, tuple[int, ...], int, int, float]:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    name, keys, position, has_gauss, gauss = state
    return name, tuple(keys.tolist()), position, has_gauss, gauss


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators, by section and device."""
    states = {f"{RANDOM}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(device)
    return states


def _size_of(dtype: torch.dtype) -> int:
    return dtype.itemsize
