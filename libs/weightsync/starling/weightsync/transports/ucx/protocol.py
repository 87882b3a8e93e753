"""Messages over UCX: tags, and the welcome that a source sends first.

Everything is sent by tag, and tags are matched in the receiver's whole worker. So a source gives every connection a
random tag for requests, which other readers cannot guess, and sends it first of all, together with its public name: a
reader has one worker for all its sources, and recognises by the name which source has welcomed it. The reader chooses
the tags of the answers and payloads that it receives. Payloads arrive in place, one message for each segment. A refused
`ReadBoxes` still gets its messages, of one byte each, so that no receive is left behind.

Active messages and streams would need no tags, but a receive of theirs that still waits when its endpoint is closed
keeps the worker alive for ever, or never ends.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np

from starling.weightsync.memory.arrays import Memory
from starling.weightsync.transports.messages import Request, SourceAnswer, with_length

NAME_BYTES: Final = 8
WELCOME_TAG: Final = 1 << 62
ANSWER_TAGS: Final = 1 << 61
"""The tag of an answer is this plus the request's number; tags of payloads are smaller."""
WELCOME: Final = struct.Struct(f"<{NAME_BYTES}sQ")
"""The source's name, and the tag of requests on this connection."""
EMPTY_SEGMENT: Final = np.zeros(1, np.uint8)
"""The message for a segment without bytes."""


def encoded(message: Request | SourceAnswer) -> Memory:
    """Encode a message as flat memory, which UCX sends."""
    return np.frombuffer(with_length(message), np.uint8)
