"""Delta codec with numpy, single-threaded: scan for changes, write, apply.

    scanned = scan(new, base, item_bytes=2)     # number of changes, and the smallest form
    encoded = write(scanned, new, out=buffer)   # or serve the snapshot itself if scanned.form is "dense"
    apply(encoded.data, held)                   # at the destination: `held` was `base`, now it is `new`

Pieces are processed window by window, so that temporary data stays in the CPU cache. Every step is one numpy call,
which releases the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
from starling.weightsync.delta.format import (
    HEADER,
    Data,
    DeltaHeader,
    DeltaMetrics,
    Directory,
    Form,
    Memory,
    bytes_of,
    digest_bytes,
    items_of,
    pack_header,
)
from starling.weightsync.delta.parse import Dense, Parsed, Same, parse


@dataclass(frozen=True)
class Encoded:
    """One encoded piece."""

    data: Memory
    metrics: DeltaMetrics

    @property
    def form(self) -> Form:
        """Form of `data`."""
        return self.metrics.form


@dataclass(frozen=True)
class Scan:
    """Result of comparing a piece with its base, before values are gathered."""

    metrics: DeltaMetrics
    """With the encoded size that `write` will produce."""
    directory: Directory | None
    """None unless the form is `delta`."""
    found: ChangedElements

    @property
    def form(self) -> Form:
        """The smallest form."""
        return self.metrics.form


def scan(
    new: Data,
    base: Data,
    item_bytes: int,
    *,
    max_share: float = 1.0,
    keep_values: bool = False,
    stopped: Callable[[], bool] | None = None,
) -> Scan:
    """Compare a piece with its previous version, bit by bit.

    The result takes 2 bytes per changed element, or a bit per element where many changed.

    Args:
        new: the bytes of the piece.
        base: its bytes in the previous version.
        item_bytes: of one element: 1, 2, 4 or 8.
        max_share: a delta may take at most this share of the bytes of the piece, else the form is `dense`. The
            comparison stops as soon as the changed elements alone take more.
        keep_values: also keep the changed elements, which makes `write` faster.
        stopped: called after each window; True ends the comparison, with the form `dense`.

    Raises:
        WeightsError: the two differ in size, or are not whole elements.
    """
    items, old = items_of(new, item_bytes, "the new piece"), items_of(base, item_bytes, "the base")
    if len(items) != len(old):
        raise WeightsError(f"The new piece has {len(items)} elements, its base {len(old)}: they must have one size.")
    max_bytes = max_delta_bytes(items.nbytes, max_share)
    found = ChangedElements(len(items), item_bytes)
    mask = make_mask(len(items))
    num_compared = 0
    for start in window_starts(len(items)):
        window = items[start : start + WINDOW]
        np.not_equal(window, old[start : start + WINDOW], out=mask[: len(window)])
        found.add(cells_of(mask, len(window)), window if keep_values else None)
        num_compared += len(window)
        if found.num_changed * item_bytes > max_bytes or (stopped is not None and stopped()):
            break
    form: Form = "same"
    size, directory = HEADER.size, None
    if found.num_changed or num_compared < len(items):
        form, size = "dense", HEADER.size + items.nbytes
    if num_compared == len(items) and 0 < found.num_changed * item_bytes <= max_bytes:
        candidate = found.directory()
        if candidate.sections.size_bytes <= HEADER.size + max_bytes:
            form, size, directory = "delta", candidate.sections.size_bytes, candidate
    metrics = DeltaMetrics(form, len(items), item_bytes, num_compared, found.num_changed, size)
    return Scan(metrics, directory, found)


def write(
    scanned: Scan,
    new: Data,
    *,
    out: Data | None = None,
    base_digest: str | None = None,
    digest: str | None = None,
) -> Encoded:
    """Write the form that `scan` chose.

    Args:
        scanned: scan of `new` and its base.
        new: the bytes of the piece, as they were scanned.
        out: output of at least `scanned.metrics.encoded_bytes` bytes that does not overlap `new`; else new memory.
        base_digest: digest of the base, which `apply` and `compose` then check.
        digest: digest of the piece, which the base digest of the next delta must equal.

    Raises:
        WeightsError: `new` has another size than the scanned piece, or `out` is too small, not writable, or overlaps.
    """
    metrics = scanned.metrics
    items = items_of(new, metrics.item_bytes, "the new piece")
    if len(items) != metrics.num_elements:
        raise WeightsError(f"The new piece has {len(items)} elements where {metrics.num_elements} were scanned.")
    memory = output(out, metrics.encoded_bytes, new)
    changed = metrics.num_changed if scanned.directory else 0
    header = DeltaHeader(
        metrics.form, len(items), metrics.item_bytes, changed, digest_bytes(base_digest), digest_bytes(digest)
    )
    if scanned.directory:
        writer = DeltaWriter(scanned.directory, header, memory)
        for start, window in zip(window_starts(len(items)), scanned.found.windows, strict=True):
            writer.write(start, window, scanned.found.cells, items[start : start + WINDOW])
    else:
        memory[: HEADER.size] = np.frombuffer(pack_header(header), np.uint8)
        memory[HEADER.size :] = items.view(np.uint8)[: len(memory) - HEADER.size]
    return Encoded(memory, metrics)


def encode(
    new: Data,
    base: Data,
    item_bytes: int,
    *,
    out: Data | None = None,
    max_share: float = 1.0,
    base_digest: str | None = None,
    digest: str | None = None,
) -> Encoded:
    """Encode a piece against its previous version in the smallest form.

    This is `scan` and `write` in one, and faster: values are gathered while they are in the cache. `out` needs at most
    64 bytes more than the piece.

    Raises:
        WeightsError: as `scan` and `write`.
    """
    scanned = scan(new, base, item_bytes, max_share=max_share, keep_values=True)
    return write(scanned, new, out=out, base_digest=base_digest, digest=digest)


def apply(data: Data, base: Data, *, base_digest: str | None = None) -> None:
    """Turn the base into the new piece, in place. Nothing is written unless all of `data` is valid.

    Applying a delta again to its own result changes nothing.

    Args:
        data: an encoded piece.
        base: the bytes of the piece in the base version of the delta; of any version if `data` is dense.
        base_digest: digest of the base, if known: a delta of another base is refused.

    Raises:
        WeightsError: `data` is malformed, or not for this base.
    """
    apply_parsed(parse(data), base, base_digest=base_digest)


def apply_parsed(parsed: Parsed, base: Data, *, base_digest: str | None = None) -> None:
    """As `apply`, for a parsed piece."""
    header = parsed.header
    items = items_of(base, header.item_bytes, "the base")
    check_base(header, len(items), digest_bytes(base_digest))
    if not items.flags.writeable:
        raise WeightsError("The base is read-only: give writable memory.")
    if isinstance(parsed, Same):
        return
    if isinstance(parsed, Dense):
        items.view(np.uint8)[:] = parsed.payload
        return
    for start in window_starts(len(items)):
        window = items[start : start + WINDOW]
        for positions, values in changes(parsed, start):
            window[positions] = values


def check_base(header: DeltaHeader, num_elements: int, base_digest: bytes | None) -> None:
    """Check that an encoded piece is for a base of `num_elements` and, unless it is dense, of this digest.

    Raises:
        WeightsError: naming both sides.
    """
    if header.num_elements != num_elements:
        raise WeightsError(
            f"The encoded piece has {header.num_elements} elements of {header.item_bytes} bytes and the base "
            f"{num_elements}: ask for a delta of this piece."
        )
    if header.form == "dense" or header.base_digest is None or base_digest is None:
        return
    if header.base_digest != base_digest:
        raise WeightsError(
            f"The delta is of the base {header.base_digest.hex()}, not of "
            f"{base_digest.hex()}: ask for the chain between them, or for the dense form."
        )


def max_delta_bytes(dense_bytes: int, max_share: float) -> int:
    """Return the largest worthwhile size of a delta after its header.

    Raises:
        WeightsError: `max_share` is not in [0, 1].
    """
    if not 0 <= max_share <= 1:
        raise WeightsError(f"A delta cannot be limited to {max_share} of the piece: give a share from 0 to 1.")
    return max(0, min(int(max_share * dense_bytes), dense_bytes - 1))


def output(out: Data | None, size: int, *sources: Data) -> Memory:
    """Return the first `size` bytes of `out`, or of new memory.

    Raises:
        WeightsError: `out` is too small, not writable, or shares memory with a source.
    """
    if out is None:
        return np.empty(size, np.uint8)
    memory = bytes_of(out, "the output")
    if len(memory) < size or not memory.flags.writeable:
        raise WeightsError(f"The encoded piece takes {size} bytes that can be written: {len(memory)} were given.")
    if any(np.may_share_memory(memory, bytes_of(source, "a source")) for source in sources):
        raise WeightsError("The output overlaps the input: give other memory.")
    return memory[:size]
