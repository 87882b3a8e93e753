"""Tickets: bound to a snapshot, a reader, a pull and a rank."""

from __future__ import annotations

import pytest

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer, make_offer
from starling.weightsync.offers.tickets import (
    MAX_COPY_READS,
    MAX_RANKS,
    MAX_READS,
    accept,
    allowance,
    offer_for,
    prove,
    ticket,
)

SECRET, NONCE = "ab" * 16, "0123"


def offer_with(own: str = "", *, secret: str = "", snapshot: int = 7) -> RankOffer:
    """Return an offer with this ticket or secret."""
    return RankOffer(
        rank=0, transport="tcp", address="h:1", secret=secret, ticket=own, snapshot=snapshot, holds="0", root="0"
    )


def proof_of(own: str, rank: int = 0, snapshot: int = 7) -> str:
    return prove(offer_with(own, snapshot=snapshot), rank=rank, nonce=NONCE).text


def test_proof_of_a_ticket_is_accepted_with_the_key_of_the_reader() -> None:
    mine = prove(offer_with(ticket(SECRET, "rollout-1", "adopt:3:1.2")), rank=2, nonce=NONCE)
    accepted = accept(SECRET, mine.text, snapshot=7)
    assert accepted == mine
    assert accepted.use == "rollout-1 adopt:3:1.2|2"


def test_reader_with_the_offer_of_the_source_makes_a_ticket() -> None:
    mine = prove(offer_with(secret=SECRET), rank=0, nonce=NONCE)
    assert accept(SECRET, mine.text, snapshot=7) == mine


def test_proof_has_neither_secret_nor_key() -> None:
    own = ticket(SECRET, "rollout-1", "adopt:3:1.2")
    mine = prove(offer_with(own), rank=0, nonce=NONCE)
    for hidden in (SECRET, own.rpartition("|")[2], mine.key.hex()):
        assert hidden not in mine.text


def test_readers_pulls_and_ranks_have_different_keys() -> None:
    tickets = [ticket(SECRET, name, pull) for name in ("rollout-1", "rollout-2") for pull in ("1.1", "1.2")]
    keys = {prove(offer_with(own), rank=rank, nonce=NONCE).key for own in tickets for rank in range(3)}
    assert len(keys) == 12


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "é",
        "|||",
        SECRET,
        proof_of(ticket("cd" * 16, "rollout-1", "1.1")),
        proof_of(ticket(SECRET, "rollout-1", "1.1"), snapshot=9),
        proof_of(ticket(SECRET, "rollout-1", "1.1")).replace("rollout-1", "rollout-2"),
        proof_of(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|1|"),
        proof_of(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|00|"),
        proof_of(ticket(SECRET, "rollout-1", "1.1")).replace(NONCE, "4567"),
        proof_of(ticket(SECRET, "rollout-1", "1.1")) + "|",
        proof_of(ticket(SECRET, "rollout-1", "1.1"), rank=MAX_RANKS),
        proof_of(ticket(SECRET, "r" * 1000, "1.1")),
        proof_of(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|²|"),
        proof_of(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|\ud800|"),
    ],
)
def test_anything_else_is_refused(forged: str) -> None:
    with pytest.raises(WeightsError, match="The ticket for snapshot 7 is wrong"):
        accept(SECRET, forged, snapshot=7)


def test_offer_for_a_reader_has_no_secret() -> None:
    ranks = [
        RankOffer(
            rank=rank, transport="tcp", address="h:1", secret=f"{rank}" * 32, snapshot=7, holds=str(rank), root="0"
        )
        for rank in range(2)
    ]
    offer = make_offer(3, ranks)
    mine = offer_for(offer, "rollout-1", "adopt:3:1.2", 1000, 17)
    assert (mine.root, mine.version) == (offer.root, offer.version)
    for rank, other in zip(offer.ranks, mine.ranks, strict=True):
        assert other.secret == ""
        assert rank.secret not in other.ticket
        proof = accept(rank.secret, proof_of(other.ticket), snapshot=7)
        assert (proof.reader, proof.incarnation, proof.most_bytes) == ("rollout-1", "17", 1000)


def test_copies_of_a_box_are_read_less_often() -> None:
    """A layout of 872 copies of the model made a ticket for 6,977 times the model."""
    assert allowance(1000, 1000) == 1000 * MAX_READS
    assert allowance(10 * 1000, 1000) == 1000 * MAX_READS + 9 * 1000 * MAX_COPY_READS
