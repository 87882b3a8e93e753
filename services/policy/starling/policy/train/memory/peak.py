"""Peak memory of a computation, counted exactly on any device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are created while it is entered, after each operation.

    Unlike the figures of an allocator it is the same in every run, and knows nothing of caches or fragments, nor of
    what an operation needs while it runs. It sees the backward pass of a CPU only, where that runs in the same thread.
    """

    def __init__(self, outside: Iterable[Tensor] = ()) -> None:
        """Start empty. Tensors of `outside` and all others that exist already do not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        """Most that was held at a time."""
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most_bytes = 0
        """Bytes of `_held`, of which some may be dead: at least what is held."""
        self._outside = {tensor.untyped_storage()._cdata: _weak(tensor) for tensor in outside}

    @property
    def held_bytes(self) -> int:
        """Bytes of the live tensors."""
        # A reference that is kept keeps the address from being given to another storage.
        self._held = {
            key: entry
            for key, entry in self._held.items()
            if not entry[0].expired()  # type: ignore[no-untyped-call]
        }
        self._most_bytes = sum(size for _, size in self._held.values())
        return self._most_bytes

    def restart(self) -> None:
        """Measure the peak from now on."""
        self.peak_bytes = self.held_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and count."""
        for tensor in _tensors((args, kwargs)):
            key = tensor.untyped_storage()._cdata
            if key not in self._held and key not in self._outside:
                self._outside[key] = _weak(tensor)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._outside and storage._cdata not in self._held:
                self._held[storage._cdata] = _weak(tensor), storage.nbytes()
                self._most_bytes += storage.nbytes()
        if self._most_bytes > self.peak_bytes:  # Below it there is no need to count the dead ones.
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return result


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
