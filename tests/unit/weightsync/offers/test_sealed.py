"""Sealed offers open with their key only, and unchanged."""

from __future__ import annotations

import pytest

from starling.common.errors import WeightsError
from starling.weightsync.offers.sealed import new_key, seal, unseal

OFFER = b"an offer with a ticket"


def test_sealed_offer_opens_with_its_key_and_is_never_the_same() -> None:
    key = new_key()
    sealed = seal(key, OFFER)
    assert unseal(key, sealed) == OFFER
    assert OFFER not in sealed
    assert seal(key, OFFER) != sealed


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:-1], lambda data: data[:20] + bytes([data[20] ^ 1]) + data[21:]]
)
def test_sealed_offer_that_was_changed_is_refused(change: object) -> None:
    key = new_key()
    with pytest.raises(WeightsError, match="sealed with another key, or changed on its way"):
        unseal(key, change(seal(key, OFFER)))  # type: ignore[operator]


def test_sealed_offer_does_not_open_with_another_key() -> None:
    with pytest.raises(WeightsError, match="sealed with another key"):
        unseal(new_key(), seal(new_key(), OFFER))
