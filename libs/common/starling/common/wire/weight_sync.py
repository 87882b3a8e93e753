"""Weight sync: a replica offers a weight version, and other replicas pull and adopt it."""

from __future__ import annotations

from typing import Final

import msgspec

MAX_READS: Final = 16
"""Reads that the answer to an adoption lists: a replica of eight ranks may read from hundreds."""


class PublishWeights(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="publish_weights"):
    """Copy the present weights into a snapshot and offer it. Sent when a version is due; answered by
    `WeightsPublished`.

    The next step may begin as soon as the copy is made. A replica that offers the version already answers with that
    offer. Buffers, to a policy: the `weightsync` `Plan` of each of `layouts`, in MessagePack.
    """

    lease: str
    version: int
    layouts: tuple[str, ...] = ()
    """To a policy: keys of the plans to the distinct layouts of the rollouts, whose layout roots it computes."""


class WeightsPublished(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="weights_published"):
    """A version can be pulled. Sent when the snapshot and its digests are ready. Buffer 0: a `weightsync` `Offer` in
    MessagePack."""

    lease: str
    version: int
    publish_s: float
    """Seconds that training waited for the snapshot."""
    offer_s: float = 0.0
    """Seconds from the snapshot to the offer (digests), during which training continues."""
    layout_roots: dict[str, str] = {}
    """From a policy: by key of `PublishWeights.layouts`, the layout root, which a rollout of this layout proves."""


class AdoptWeights(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="adopt_weights"):
    """Pull a version and switch to it. Sent when a newer version is on offer; answered by `WeightsAdopted`.

    Buffers: a `weightsync` `Offer`, with tickets for this replica and lease, and a `Plan`, both in MessagePack; with
    `has_root_plan` another `Plan`; for each of `relays` its `Offer`, with tickets as well.
    """

    lease: str
    version: int
    source: str = ""
    """Replica that offers it."""
    peer: str = ""
    """To a policy: `Hello.peer` of the source, another policy, from which it copies the weights with everything else
    that the next step needs. It pulls nothing by the plan, and proves the root."""
    layout: str = ""
    """Key of the layouts of the policy and of this replica, under which layout roots are known."""
    layout_roots: tuple[str, ...] = ()
    """To a rollout: the layout roots that policies computed for this version and key: usually one, none where they are
    not known. A rollout that holds none of them samples nothing, and answers with what it holds."""
    has_root_plan: bool = False
    """The third buffer is the plan from the policy's layout, whose boxes the layout root covers: the source is a
    rollout."""
    relays: tuple[str, ...] = ()
    """Rollouts of the same layout that pull this version, or have pulled it: they are read instead of `source`, which
    is read where they do not answer."""
    announce: bool = False
    """To a rollout: serve what arrives to others while it arrives, and say so by `RelayOffered`."""


class RelayOffered(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="relay_offered"):
    """A rollout serves a version that it has begun to pull; it ends no lease. Sent before the first byte has arrived.

    Buffer: a `weightsync` `Offer` in MessagePack; none with a `problem`.
    """

    lease: str
    """That of the adoption."""
    version: int
    problem: str = ""
    """Why it serves nothing: others wait for it no longer."""


class RankRead(msgspec.Struct, frozen=True, kw_only=True, gc=False, array_like=True):
    """What one rank of a replica read from one rank of another."""

    source: str
    """Replica: the source of the pull, or a relay."""
    source_rank: int
    rank: int
    """That of the reader."""
    transport: str
    num_bytes: int
    """Bytes that travelled."""
    seconds: float
    """From the beginning of the pull to the last of them."""


class WeightsAdopted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="weights_adopted"):
    """A replica uses `version` now. Sent after the switch; `root` and `layout_root` are digests of the weights that its
    engine holds: the former of what it read, by the offer of its source, the latter independent of the source."""

    lease: str
    version: int
    root: str
    pull_s: float
    """Seconds of the transfer, while generation continued."""
    pause_s: float
    """Seconds that generation paused for the switch."""
    size_bytes: int
    """Size of the weights that it holds."""
    transport: str
    sent_bytes: int = 0
    """Bytes that were transferred; fewer than `size_bytes` with deltas."""
    lanes: tuple[str, ...] = ()
    """Transports and memory types that were really used, for example ``cma/memory``."""
    split: dict[str, float] = {}
    """Seconds of the parts of `pull_s`: ``prepare_s``, ``read_s`` (in it ``unpack_s``, ``digest_s``), ``confirm_s``."""
    mode: str = ""
    """How running requests were treated: ``keep``, ``recompute``, ``salt`` or ``finish``."""
    recomputed_tokens: int = 0
    """Tokens whose keys and values were computed again with the new weights."""
    drain_s: float = 0.0
    """Seconds that the switch waited for running requests, under ``finish``."""
    layout_root: str = ""
    """Root over the boxes of the plan from the policy's layout."""
    source: str = ""
    """As in `AdoptWeights`."""
    layout: str = ""
    """As in `AdoptWeights`."""
    reads: tuple[RankRead, ...] = ()
    """The largest reads, at most `MAX_READS`."""
