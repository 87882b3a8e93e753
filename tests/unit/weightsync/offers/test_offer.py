"""The root of a version: several ranks attest it only together."""

from __future__ import annotations

import msgspec
import pytest

from starling.common.errors import WeightsError
from starling.weightsync.offers.offer import RankOffer, attested_root, decode_offer, joined_root, make_offer
from starling.weightsync.plan.layout import encode

RANK = RankOffer(rank=0, transport="local", address="/", secret="s", snapshot=1, holds="h", root="0" * 32)


def test_version_is_attested_by_all_ranks_together() -> None:
    offer = make_offer(3, [RANK])
    sent, other = "1" * 32, "2" * 32
    good, wrong = attested_root(offer, sent, sent), attested_root(offer, sent, other)
    assert good == offer.root
    assert joined_root(offer, [good]) == joined_root(offer, [good, good]) == offer.root
    for roots in ([wrong], [good, wrong], [wrong, good], [wrong, wrong]):  # copies that are wrong in the same way
        assert joined_root(offer, roots) != offer.root


def test_deeply_nested_offer_is_refused() -> None:
    deep = msgspec.Raw(b"\x91" * 200_000 + b"\xc0")
    with pytest.raises(WeightsError, match="not a Offer: maximum recursion depth"):
        decode_offer(msgspec.msgpack.encode({**msgspec.to_builtins(make_offer(3, [RANK])), "new": deep}))


def test_offer_with_a_long_secret_is_refused() -> None:
    """Keys of the last 256 secrets are kept with them."""
    with pytest.raises(WeightsError, match="secret of 65 characters, expected at most 64"):
        decode_offer(encode(make_offer(3, [msgspec.structs.replace(RANK, secret="s" * 65)])))
    assert decode_offer(encode(make_offer(3, [msgspec.structs.replace(RANK, secret="s" * 64)])))


@pytest.mark.parametrize("snapshot", [-1, 1 << 60, (1 << 64) - 1])
def test_offer_of_a_snapshot_that_no_source_counts_to_is_refused(snapshot: int) -> None:
    """A reader that maps an arena sets a lock at this offset."""
    with pytest.raises(WeightsError, match="not a Offer"):
        decode_offer(encode(make_offer(3, [msgspec.structs.replace(RANK, snapshot=snapshot)])))
