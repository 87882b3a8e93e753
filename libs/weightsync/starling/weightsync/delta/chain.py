"""Chains of deltas: several versions composed into one delta, or applied in one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np

from starling.common.errors import WeightsError
from starling.weightsync.delta.changes import (
    WINDOW,
    ChangedElements,
    DeltaWriter,
    cells_of,
    changes,
    make_mask,
    window_starts,
)
from starling.weightsync.delta.codec import Encoded, apply_parsed, check_base, output
from starling.weightsync.delta.format import (
    HEADER,
    ITEM_TYPES,
    Data,
    DeltaHeader,
    DeltaMetrics,
    bytes_of,
    digest_bytes,
    items_of,
    pack_header,
)
from starling.weightsync.delta.parse import Dense, Parsed, ParsedDelta, Same, parse


def compose(first: Data, second: Data, *, out: Data | None = None) -> Encoded:
    """Compose two encoded pieces that follow each other; if both changed an element, the later value stays.

    Two deltas give a delta, even one larger than the piece, because the piece itself is not available: the bound is
    `max_encoded_bytes`. An element that returned to its first value still counts as changed. A dense piece on either
    side gives a dense one.

    Args:
        first: an encoded piece.
        second: encoded against the result of the first.
        out: output that overlaps neither; else new memory.

    Raises:
        WeightsError: one of them is malformed, they do not follow each other, or `out` is too small or overlaps.
    """
    earlier, later = parse(first), parse(second)
    _check_successor(earlier.header, later.header)
    header = earlier.header._replace(digest=later.header.digest)
    # An unchanged piece has one digest before and after, whichever of the two is known.
    if isinstance(earlier, Same) and header.base_digest is None:
        header = header._replace(base_digest=earlier.header.digest or later.header.base_digest)
    if isinstance(later, Same) and header.digest is None:
        header = header._replace(digest=later.header.base_digest or earlier.header.digest)
    if isinstance(earlier, ParsedDelta) and isinstance(later, ParsedDelta):
        return _merge(earlier, later, header, out, (first, second))
    if isinstance(later, Dense):
        return _whole(later, None, header, out, (first, second))
    if isinstance(earlier, Dense):
        return _whole(earlier, later, header, out, (first, second))
    # One of the two changed nothing: the other is the result, with the digests of both.
    changed = earlier if isinstance(later, Same) else later
    source = bytes_of(first if changed is earlier else second, "an encoded piece")
    header = header._replace(form=changed.header.form, num_changed=changed.header.num_changed)
    memory = output(out, len(source), source)
    memory[HEADER.size :] = source[HEADER.size :]
    memory[: HEADER.size] = np.frombuffer(pack_header(header), np.uint8)
    return Encoded(memory, _metrics(header, len(memory)))


def apply_chain(pieces: Sequence[Data], base: Data, *, base_digest: str | None = None) -> None:
    """Apply encoded pieces that follow each other, in place. Nothing is written unless all of them are valid.

    Pieces before the last dense one are checked and skipped.

    Raises:
        WeightsError: one of them is malformed, does not follow the one before, or is not for this base.
    """
    parsed = [parse(piece) for piece in pieces]
    if not parsed:
        return
    # The first must be for this base even if a later dense one makes it superfluous.
    header = parsed[0].header
    check_base(header, len(items_of(base, header.item_bytes, "the base")), digest_bytes(base_digest))
    for earlier, later in pairwise(parsed):
        _check_successor(earlier.header, later.header)
    last_dense = max((index for index, piece in enumerate(parsed) if isinstance(piece, Dense)), default=0)
    for piece in parsed[last_dense:]:
        apply_parsed(piece, base)


def _check_successor(earlier: DeltaHeader, later: DeltaHeader) -> None:
    if earlier.item_bytes != later.item_bytes:
        raise WeightsError(
            f"Elements of {earlier.item_bytes} bytes are followed by elements of {later.item_bytes}: "
            "deltas of one piece keep its element type."
        )
    check_base(later, earlier.num_elements, earlier.digest)


def _whole(
    dense: Dense, later: Parsed | None, header: DeltaHeader, out: Data | None, sources: Sequence[Data]
) -> Encoded:
    """Return a dense piece with the later changes applied."""
    header = header._replace(form="dense", num_changed=0)
    memory = output(out, HEADER.size + len(dense.payload), *sources)
    memory[: HEADER.size] = np.frombuffer(pack_header(header), np.uint8)
    memory[HEADER.size :] = dense.payload
    if later is not None:
        apply_parsed(later, memory[HEADER.size :])
    return Encoded(memory, _metrics(header, len(memory)))


def _merge(
    earlier: ParsedDelta, later: ParsedDelta, header: DeltaHeader, out: Data | None, sources: Sequence[Data]
) -> Encoded:
    """Return the changes of both deltas, with the later values."""
    num_elements = header.num_elements
    found = ChangedElements(num_elements, header.item_bytes)
    mask = make_mask(num_elements)
    items = np.empty(len(mask), ITEM_TYPES[header.item_bytes])
    for start in window_starts(num_elements):
        mask[:] = False
        for positions, _ in chain(changes(earlier, start), changes(later, start)):
            mask[positions] = True
        found.add(cells_of(mask, min(WINDOW, num_elements - start)))
    directory = found.directory()
    header = header._replace(num_changed=found.num_changed)
    memory = output(out, directory.sections.size_bytes, *sources)
    writer = DeltaWriter(directory, header, memory)
    for start, window in zip(window_starts(num_elements), found.windows, strict=True):
        # Only the changed items are defined, and only they are read.
        for positions, values in chain(changes(earlier, start), changes(later, start)):
            items[positions] = values
        writer.write(start, window, found.cells, items)
    return Encoded(memory, _metrics(header, len(memory)))


def _metrics(header: DeltaHeader, encoded_bytes: int) -> DeltaMetrics:
    """Return the metrics of a composed piece; of a dense one nothing was compared."""
    return DeltaMetrics(
        form=header.form,
        num_elements=header.num_elements,
        item_bytes=header.item_bytes,
        num_compared=0 if header.form == "dense" else header.num_elements,
        num_changed=header.num_changed,
        encoded_bytes=encoded_bytes,
    )
