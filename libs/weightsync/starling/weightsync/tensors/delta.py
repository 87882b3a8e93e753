"""Delta codec with torch, on the device of the tensors: the same bytes as with numpy.

There is no loop over elements or blocks: a piece is processed in chunks of `CHUNK` elements, which bounds temporary
memory, and each step is one kernel over a chunk. Only counts per block are copied to the host, which chooses the form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from starling.common.errors import WeightsError
from starling.weightsync.delta.changes import RUN_CELL, head_of
from starling.weightsync.delta.codec import check_base, max_delta_bytes
from starling.weightsync.delta.format import (
    BLOCK,
    CELL,
    CELLS,
    HEADER,
    Data,
    DeltaHeader,
    DeltaMetrics,
    DeltaSection,
    Directory,
    Form,
    Kind,
    bytes_of,
    choose_kinds,
    digest_bytes,
    num_blocks,
    pack_header,
)
from starling.weightsync.delta.parse import ParsedDelta, Same, parse

CHUNK: Final = 1024 * BLOCK
"""Elements that are compared or changed at once: each takes a byte of temporary memory, a changed one about 24 more."""
_ITEM_TYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class EncodedTensor:
    """One encoded piece, as bytes on the device of its tensor."""

    data: torch.Tensor
    metrics: DeltaMetrics

    @property
    def form(self) -> Form:
        """Form of `data`."""
        return self.metrics.form


def encode_tensor(
    new: torch.Tensor,
    base: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    max_share: float = 1.0,
    base_digest: str | None = None,
    digest: str | None = None,
) -> EncodedTensor:
    """Encode a tensor against its previous version in the smallest form, as `codec.encode` does for bytes.

    Args:
        new: any shape and element type, contiguous.
        base: of the same shape, element type and device.
        out: uint8, contiguous, on the same device, overlapping neither; else new memory.
        max_share: a delta may take at most this share of the bytes of the tensor, else the form is `dense`.
        base_digest: of the base, as 32 hex digits.
        digest: of the tensor.

    Raises:
        WeightsError: the two differ in shape, element type or device, are not contiguous, or `out` is too small.
    """
    if new.shape != base.shape or new.dtype != base.dtype or new.device != base.device:
        raise WeightsError(
            f"A {new.dtype} tensor of shape {tuple(new.shape)} on {new.device} has no delta to one of {base.dtype}, "
            f"shape {tuple(base.shape)}, on {base.device}: they must be alike."
        )
    items, old = _items_of(new, "the new tensor"), _items_of(base, "the base")
    item_bytes, dense_bytes = items.element_size(), items.numel() * items.element_size()
    max_bytes = max_delta_bytes(dense_bytes, max_share)
    directory = _directory(items, old)
    num_changed = directory.num_changed
    form: Form = "same"
    if num_changed:
        fits = directory.sections.size_bytes <= HEADER.size + max_bytes
        form = "delta" if fits else "dense"
    size = {"same": HEADER.size, "delta": directory.sections.size_bytes, "dense": HEADER.size + dense_bytes}[form]
    data = _output(out, size, items, old)
    header = DeltaHeader(
        form,
        items.numel(),
        item_bytes,
        num_changed if form == "delta" else 0,
        digest_bytes(base_digest),
        digest_bytes(digest),
    )
    if form == "delta":
        _write(data, items, old, directory, header)
    else:
        data[: HEADER.size] = torch.frombuffer(bytearray(pack_header(header)), dtype=torch.uint8)
        data[HEADER.size :] = items.view(torch.uint8)[: size - HEADER.size]
    return EncodedTensor(data, DeltaMetrics(form, items.numel(), item_bytes, items.numel(), num_changed, size))


def apply_tensor(data: torch.Tensor | Data, base: torch.Tensor, *, base_digest: str | None = None) -> None:
    """Turn the base into the new tensor, in place, as `codec.apply` does. The bytes are checked on the host first.

    Args:
        data: an encoded piece, on any device.
        base: contiguous, in the base version of the delta.
        base_digest: digest of the base, if known.

    Raises:
        WeightsError: `data` is malformed, or not for this base.
    """
    host = bytes_of(data.cpu().numpy() if isinstance(data, torch.Tensor) else data, "an encoded piece")
    parsed = parse(host)
    items = _items_of(base, "the base")
    if items.element_size() != parsed.header.item_bytes:
        raise WeightsError(
            f"The encoded piece has elements of {parsed.header.item_bytes} bytes, the base is {base.dtype}: "
            "ask for a delta of this tensor."
        )
    check_base(parsed.header, items.numel(), digest_bytes(base_digest))
    if isinstance(parsed, Same):
        return
    # Copied if the bytes are on the host, or so that the sections are aligned for views.
    source = data if isinstance(data, torch.Tensor) else torch.from_numpy(host.copy())
    source = source.reshape(-1).to(items.device)
    if source.data_ptr() % 8:
        source = source.clone()
    if not isinstance(parsed, ParsedDelta):
        items.view(torch.uint8).copy_(source[HEADER.size :])
        return
    for start, positions, values in _changes(source, parsed.directory):
        items[start:].index_copy_(0, positions, values)


def _directory(items: torch.Tensor, old: torch.Tensor) -> Directory:
    """Count what changed and choose the kind of each block."""
    num_elements = items.numel()
    counts = np.zeros((2, num_blocks(num_elements)), np.int64)
    runs = np.zeros(num_blocks(num_elements), np.int64)
    for start in range(0, num_elements, CHUNK):
        blocks = slice(start // BLOCK, (start + CHUNK) // BLOCK)
        mask = _mask(items, old, start).view(-1, BLOCK)
        by_cell = mask.view(-1, CELLS, CELL).sum(2, dtype=torch.int32)
        counts[:, blocks] = torch.stack((by_cell.sum(1), by_cell.amax(1))).cpu().numpy()
        if (counts[1, blocks] >= RUN_CELL).any():
            # A run starts where an element changed and the one before it, in its block, did not.
            starts_run = mask[:, 1:] > mask[:, :-1]
            runs[blocks] = (mask[:, 0] + starts_run.sum(1)).cpu().numpy()
    changed, largest = counts
    runs = np.where(largest >= RUN_CELL, runs, changed)
    kinds = choose_kinds(num_elements, changed, largest, runs)
    run_counts = np.where(kinds == Kind.RUNS, runs, 0)
    return Directory(num_elements, items.element_size(), kinds, changed, run_counts)


def _mask(items: torch.Tensor, old: torch.Tensor, start: int) -> torch.Tensor:
    """Return whether each element of a chunk changed, padded with False to whole blocks."""
    part = items[start : start + CHUNK]
    mask = torch.zeros(num_blocks(part.numel()) * BLOCK, dtype=torch.bool, device=items.device)
    torch.ne(part, old[start : start + CHUNK], out=mask[: part.numel()])
    return mask


def _write(
    data: torch.Tensor, items: torch.Tensor, old: torch.Tensor, directory: Directory, header: DeltaHeader
) -> None:
    found = directory.sections
    data.zero_()
    head = torch.from_numpy(head_of(directory, header))
    data[: head.numel()] = head.to(data.device)

    def put(section: DeltaSection, first: int, values: torch.Tensor) -> None:
        raw = values.contiguous().view(-1).view(torch.uint8)
        begin = section.offset + first * values.element_size()
        end = min(begin + raw.numel(), section.offset + section.size)
        # A short last block has no more cells and bitmap bytes than it needs.
        data[begin:end] = raw[: end - begin]

    for start in range(0, items.numel(), CHUNK):
        first_block, blocks = start // BLOCK, slice(start // BLOCK, (start + CHUNK) // BLOCK)
        mask = _mask(items, old, start)
        changed = mask.nonzero().view(-1)
        put(found.values, int(directory.first_value[first_block]), items[start:].index_select(0, changed))
        kinds = torch.from_numpy(directory.kinds[blocks]).to(data.device)
        kind_of_each = kinds[changed // BLOCK]
        for kind in sorted(set(directory.kinds[blocks].tolist()) - {int(Kind.SAME)}):
            positions = changed[kind_of_each == kind]
            first = int(directory.first[kind, first_block])
            chosen = (kinds == kind).nonzero().view(-1)
            if kind == Kind.WIDE:
                put(found.wide, first, (positions % BLOCK).to(torch.uint16))
            elif kind == Kind.NARROW:
                put(found.narrow, first, (positions % CELL).to(torch.uint8))
                by_cell = mask.view(-1, CELLS, CELL)[chosen].sum(2)
                put(found.cells, int(directory.first_cell[first_block]), by_cell.to(torch.uint8))
            elif kind == Kind.RUNS:
                put(found.runs, 2 * int(directory.first_run[first_block]), _runs(positions))
            else:
                bits = mask.view(-1, BLOCK // 8, 8)[chosen] * _bit_weights(data.device)
                put(found.bitmaps, int(directory.first_bitmap_byte[first_block]), bits.sum(2).to(torch.uint8))


def _runs(positions: torch.Tensor) -> torch.Tensor:
    """Return start and length - 1 of each run of positions, shape (runs, 2); no run continues into the next block."""
    starts_run = positions % BLOCK == 0
    starts_run[0] = True
    starts_run[1:] |= positions[1:] - positions[:-1] != 1
    starts = starts_run.nonzero().view(-1)
    ends = torch.cat((starts[1:], starts.new_tensor([positions.numel()])))
    return torch.stack((positions[starts] % BLOCK, ends - starts - 1), dim=1).to(torch.uint16)


def _changes(source: torch.Tensor, directory: Directory) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield, for each chunk and kind, its first element, the positions in it that changed, and their values."""
    found = directory.sections

    def part(section: DeltaSection, first: int, last: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        begin = section.offset + first * dtype.itemsize
        return source[begin : section.offset + last * dtype.itemsize].view(dtype)

    for start in range(0, directory.num_elements, CHUNK):
        begin, end = start // BLOCK, min((start + CHUNK) // BLOCK, len(directory.kinds))
        kinds = torch.from_numpy(directory.kinds[begin:end]).to(source.device)
        counts = torch.from_numpy(directory.counts[begin:end]).to(source.device)
        first, last = directory.first_value[[begin, end]].tolist()
        values = part(found.values, first, last, _ITEM_TYPES[directory.item_bytes])
        kind_of_each = torch.repeat_interleave(kinds, counts, output_size=last - first)
        for kind in sorted(set(directory.kinds[begin:end].tolist()) - {int(Kind.SAME)}):
            chosen = (kinds == kind).nonzero().view(-1)
            origins, of_each = chosen * BLOCK, counts[chosen]
            first, last = directory.first[kind, [begin, end]].tolist()
            size = last - first
            if kind == Kind.WIDE:
                places = part(found.wide, first, last, torch.uint16).to(torch.int64)
                positions = torch.repeat_interleave(origins, of_each, output_size=size) + places
            elif kind == Kind.NARROW:
                cells = part(found.cells, *directory.first_cell[[begin, end]].tolist()).to(torch.int64)
                starts = (origins[:, None] + torch.arange(0, BLOCK, CELL, device=source.device)).view(-1)
                positions = torch.repeat_interleave(starts[: cells.numel()], cells, output_size=size)
                positions += part(found.narrow, first, last).to(torch.int64)
            elif kind == Kind.RUNS:
                first_run, last_run = directory.first_run[[begin, end]].tolist()
                runs = part(found.runs, 2 * first_run, 2 * last_run, torch.uint16).to(torch.int64).view(-1, 2)
                run_counts = torch.from_numpy(directory.run_counts[begin:end]).to(source.device)[chosen]
                lengths = runs[:, 1] + 1
                shifts = torch.repeat_interleave(origins, run_counts) + runs[:, 0] - (lengths.cumsum(0) - lengths)
                positions = torch.repeat_interleave(shifts, lengths, output_size=size)
                positions += torch.arange(size, device=source.device)
            else:
                bitmaps = part(found.bitmaps, *directory.first_bitmap_byte[[begin, end]].tolist())
                positions = (bitmaps[:, None] & _bit_weights(source.device)).view(-1).nonzero().view(-1)
                gaps = origins - torch.arange(0, len(origins) * BLOCK, BLOCK, device=source.device)
                positions += torch.repeat_interleave(gaps, of_each, output_size=size)
            yield start, positions, values[kind_of_each == kind]


def _bit_weights(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _items_of(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the elements of a tensor as integers, flat."""
    item_type = _ITEM_TYPES.get(tensor.element_size())
    if item_type is None or not tensor.is_contiguous():
        raise WeightsError(
            f"{what.capitalize()} is {tensor.dtype} with strides {tensor.stride()}: a delta is of contiguous tensors "
            "with elements of 1, 2, 4 or 8 bytes."
        )
    return tensor.detach().view(-1).view(item_type)


def _output(out: torch.Tensor | None, size: int, items: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    if out is None:
        return torch.empty(size, dtype=torch.uint8, device=items.device)
    if out.dtype != torch.uint8 or not out.is_contiguous() or out.numel() < size or out.device != items.device:
        raise WeightsError(
            f"The encoded piece takes {size} contiguous bytes on {items.device}: a {out.dtype} tensor of "
            f"{out.numel()} elements on {out.device} was given."
        )
    for source in (items, old):
        begin, end = source.data_ptr(), source.data_ptr() + source.numel() * source.element_size()
        if out.data_ptr() < end and begin < out.data_ptr() + size:
            raise WeightsError("The output overlaps the input: give other memory.")
    return out.view(-1)[:size]
