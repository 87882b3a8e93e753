"""The saved state of a policy: all that is needed to make the next step exactly as if nothing had happened.

    states/version-<n>/
        state.json      what follows from which step, the generators of random numbers, digests of the files
        parts/          tensors, as DCP writes them:
                            weights/<Hugging Face name>     the version itself
                            trainer/<field>:<parameter>     the optimizer's averages, master weights, averaged weights
                            reference/<name>                the model of the KL term, where it is not the initial one
                            random/<device>                 the states of torch's generators

A state is taken in one moment, into the host's memory, and written while steps go on. It is there when its `state.json`
is, which is written last; a digest of each file tells later whether it still is what was written, before anything of it
is read. Nothing in it is code: see `starling.policy.train.checkpoint.dcp`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import structlog
import torch
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint.dcp import SavedTensors, Shape, write_tensors
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

NUM_KEPT: Final = 2
"""States that stay: the newest, and the one before for when that is damaged."""
WEIGHTS, TRAINER, REFERENCE, RANDOM = "weights/", "trainer/", "reference/", "random/"

log = structlog.get_logger(__name__)


class HostBuffers:
    """Copies of tensors in the host's memory, in the same place each time, which a GPU can write to at full speed."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of `tensors`, in place of those that were taken before."""
        buffers = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            buffers[name].copy_(tensor.detach(), non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._buffers |= buffers
        return buffers

    def _room(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return buffer


@dataclass(frozen=True)
class StateSnapshot:
    """A state that is in memory and not yet written."""

    state: StateHeader
    """Without `parts` and `digests`."""
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class StateMetadata:
    """What a state says beside its tensors."""

    run: str
    version: int
    next_prompt: int = 0
    trainer: TrainerState | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def take_state(
    progress: StateMetadata, tensors: Mapping[str, Tensor], device: torch.device, room: HostBuffers
) -> StateSnapshot:
    """Take the state of this moment.

    Args:
        progress: how far it has come.
        tensors: by section and name, as they are in the files; all but the generators of random numbers.
        device: whose generator counts.
        room: where the copies go. They hold until it is used again.
    """
    state = StateHeader(
        run=progress.run,
        version=progress.version,
        next_prompt=progress.next_prompt,
        trainer=progress.trainer,
        metrics={name: value for name, value in progress.metrics.items() if np.isfinite(value)},
        python_random=random.getstate(),
        numpy_random=_numpy_random(),
        parts="",
        digests={},
    )
    return StateSnapshot(state, room.take({**tensors, **_random_states(device)}))


class StateStore:
    """The states of one run, each in a folder of `storage`."""

    def __init__(self, storage: Storage, *, max_keep: int = NUM_KEPT, best: str = "") -> None:
        """Keep the newest `max_keep`, and the one that is `best` by a metric (``-`` before it: least is best)."""
        self.storage, self._max_keep = storage, max_keep
        self._best, self._sign = best.lstrip("+-"), -1.0 if best.startswith("-") else 1.0

    def write(self, taken: StateSnapshot) -> str:
        """Write a state, then remove those that need not stay. Returns where it is, once it is durable.

        Raises:
            ConfigError: the storage refuses; the states before stay.
        """
        name = f"{PREFIX}{taken.state.version}"
        with self.storage.writing(name) as draft:
            with self.storage.explained("written", name):
                digests = write_tensors(self.storage.fs, draft.path, taken.tensors)
            draft.manifest = encode_header(msgspec.structs.replace(taken.state, parts=draft.parts, digests=digests))
        if self._best and self._best not in taken.state.metrics:
            log.warning(
                "this state cannot be the best: nobody told its metric",
                state=self.storage.url(name),
                metric=self._best,
                told=sorted(taken.state.metrics),
            )
        try:
            self._remove_old(taken.state.version)
        except ConfigError as error:
            log.warning("old states could not be removed", reason=str(error))
        return self.storage.url(name)

    def _remove_old(self, version: int) -> None:
        """Remove the states up to `version` but those that stay, and what crashes left of others."""
        names = [name for found, name in state_versions(self.storage) if found <= version]
        complete = [name for name in names if MANIFEST in self.storage.names(name)]
        stay = {*complete[: self._max_keep], *self._best_of(complete)}
        for name in names:
            if name not in stay:
                self.storage.remove(name)

    def _best_of(self, names: list[str]) -> list[str]:
        """Return the name of the state whose metric is best; of equal ones the newest."""
        values = {}
        for name in names if self._best else ():
            with suppress(DamagedStateError):
                metrics = read_header(self.storage, name).metrics
                if self._best in metrics:
                    values[name] = self._sign * metrics[self._best]
        return [max(values, key=lambda name: values[name])] if values else []


@dataclass(frozen=True)
class SavedState:
    """A state to continue from."""

    state: StateHeader
    _storage: Storage
    _parts: SavedTensors

    @classmethod
    def of(cls, found: VerifiedState) -> SavedState:
        """Return the state that was found, to be read."""
        storage = found.storage
        return cls(found.state, storage, SavedTensors(storage.fs, storage.path(found.state.parts)))

    def has(self, section: str, like: Callable[[str], bool] = bool) -> bool:
        """Say whether it holds anything of a section whose name there is `like` this."""
        return any(name.startswith(section) and like(name.removeprefix(section)) for name in self._shapes())

    def dtype(self, section: str) -> torch.dtype:
        """Return the element type of the first tensor of floating-point numbers in `section`."""
        kinds = (dtype for name, (dtype, _) in self._shapes().items() if name.startswith(section))
        return next((dtype for dtype in kinds if dtype.is_floating_point), torch.float32)

    def restore(self, section: str, live: Mapping[str, Tensor]) -> None:
        """Put the tensors of `section` into `live`, in place. Raises ConfigError when they are of another model."""
        shapes = self._shapes()
        saved = {name.removeprefix(section): shape for name, shape in shapes.items() if name.startswith(section)}
        difference = _difference(saved, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in live.items()})
        if difference is not None:
            raise ConfigError(
                f"the state {self._storage.url()} is of another model: {difference}; "
                "give the model of that run as model.path, or begin a run of its own"
            )
        with self._storage.explained("read"):
            self._parts.read_into(in_section(section, live))

    def read(self, section: str) -> dict[str, Tensor]:
        """Return the tensors of `section`, on the CPU."""
        with self._storage.explained("read"):
            return self._parts.read(section)

    def _shapes(self) -> Mapping[str, Shape]:
        with self._storage.explained("read"):
            return self._parts.shapes()

    def restore_random(self, device: torch.device) -> None:
        """Set the generators of random numbers."""
        random.setstate(self.state.python_random)
        name, keys, position, has_gauss, gauss = self.state.numpy_random
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        states = self.read(RANDOM)
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)


def seed_random(seed: int) -> None:
    """Set the generators of random numbers as they are at version 0; by themselves they begin anywhere."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def in_section(section: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` by the names that they have in a state."""
    return {f"{section}{name}": tensor for name, tensor in tensors.items()}


def _difference(saved: Mapping[str, Shape], live: Mapping[str, Shape]) -> str | None:
    """Say the first thing in which two sets of weights differ, but for their values."""
    for name in sorted(saved.keys() | live.keys()):
        if name not in live:
            return f"it has {name}, which this model has not"
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


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {f"{RANDOM}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(device)
    return states
