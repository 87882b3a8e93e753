"""Digest of prompts, by which a resumed run sees that its data has changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import xxhash

from starling.common.wire.messages import Prompt

_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")


def digest_of_prompts(prompts: Iterable[Prompt]) -> str:
    """Return the digest of everything that the prompts say, in their order, as 32 hexadecimal digits."""
    digest = xxhash.xxh3_128()
    for prompt in prompts:
        digest.update(_encoder.encode(prompt))
    return digest.hexdigest()
