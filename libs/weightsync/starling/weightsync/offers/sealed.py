"""Offers that travel through a channel that others can read: encrypted, as they have the ticket of their reader."""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from starling.common.errors import WeightsError

NONCE_BYTES: Final = 12


def new_key() -> bytes:
    """Return a new key, for one channel."""
    return AESGCM.generate_key(256)


def seal(key: bytes, data: bytes) -> bytes:
    """Encrypt `data` by AES-256-GCM, behind a random nonce."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, data, None)


def unseal(key: bytes, data: bytes) -> bytes:
    """Return what was sealed.

    Raises:
        WeightsError: it was sealed with another key, or changed.
    """
    try:
        return AESGCM(key).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], None)
    except (InvalidTag, ValueError) as error:
        raise WeightsError("An offer arrived that was sealed with another key, or changed on its way.") from error
