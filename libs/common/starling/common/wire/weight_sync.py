"""Weight sync: a replica offers a weight version, and other replicas pull and adopt it."""

from __future__ import annotations

import msgspec


class PublishWeights(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="publish_weights"):
    """Copy the present weights into a snapshot and offer it. Sent when a version is due; answered by
    `WeightsPublished`.

    The next step may begin as soon as the copy is made. A replica that offers the version already answers with that
    offer.
    """

    lease: str
    version: int


class WeightsPublished(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="weights_published"):
    """A version can be pulled. Sent when the snapshot and its digests are ready. Buffer 0: a `weightsync` `Offer` in
    MessagePack."""

    lease: str
    version: int
    publish_s: float
    """Seconds that training waited for the snapshot."""
    offer_s: float = 0.0
    """Seconds from the snapshot to the offer (digests), during which training continues."""


class AdoptWeights(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="adopt_weights"):
    """Pull a version and switch to it. Sent when a newer version is on offer; answered by `WeightsAdopted`.

    Buffers: a `weightsync` `Offer`, with tickets for this replica and lease, and a `Plan`, both in MessagePack.
    """

    lease: str
    version: int
    source: str = ""
    """Replica that offers it."""
    with_state: bool = False
    """To a policy: with the optimizer's state, so that it can train the next step."""


class WeightsAdopted(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="weights_adopted"):
    """A replica uses `version` now. Sent after the switch; `root` is the digest of the weights that its engine
    holds."""

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
