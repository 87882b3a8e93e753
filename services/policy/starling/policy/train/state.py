"""The saved state of a policy: all that is needed to make the next step exactly as if nothing had happened.

    <dir>/states/version-<n>/
        state.json               what follows from which step, the generators of random numbers, digests of the files
        weights.safetensors      the version itself, by Hugging Face name
        optimizer.safetensors    the optimizer's averages and counters, as <parameter>:<field>; with a trainer
        reference.safetensors    the model of the KL term, where it is not the initial one
        random.safetensors       the states of torch's generators

Nothing in it is pickled. A folder gets its name when everything in it is on disk, and a digest of each file tells later
whether it still is what was written.
"""

from __future__ import annotations

import mmap
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np
import structlog
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from starling.common.errors import ConfigError
from starling.policy.train.checkpoint import whole_folder
from starling.policy.train.model import tensors
from starling.weightsync.offer import digest_of

NUM_KEPT: Final = 2
"""States that stay: the newest, and the one before for when that is damaged."""
_PREFIX: Final = "version-"
_HEADER: Final = "state.json"
_WEIGHTS, _OPTIMIZER, _REFERENCE, _RANDOM = (
    f"{name}.safetensors" for name in ("weights", "optimizer", "reference", "random")
)

log = structlog.get_logger(__name__)


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """How far the trainer in force has come."""

    kind: Literal["sft", "grpo"]
    num_steps: int
    """Steps that it has made: where the schedule of its learning rate is."""
    total_steps: int
    begun_at: int = -1
    """The version whose weights are the reference of a KL term; -1 for none."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What `state.json` tells."""

    version: int
    trainer: TrainerState | None
    """None before the first step."""
    python_random: tuple[int, tuple[int, ...], float | None]
    numpy_random: tuple[str, tuple[int, ...], int, int, float]
    digests: dict[str, str]
    """Of the other files, by name."""
    form: Literal[1] = 1
    """How all this is written."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    state: msgspec.Raw


class _DamagedError(Exception):
    """A state that is not what was written."""


@dataclass(frozen=True)
class Trained:
    """A trainer as a state sees it."""

    progress: TrainerState
    optimizer: torch.optim.Optimizer
    reference: torch.nn.Module | None
    """Only where it is not the initial model, which can be loaded again."""


@dataclass(frozen=True)
class SavedState:
    """A state on disk whose files are as they were written."""

    path: Path
    state: State

    def restore_weights(self, model: torch.nn.Module) -> None:
        """Put the weights into `model`, in place. Raises ConfigError when they are of another model."""
        _restore(self.path / _WEIGHTS, model)

    @property
    def has_reference(self) -> bool:
        """Whether the model of the KL term is kept here."""
        return _REFERENCE in self.state.digests

    def restore_reference(self, model: torch.nn.Module) -> None:
        """Put the model of the KL term into `model`, in place."""
        _restore(self.path / _REFERENCE, model)

    def restore_optimizer(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """Put the averages into `optimizer`, which trains `model` and has made no step."""
        fields: dict[str, dict[str, Tensor]] = {}
        for key, tensor in load_file(self.path / _OPTIMIZER).items():
            name, _, field = key.rpartition(":")
            fields.setdefault(name, {})[field] = tensor
        known = {number: fields[name] for number, name in _numbered(optimizer, model) if name in fields}
        optimizer.load_state_dict({"state": known, "param_groups": optimizer.state_dict()["param_groups"]})

    def restore_random(self, device: torch.device) -> None:
        """Set the generators of random numbers."""
        random.setstate(self.state.python_random)
        name, keys, position, has_gauss, gauss = self.state.numpy_random
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
        states = load_file(self.path / _RANDOM)
        torch.set_rng_state(states["cpu"])
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], device)


def save_state(folder: Path, version: int, model: torch.nn.Module, trained: Trained | None) -> Path:
    """Write the state at `version` below `folder`, then remove all but the newest two. Returns where it is.

    Raises:
        ConfigError: the file system refuses.
    """
    path = folder / f"{_PREFIX}{version}"
    device = next(model.parameters()).device
    with whole_folder(path) as temporary:
        save_file(_contiguous(tensors(model)), temporary / _WEIGHTS)
        save_file(_random_states(device), temporary / _RANDOM)
        if trained is not None:
            save_file(_contiguous(_averages(trained.optimizer, model)), temporary / _OPTIMIZER)
            if trained.reference is not None:
                save_file(_contiguous(tensors(trained.reference)), temporary / _REFERENCE)
        state = State(
            version=version,
            trainer=None if trained is None else trained.progress,
            python_random=random.getstate(),
            numpy_random=_numpy_random(),
            digests={file.name: _digest(file) for file in sorted(temporary.iterdir())},
        )
        encoded = msgspec.json.encode(state)
        sealed = _Sealed(digest=digest_of(encoded), state=msgspec.Raw(encoded))
        (temporary / _HEADER).write_bytes(msgspec.json.encode(sealed))
    _remove_old(folder, version)
    return path


def seed_random(seed: int) -> None:
    """Set the generators of random numbers as they are at version 0; by themselves they begin anywhere."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def newest_state(folder: Path) -> SavedState | None:
    """Return the newest state below `folder` that is as it was written, None when there is none.

    One that is not is told of, and left where it is.
    """
    for version, path in sorted(_states(folder), reverse=True):
        try:
            state = _read(path)
            if state.version != version:
                raise _DamagedError(f"it is of version {state.version}")
        except _DamagedError as error:
            log.warning("this saved state is damaged and not used", state=str(path), reason=str(error))
        else:
            return SavedState(path, state)
    return None


def _read(path: Path) -> State:
    try:
        sealed = msgspec.json.decode((path / _HEADER).read_bytes(), type=_Sealed)
        if digest_of(bytes(sealed.state)) != sealed.digest:
            raise _DamagedError(f"{_HEADER} is not what was written")
        state = msgspec.json.decode(sealed.state, type=State)
        for name, digest in state.digests.items():
            if _digest(path / name) != digest:
                raise _DamagedError(f"{name} is not what was written")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise _DamagedError(str(error)) from error
    return state


def _digest(file: Path) -> str:
    """Return the digest of a file that is not empty, without holding it in memory."""
    with (
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as view,
    ):
        return digest_of(view)


def _restore(file: Path, model: torch.nn.Module) -> None:
    saved, live = load_file(file), tensors(model)
    difference = _difference(saved, live)
    if difference is not None:
        raise ConfigError(
            f"the state {file.parent} is of another model: {difference}; "
            "give the model of that run as model.path, or another folder as --dir"
        )
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(saved[name])


def _difference(saved: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> str | None:
    """Say the first thing in which two sets of weights differ, but for their values."""
    for name in sorted(saved.keys() | live.keys()):
        if name not in live:
            return f"it has {name}, which this model has not"
        if name not in saved:
            return f"it has no {name}, which this model has"
        there, here = _kind(saved[name]), _kind(live[name])
        if there != here:
            return f"its {name} is {there}, and this model's is {here}"
    return None


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _averages(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{name}:{field}": tensor
        for number, name in _numbered(optimizer, model)
        for field, tensor in state.get(number, {}).items()
    }


def _numbered(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Iterator[tuple[int, str]]:
    """Yield each parameter's number in `optimizer`, and its name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        yield number, names[parameter]


def _numpy_random() -> tuple[str, tuple[int, ...], int, int, float]:
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    name, keys, position, has_gauss, gauss = state
    return name, tuple(keys.tolist()), position, has_gauss, gauss


def _random_states(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _contiguous(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in named.items()}


def _states(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the states below `folder`, whole or not, with their versions."""
    for path in folder.glob(f"{_PREFIX}*"):
        number = path.name.removeprefix(_PREFIX)
        if number.isascii() and number.isdigit():
            yield int(number), path


def _remove_old(folder: Path, version: int) -> None:
    """Remove the states before the one of `version` but the newest of them, and what crashes left of others."""
    older = sorted((found, path) for found, path in _states(folder) if found < version)
    for path in (*(path for _, path in older[: 1 - NUM_KEPT]), *folder.glob(f".{_PREFIX}*.saving-*")):
        shutil.rmtree(path, ignore_errors=True)
