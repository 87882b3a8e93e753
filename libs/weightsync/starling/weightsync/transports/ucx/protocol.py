"""Messages of a UCX connection: requests and answers over a socket, payloads by tag over UCX.

UCXX's listener can be bound to no address, so there is none: the source listens on a socket of its own. The reader
sends the address of its UCX worker over it, and the source its own once the reader has proven a ticket; each end then
makes an endpoint from the address of the other. The socket also tells each end at once that the other one is gone,
which UCX notices by its keepalive only.

Tags are matched in the receiver's whole worker, so the reader chooses them. Payloads arrive in place, one message for
each segment. A refused `ReadBoxes` still gets its messages, of one byte each, so that no receive is left behind;
without an endpoint there are none, and the reader waits for none.

Active messages and streams would need no tags, but a receive of theirs that still waits when its endpoint is closed
keeps the worker alive for ever, or never ends.
"""

from __future__ import annotations

from typing import Final

import numpy as np

WORKER_BYTES: Final = 64 << 10
"""Longest address of a worker; it has a part for each device."""
REQUEST, ANSWER, WORKER = range(1, 4)
"""Kinds of messages: a request, its answer, and the address of the sender's worker."""
EMPTY_SEGMENT: Final = np.zeros(1, np.uint8)
"""The message for a segment without bytes."""
