"""Tickets: bound to a snapshot, a reader, a pull and a rank."""

from __future__ import annotations

import pytest

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer, make_offer
from starling.weightsync.offers.tickets import MAX_RANKS, accept, offer_for, present, ticket

SECRET, NONCE = "ab" * 16, "0123"


def shown(token: str, rank: int = 0, snapshot: int = 7) -> str:
    return present(token, snapshot=snapshot, rank=rank, nonce=NONCE).text


def test_presented_ticket_is_accepted_with_the_key_of_the_reader() -> None:
    mine = present(ticket(SECRET, "rollout-1", "adopt:3:1.2"), snapshot=7, rank=2, nonce=NONCE)
    accepted = accept(SECRET, mine.text, snapshot=7)
    assert accepted == mine
    assert accepted.use == "rollout-1 adopt:3:1.2|2"


def test_neither_secret_nor_key_is_presented() -> None:
    token = ticket(SECRET, "rollout-1", "adopt:3:1.2")
    mine = present(token, snapshot=7, rank=0, nonce=NONCE)
    for hidden in (SECRET, token.rpartition("|")[2], mine.key.hex()):
        assert hidden not in mine.text


def test_readers_pulls_and_ranks_have_different_keys() -> None:
    tokens = [ticket(SECRET, name, pull) for name in ("rollout-1", "rollout-2") for pull in ("1.1", "1.2")]
    keys = {present(token, snapshot=7, rank=rank, nonce=NONCE).key for token in tokens for rank in range(3)}
    assert len(keys) == 12


@pytest.mark.parametrize(
    "forged",
    [
        "",
        "é",
        "|||",
        SECRET,
        shown(ticket("cd" * 16, "rollout-1", "1.1")),
        shown(ticket(SECRET, "rollout-1", "1.1"), snapshot=9),
        shown(ticket(SECRET, "rollout-1", "1.1")).replace("rollout-1", "rollout-2"),
        shown(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|1|"),
        shown(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|00|"),
        shown(ticket(SECRET, "rollout-1", "1.1")).replace(NONCE, "4567"),
        shown(ticket(SECRET, "rollout-1", "1.1")) + "|",
        shown(ticket(SECRET, "rollout-1", "1.1"), rank=MAX_RANKS),
        shown(ticket(SECRET, "r" * 1000, "1.1")),
        shown(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|²|"),
        shown(ticket(SECRET, "rollout-1", "1.1")).replace("|0|", "|\ud800|"),
    ],
)
def test_anything_else_is_refused(forged: str) -> None:
    with pytest.raises(WeightsError, match="The token for snapshot 7 is wrong"):
        accept(SECRET, forged, snapshot=7)


def test_offer_for_a_reader_has_no_secret() -> None:
    ranks = [
        RankOffer(
            rank=rank, transport="tcp", address="h:1", token=f"{rank}" * 32, snapshot=7, holds=str(rank), root="0"
        )
        for rank in range(2)
    ]
    offer = make_offer(3, ranks)
    mine = offer_for(offer, "rollout-1", "adopt:3:1.2")
    assert (mine.root, mine.version) == (offer.root, offer.version)
    for rank, other in zip(offer.ranks, mine.ranks, strict=True):
        assert rank.token not in other.token
        accept(rank.token, shown(other.token), snapshot=7)
