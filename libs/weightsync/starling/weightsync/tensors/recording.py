"""Recording of what a weight loader copies where, with tensors that have no storage.

A `StandIn` is a tensor of a checkpoint without its values. A loader slices, transposes, reshapes, concatenates and
stacks stand-ins as if they were tensors, and copies them into parameters; a `Recorder` is told of every operation, and
knows afterwards which boxes of which tensors fill which regions of which parameters. Memory is proportional to the
number of operations: torch itself computes the strides of every view, on its device `meta`.

A loader that computes with the values (arithmetic, masks, `item()`) cannot be recorded as copies. What it then copies
is *computed*: the recorder knows of which tensors, so that these can be loaded whole by the loader itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from starling.common.errors import WeightsError
from starling.weightsync.layouts.strided import BoxCopy, IrregularViewError, Strided, boxes_of, merged, row_major
from starling.weightsync.plan.boxes import first_overlap, intersection
from starling.weightsync.plan.layout import Box, TensorSpec

aten: Any = torch.ops.aten

_COPIES = (
    aten.clone.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    aten._reshape_copy.default,
    aten.view_copy.default,
    aten.copy.default,
)
"""Operations whose result has the values of their first argument in memory of its own; the shape may be another one."""
_SCALARS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.nonzero.default)
"""Operations that need values."""
_NEW = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_empty_strided.default,
)
"""Operations that make memory to copy into."""


_ZERO = (aten.zero_.default,)
"""Operations that set their argument to zero."""


class ComputedError(WeightsError):
    """A loader needs values of tensors that have none here.

    Attributes:
        tensors: names of these tensors.
    """

    def __init__(self, operation: str, tensors: frozenset[str]) -> None:
        super().__init__(f"The loader reads values of {', '.join(sorted(tensors)[:3])} ({operation}).")
        self.tensors = tensors


@dataclass(frozen=True)
class _Piece:
    """A box of a buffer, and the view of another buffer that was copied into it."""

    box: Box
    source: Buffer
    view: Strided


@dataclass(eq=False)
class Buffer:
    """Memory of a stand-in: a tensor of the checkpoint, or what was copied together from others."""

    shape: tuple[int, ...]
    """In the order in which it lies in memory."""
    dtype: torch.dtype
    name: str = ""
    """Of the tensor; empty for others."""
    pieces: list[_Piece] = field(default_factory=list)
    """In the order of the copies: later ones replace what earlier ones copied."""
    computed: frozenset[str] = frozenset()
    """The tensors of which its values were computed; empty where they are copies."""
    zeroed: list[Box] = field(default_factory=list)
    """Boxes that the loader has set to zero, as for a bias that only one rank adds."""

    def tensors(self) -> frozenset[str]:
        """Return the names of the tensors that have a part in it."""
        found, left, seen = set(self.computed), [self], {id(self)}
        while left:
            buffer = left.pop()
            found |= buffer.computed | ({buffer.name} - {""})
            for piece in buffer.pieces:
                if id(piece.source) not in seen:
                    seen.add(id(piece.source))
                    left.append(piece.source)
        return frozenset(found)


class StandIn(torch.Tensor):
    """A tensor without values: a view of a `Buffer`. It has a meaning only inside a `Recorder`."""

    buffer: Buffer
    meta: torch.Tensor
    """The same view, on the device `meta`."""

    @staticmethod
    def __new__(cls, buffer: Buffer, meta: torch.Tensor, device: torch.device) -> StandIn:
        """Make the stand-in of the view `meta` of `buffer`, which claims to be on `device`."""
        made: StandIn = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made.buffer, made.meta = buffer, meta
        return made

    def __init__(self, *_: object) -> None:
        """Take the arguments of `__new__`."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """Say what it is a view of."""
        return f"StandIn({self.buffer.name or 'copies'}, {tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse operations outside of a recorder."""
        raise WeightsError(f"{func} was called on a tensor without values, and nothing records it.")

    def tolist(self) -> Any:
        """Refuse to read values."""
        raise ComputedError("tolist", self.buffer.tensors())

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse to read values."""
        raise ComputedError("numpy", self.buffer.tensors())

    @property
    def view_of_buffer(self) -> Strided:
        """The view as offset and strides, in elements of the buffer."""
        return Strided(int(self.meta.storage_offset()), tuple(self.meta.stride()))


_NO_VIEW = Strided(0, ())

Region: TypeAlias = tuple[tuple[int, ...], Strided]
"""Sizes, and place in a parameter's memory, in elements after its first one."""


@dataclass(frozen=True)
class _Write:
    """A write to a region of a parameter: of a view of a buffer, or of something computed."""

    region: Region
    source: Buffer | None
    """None for constants."""
    view: Strided
    computed: bool = False


@dataclass(frozen=True)
class Recording:
    """What a loader does."""

    copies: Mapping[str, Mapping[str, tuple[BoxCopy, ...]]]
    """By parameter and tensor: the boxes of the tensor, and their places in the parameter's memory. Each element of a
    parameter is in at most one of them."""
    computed: Mapping[str, frozenset[str]]
    """By parameter: the tensors of which the loader computes it."""
    reasons: Mapping[str, str]
    """By parameter in `computed`: what the loader does."""
    zeros: frozenset[str] = frozenset()
    """Parameters that the loader sets to zero, in place of tensors."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what is copied into some parameters while it is entered.

    Args:
        parameters: the parameters by name, on any device. Nothing is written to them.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = dict(parameters)
        self._owners: dict[int, str] = {}
        for name, parameter in parameters.items():
            self._owners.setdefault(_storage(parameter), name)
        self._writes: dict[str, list[_Write]] = {}
        self._scratch: dict[int, tuple[torch.Tensor, set[str]]] = {}
        """By storage, tensors besides the parameters into which stand-ins were copied, and the tensors of these."""
        self._reasons: dict[str, str] = {}
        self._zeros: set[str] = set()

    def stand_in(self, spec: TensorSpec, device: str | torch.device = "cpu") -> StandIn:
        """Return the stand-in of a tensor of the checkpoint, which claims to be on `device`."""
        dtype: torch.dtype = getattr(torch, spec.dtype)
        buffer = Buffer(spec.shape, dtype, name=spec.name)
        with torch._C._DisableTorchDispatch():
            meta = torch.empty(spec.shape, dtype=dtype, device="meta")
        return StandIn(buffer, meta, torch.device(device))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operation."""
        kwargs = kwargs or {}
        flat = [*_flat(args), *_flat(kwargs.values())]
        stand_ins = [one for one in flat if isinstance(one, StandIn)]
        if not stand_ins:
            written = _written(func, args, kwargs)
            if not any(_storage(tensor) in self._owners for tensor in written):
                return func(*args, **kwargs)
            self._note_plain_write(func, written, flat)
            return written[0]  # nothing is written: the parameters may be those of a running engine
        if func is aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in (aten.cat.default, aten.stack.default):
            return self._joined(func, args, kwargs)
        if func in (aten.index_select.default, aten.index.Tensor):
            selected = self._selected(func, args)
            if selected is not None:
                return selected
        if func in _SCALARS:
            raise ComputedError(str(func), _names(stand_ins))
        if func is aten.view.dtype and args[0].buffer.name and args[0].dtype.itemsize == args[1].itemsize:
            whole = args[0].buffer
            return StandIn(Buffer(whole.shape, args[1], name=whole.name), args[0].meta.view(args[1]), args[0].device)
        return self._applied(func, args, kwargs, stand_ins)

    # --- operations ------------------------------------------------------------------------------------------------

    def _applied(self, func: Any, args: Any, kwargs: Any, stand_ins: Sequence[StandIn]) -> Any:
        """Return the result of a view, of a copy, or of a computation."""
        device = stand_ins[0].device
        kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
        metas = {_storage(one.meta): one.buffer for one in stand_ins}
        written = _written(func, args, kwargs)
        if func in _ZERO:
            zeroed: StandIn = args[0]
            view = zeroed.view_of_buffer
            zeroed.buffer.zeroed += [copy.box for copy in boxes_of(zeroed.buffer.shape, zeroed.shape, view, view)]
            return zeroed
        if func in (aten._to_copy.default, *_NEW):
            kwargs["device"] = torch.device("meta")
        computed = _names(stand_ins)
        result = func(*map(_as_meta, args), **{key: _as_meta(value) for key, value in kwargs.items()})

        def wrapped(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            source = metas.get(_storage(value))
            if source is not None:
                return StandIn(source, value, device)
            if func in _NEW:
                return self._fresh(value, device)
            if func in _COPIES:
                made = self._fresh(value, device)
                self._fill(made, stand_ins[0], stand_ins[0].shape)
                return made
            return StandIn(Buffer(tuple(value.shape), value.dtype, computed=computed), value, device)

        for tensor in written:  # in-place arithmetic
            if isinstance(tensor, StandIn):
                tensor.buffer.computed |= computed
                return tensor
            self._note_computed(tensor, computed, str(func))
            return tensor
        return [wrapped(one) for one in result] if isinstance(result, (list, tuple)) else wrapped(result)

    def _fresh(self, meta: torch.Tensor, device: torch.device) -> StandIn:
        """Return a stand-in of new memory, of shape and strides of `meta`."""
        shape = _memory_shape(meta)
        if shape is None:
            raise IrregularViewError(f"A loader makes memory of shape {tuple(meta.shape)} with gaps.")
        return StandIn(Buffer(shape, meta.dtype), meta, device)

    def _fill(self, target: StandIn, source: StandIn, sizes: Sequence[int]) -> None:
        """Note a copy of all of `source` into `target`, in the order of their elements."""
        if source.buffer.computed or source.buffer.zeroed:
            target.buffer.computed |= source.buffer.tensors()
            return
        if tuple(target.shape) != tuple(sizes):  # a copy that also reshapes
            target.buffer.computed |= source.buffer.tensors()
            return
        for copy in boxes_of(target.buffer.shape, target.shape, target.view_of_buffer, source.view_of_buffer):
            target.buffer.pieces.append(_Piece(copy.box, source.buffer, copy.place))

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Record `target.copy_(source)`."""
        if isinstance(target, StandIn):
            if not isinstance(source, StandIn):
                target.buffer.computed |= target.buffer.tensors()
                return target
            self._fill(target, self._expanded(source, target), target.shape)
            return target
        assert isinstance(source, StandIn)
        name = self._owners.get(_storage(target))
        if name is None:
            _, names = self._scratch.setdefault(_storage(target), (target, set()))
            names |= source.buffer.tensors()
            return target
        expanded, parameter = self._expanded(source, target), self._parameters[name]
        if target.dtype != parameter.dtype:
            self._note_computed(target, source.buffer.tensors(), f"a view as {target.dtype}")
            return target
        region = tuple(target.shape), _place(target, parameter)
        if source.buffer.zeroed:
            return self._copy_zeros(target, source, name, region)
        self._writes.setdefault(name, []).append(_Write(region, expanded.buffer, expanded.view_of_buffer))
        return target

    def _copy_zeros(self, target: torch.Tensor, source: StandIn, name: str, region: Region) -> torch.Tensor:
        """Record a copy into a region of parameter `name` from a buffer that has been set to zero, at least in part."""
        view = source.view_of_buffer
        boxes = [copy.box for copy in boxes_of(source.buffer.shape, source.shape, view, view)]
        if all(any(intersection(box, zero) == box for zero in source.buffer.zeroed) for box in boxes):
            self._writes.setdefault(name, []).append(_Write(region, None, _NO_VIEW))
            self._zeros.add(name)
        else:
            self._note_computed(target, source.buffer.tensors(), "a part that was set to zero")
        return target

    def _expanded(self, source: StandIn, target: torch.Tensor) -> StandIn:
        """Return `source` in the shape of `target`, as `copy_` broadcasts it."""
        if source.shape == target.shape:
            return source
        with torch._C._DisableTorchDispatch():
            meta = source.meta.expand(target.shape)
        return StandIn(source.buffer, meta, source.device)

    def _joined(self, func: Any, args: Any, kwargs: Any) -> StandIn:
        """Return a concatenation or a stack."""
        tensors: Sequence[torch.Tensor] = args[0]
        dim: int = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        stand_ins = [one for one in tensors if isinstance(one, StandIn)]
        meta = func([one.meta if isinstance(one, StandIn) else one.to("meta") for one in tensors], dim)
        made = self._fresh(meta, stand_ins[0].device)
        if len(stand_ins) < len(tensors):
            made.buffer.computed = _names(stand_ins)
            return made
        begin, dim = 0, dim % meta.ndim
        for one in stand_ins:
            if func is aten.stack.default:
                part = made.meta.select(dim, begin)
                begin += 1
            else:
                if one.meta.ndim != meta.ndim:  # an empty tensor of one dim
                    continue
                part = made.meta.narrow(dim, begin, one.shape[dim])
                begin += one.shape[dim]
            self._fill(StandIn(made.buffer, part, made.device), one, one.shape)
        return made

    def _selected(self, func: Any, args: Any) -> StandIn | None:
        """Return a selection by a list of indices along one dim; None if it is of another kind."""
        source = args[0]
        if func is aten.index_select.default:
            dim, index = args[1] % max(source.ndim, 1), args[2]
        else:
            given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
            if len(given) != 1:
                return None
            dim, index = given[0]
        if not isinstance(source, StandIn) or isinstance(index, StandIn) or index.is_meta:
            return None
        if index.dtype not in (torch.int64, torch.int32) or index.ndim != 1:
            return None
        shape = (*source.shape[:dim], len(index), *source.shape[dim + 1 :])
        made = self._fresh(torch.empty(shape, dtype=source.dtype, device="meta"), source.device)
        for begin, first, length in _runs(index.tolist()):
            part = StandIn(made.buffer, made.meta.narrow(dim, begin, length), made.device)
            self._fill(part, StandIn(source.buffer, source.meta.narrow(dim, first, length), made.device), part.shape)
        return made

    # --- writes of others ------------------------------------------------------------------------------------------

    def _note_plain_write(self, func: Any, written: Sequence[torch.Tensor], flat: Sequence[Any]) -> None:
        """Note that a region of a parameter was written without stand-ins: padding, or a computation in place."""
        for target in written:
            name = self._owners.get(_storage(target))
            if name is None:
                continue
            sources = {_storage(one) for one in flat if isinstance(one, torch.Tensor)}
            scratch = set().union(*(self._scratch[one][1] for one in sources & self._scratch.keys()))
            if scratch:
                self._note_computed(target, frozenset(scratch), f"{func} of what it collects")
                continue
            region = tuple(target.shape), _place(target, self._parameters[name])
            self._writes.setdefault(name, []).append(_Write(region, None, _NO_VIEW, computed=True))
            self._reasons.setdefault(name, str(func))

    def _note_computed(self, target: torch.Tensor, tensors: frozenset[str], reason: str) -> None:
        name = self._owners.get(_storage(target))
        if name is None:
            _, names = self._scratch.setdefault(_storage(target), (target, set()))
            names |= tensors
            return
        region = tuple(target.shape), _place(target, self._parameters[name])
        buffer = Buffer((), target.dtype, computed=tensors)
        self._writes.setdefault(name, []).append(_Write(region, buffer, _NO_VIEW, computed=True))
        self._reasons[name] = reason

    # --- the result ------------------------------------------------------------------------------------------------

    def recording(self) -> Recording:
        """Return what was recorded."""
        copies: dict[str, dict[str, tuple[BoxCopy, ...]]] = {}
        computed: dict[str, frozenset[str]] = {}
        reasons: dict[str, str] = {}
        for name, writes in self._writes.items():
            if not any(write.source for write in writes):
                continue  # constants only
            try:
                copies[name] = self._copies(name, writes)
            except _NotCopiedError as error:
                computed[name] = frozenset().union(*(write.source.tensors() for write in writes if write.source))
                reasons[name] = str(error)
        return Recording(copies, computed, reasons, frozenset(self._zeros - copies.keys() - computed.keys()))

    def _copies(self, name: str, writes: Sequence[_Write]) -> dict[str, tuple[BoxCopy, ...]]:
        """Return the copies into one parameter.

        Raises:
            _NotCopiedError: it has other values than copies.
        """
        parameter = self._parameters[name]
        copied: dict[Region, _Write] = {}
        boxes: dict[Region, list[Box]] = {}
        for write in writes:
            boxes[write.region] = _boxes_of_memory(parameter, write.region)
            if write.source is not None and not write.computed:
                copied[write.region] = write  # a second copy into the same region replaces the first
            elif any(intersection(a, b) for at in copied for a in boxes[at] for b in boxes[write.region]):
                raise _NotCopiedError(f"computes in place ({self._reasons.get(name, '')})")
            elif write.source is not None:
                raise _NotCopiedError(f"computes ({self._reasons.get(name, '')})")
        filled = [box for region in copied for box in boxes[region]]
        # None of them, if this worker's part of the parameter is padding.
        begin = np.array([box.offset for box in filled], np.int64).reshape(len(filled), parameter.ndim)
        size = np.array([box.size for box in filled], np.int64).reshape(begin.shape)
        if first_overlap(begin, begin + size) is not None:
            raise _NotCopiedError("copies several tensors into the same elements")
        found: dict[str, list[BoxCopy]] = {}
        for (sizes, place), write in copied.items():
            assert write.source is not None
            for tensor, copy in _resolved(write.source, sizes, write.view, place, parameter.dtype):
                found.setdefault(tensor, []).append(copy)
        return {tensor: tuple(merged(of_tensor)) for tensor, of_tensor in found.items()}


def _boxes_of_memory(parameter: torch.Tensor, region: Region) -> list[Box]:
    """Return a region of a parameter as boxes, with the dims in the order in which they lie in memory."""
    sizes, place = region
    shape = _memory_shape(parameter)
    if shape is None:
        raise _NotCopiedError("has gaps in its memory")
    try:
        return [copy.box for copy in boxes_of(shape, sizes, place, place)]
    except IrregularViewError as error:
        raise _NotCopiedError(f"permutes single elements ({error})") from error


def _memory_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the lengths of a tensor's dims in the order of their strides; None if there are gaps in its memory."""
    strides = tensor.stride()
    dims = sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim))
    shape = tuple(tensor.shape[dim] for dim in dims)
    as_dense = zip(dims, row_major(shape), strict=True)
    dense = all(strides[dim] == stride or tensor.shape[dim] == 1 for dim, stride in as_dense)
    return shape if dense or not tensor.numel() else None


class _NotCopiedError(Exception):
    """What a loader puts into a parameter is not a copy; the text says what it is."""


def _resolved(
    buffer: Buffer, sizes: Sequence[int], view: Strided, place: Strided, dtype: torch.dtype
) -> Iterator[tuple[str, BoxCopy]]:
    """Yield the boxes of tensors that a view of `buffer` consists of, and their places.

    `dtype` is the element type of what they are copied into.
    """
    if buffer.computed:
        raise _NotCopiedError("computes")
    if buffer.name and buffer.dtype != dtype:
        raise _NotCopiedError(f"converts {buffer.dtype} to {dtype}")
    if torch.promote_types(buffer.dtype, dtype) != buffer.dtype:
        raise _NotCopiedError(f"rounds to {buffer.dtype}")
    try:
        copies = boxes_of(buffer.shape, sizes, view, place)
    except IrregularViewError as error:
        raise _NotCopiedError(f"permutes single elements ({error})") from error
    if buffer.name:
        yield from ((buffer.name, copy) for copy in copies)
        return
    for copy in copies:
        num_found = 0
        for piece in buffer.pieces:
            shared = intersection(piece.box, copy.box)
            if shared is None:
                continue
            num_found += shared.volume
            inner = _moved(piece.view, piece.box, shared)
            outer = _moved(copy.place, copy.box, shared)
            yield from _resolved(piece.source, shared.size, inner, outer, dtype)
        if num_found != copy.box.volume:
            raise _NotCopiedError("copies what it has not, or more than once, filled")


def _moved(place: Strided, box: Box, part: Box) -> Strided:
    """Return where `part` of a box is that begins at `place`."""
    steps = zip(part.offset, box.offset, place.strides, strict=True)
    return Strided(place.offset + sum((new - old) * stride for new, old, stride in steps), place.strides)


def _place(view: torch.Tensor, parameter: torch.Tensor) -> Strided:
    return Strided(int(view.storage_offset()) - int(parameter.storage_offset()), tuple(view.stride()))


def _storage(tensor: torch.Tensor) -> int:
    """Return an identity of the memory of a tensor, which those on `meta` have, too."""
    return int(tensor.untyped_storage()._cdata)


def _flat(values: Iterable[Any]) -> list[Any]:
    """Return the arguments of an operation, those in lists on their own."""
    flat: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += value
        else:
            flat.append(value)
    return flat


def _as_meta(value: Any) -> Any:
    if isinstance(value, StandIn):
        return value.meta
    if isinstance(value, (list, tuple)):
        return [_as_meta(one) for one in value]
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _names(stand_ins: Iterable[StandIn]) -> frozenset[str]:
    return frozenset().union(*(one.buffer.tensors() for one in stand_ins))


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to."""
    found = []
    for index, name in _written_arguments(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        if isinstance(value, torch.Tensor):
            found.append(value)
    return found


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(index, one.name) for index, one in arguments if one.alias_info is not None and one.alias_info.is_write]


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of consecutive numbers: their positions, first numbers and lengths."""
    begin = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield begin, indices[begin], at - begin
            begin = at
