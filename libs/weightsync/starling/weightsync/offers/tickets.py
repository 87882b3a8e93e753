"""Tickets: the right of one reader to read one snapshot, once.

A publisher draws a secret for each snapshot. Its offer carries the secret to the controller, over the encrypted control
plane, and nowhere else. For each pull the controller derives a ticket from it and sends that to the reader alone, over
the encrypted control plane too. The source derives the same key from its secret and the claims that the reader
presents, so it needs to know nothing of its readers:

    ticket    = claims, key                           claims: the reader's name, its pull and its incarnation, and how
                                                      much that may read
    key       = HMAC-SHA256(secret, claims)
    rank key  = HMAC-SHA256(key, rank)                a reader of several ranks opens the snapshot once with each
    proof     = claims, rank, nonce, HMAC-SHA256(rank key, snapshot, nonce)

The keys never travel over the network of the weights: an eavesdropper learns none. The source accepts each pair of
claims and rank once, so a proof is worth nothing afterwards; and another snapshot has another secret. The
keys of an encrypted connection are derived from the rank key, too (RFC 2104; the scheme is that of a Kerberos ticket).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
from typing import Final, NamedTuple

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import Offer, RankOffer

MAX_RANKS: Final = 1 << 16
"""Number of ranks that a reader may have."""
MAX_KEYED: Final = 256
"""Secrets whose keyed hash is kept: those of the ranks that are pulled from now."""
BOX_COST_BYTES: Final = 4096
"""What a box costs its source beside its bytes, in bytes: it is looked up, cut and digested."""
MAX_READS: Final = 8
"""How often a pull may read each box that it needs from one source rank: a delta is measured before it is read, a box
that arrives damaged is read again, and one rank may serve for others that failed."""
MAX_COPY_READS: Final = 2
"""How often it may read each further copy of a box: a rollout chooses how many copies its layout has."""
SPENT: Final = "has read as much of this snapshot as its tickets allow: a few times what it needs at most"
"""What a source tells a reader of which that is true. The controller finds it in the reason of a failed pull."""
_MAX_CHARACTERS: Final = 512
_SEPARATOR: Final = "|"
_INCARNATION: Final = "incarnation="
_MOST: Final = "most="


class TicketProof(NamedTuple):
    """Proof that a reader has a ticket for one snapshot, without the key in the ticket."""

    text: str
    """What travels to the source."""
    use: str
    """Claims and rank, which a source accepts once."""
    key: bytes
    """Known to the reader and the source only."""

    @property
    def reader(self) -> str:
        """Name of the replica that the controller made the ticket for."""
        return self.use.partition(" ")[0]

    @property
    def incarnation(self) -> str:
        """The incarnation of that replica; empty if the ticket names none."""
        claims = self.claims.split(" ")
        return next((one.removeprefix(_INCARNATION) for one in claims if one.startswith(_INCARNATION)), "")

    @property
    def claims(self) -> str:
        """Equal for all ranks of a reader in one pull."""
        return self.use.rpartition(_SEPARATOR)[0]

    @property
    def most_bytes(self) -> int | None:
        """How much all ranks of this incarnation of the reader may read of the snapshot from one source rank, as
        `reading_cost`; None: as much as they like."""
        last = self.claims.rpartition(" ")[2]
        return int(last.removeprefix(_MOST)) if last.startswith(_MOST) else None


def reading_cost(num_bytes: int, num_boxes: int) -> int:
    """Return what it costs a source that boxes are read, in bytes."""
    return num_bytes + BOX_COST_BYTES * num_boxes


def allowance(cost: int, distinct_cost: int) -> int:
    """Return how much a pull may read from one source rank, as `reading_cost`.

    Args:
        cost: of all boxes of its plan.
        distinct_cost: of its distinct boxes.
    """
    return MAX_READS * distinct_cost + MAX_COPY_READS * (cost - distinct_cost)


def offer_for(offer: Offer, reader: str, pull: str, most_bytes: int, incarnation: int) -> Offer:
    """Return a publisher's offer with a ticket in place of each secret.

    Args:
        offer: as it came from the publisher.
        reader: name of the replica that may pull.
        pull: name of its pull, which no other pull has.
        most_bytes: `allowance` of its plan.
        incarnation: of the reader, which has this allowance anew: the one before may have read and not adopted.
    """
    pull = f"{pull} {_INCARNATION}{incarnation} {_MOST}{most_bytes}"
    ranks = [msgspec.structs.replace(rank, secret="", ticket=ticket(rank.secret, reader, pull)) for rank in offer.ranks]
    return msgspec.structs.replace(offer, ranks=tuple(ranks))


def ticket(secret: str, reader: str, pull: str) -> str:
    """Return the ticket of one reader for one pull, derived from the secret of a snapshot."""
    claims = f"{reader} {pull}".replace(_SEPARATOR, " ")
    return claims + _SEPARATOR + _key(secret, claims)


def prove(offer: RankOffer, *, rank: int, nonce: str) -> TicketProof:
    """Return the proof with which rank `rank` of a reader opens the offered snapshot.

    Args:
        offer: with the reader's ticket. A reader in the source's own program may have the source's own offer, and then
            makes a ticket for itself.
        rank: the reader's rank.
        nonce: fresh random characters, none of them a bar.
    """
    claims, _, key = (offer.ticket or ticket(offer.secret, "reader", nonce)).rpartition(_SEPARATOR)
    return _proof(claims, key, offer.snapshot, rank, nonce)


def accept(secret: str, text: str, *, snapshot: int) -> TicketProof:
    """Check the text of a reader's proof against the secret of a snapshot.

    Raises:
        WeightsError: it does not prove a ticket for this snapshot.
    """
    claims, rank, nonce, _ = (*text.split(_SEPARATOR), "", "", "", "")[:4]
    if len(text) <= _MAX_CHARACTERS and rank.isascii() and rank.isdigit() and int(rank) < MAX_RANKS:
        own = _proof(claims, _key(secret, claims), snapshot, int(rank), nonce)
        if hmac.compare_digest(own.text.encode(), text.encode("utf-8", "surrogatepass")):
            return own
    raise WeightsError(f"The ticket for snapshot {snapshot} is wrong.")


def _proof(claims: str, key: str, snapshot: int, rank: int, nonce: str) -> TicketProof:
    rank_key = _mac(key.encode(), str(rank))
    mac = _mac(rank_key, f"{snapshot} {nonce}").hex()
    use = f"{claims}{_SEPARATOR}{rank}"
    return TicketProof(_SEPARATOR.join((use, nonce, mac)), use, rank_key)


@functools.lru_cache(maxsize=MAX_KEYED)
def _keyed(secret: str) -> hmac.HMAC:
    return hmac.new(secret.encode(), digestmod=hashlib.sha256)


def _key(secret: str, claims: str) -> str:
    mac = _keyed(secret).copy()  # takes half as long as a new one, and every rollout pulls by the same secrets
    mac.update(claims.encode())
    return mac.hexdigest()


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), hashlib.sha256)
