"""Messages between the trainer and the workers of vLLM: msgspec structs, MessagePack on the wire."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar

import msgspec

from starling.common.errors import WeightsError
from starling.weightsync.plan.layout import UNDECODABLE
from starling.weightsync.puller.report import PullReport

PROTOCOL: Final = 2
"""Version of these messages, and of what vLLM's calls carry: trainer and workers need the same."""
LONGEST: Final = 256 << 20
"""Longest message, in bytes: the layout of a worker, or a plan."""

Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 60)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker joins, with what it can receive."""

    name: Text
    """Unique among all workers, and readable."""
    engine: Text = ""
    """Equal for all workers of one engine, which switch together or not at all; empty: this is its only worker. Ranks
    of data parallelism that compute together are one engine."""
    engine_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    """How many workers the engine has at least."""
    vllm: Text
    """Version of vLLM."""
    layout: bytes = b""
    """Of this worker alone: one rank."""
    config: dict[str, Any] = {}
    """The model's configuration in transformers, as vLLM has read it."""
    stages: bool = True
    """Whether pulls go into staging, while vLLM generates; else they are made while it is paused."""
    problem: Text = ""
    """Why the worker cannot join."""


class Relayed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker serves to others what it pulls."""

    number: Number
    offer: bytes


class Pulled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a pull: a report, or a problem. Without either it takes place when the worker switches."""

    number: Number
    report: PullReport | None = None
    problem: Text = ""


class Switched(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker has switched to a version, and attests what it holds; or it has a problem."""

    version: Number
    root: Text = ""
    seconds: float = 0.0
    """What the switch took, digests included."""
    report: PullReport | None = None
    """Of a pull that took place now."""
    problem: Text = ""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The trainer has taken a worker; or refuses it, for a reason."""

    refused: Text = ""


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pull a version."""

    number: Number
    offer: bytes
    """With tickets for this worker."""
    plan: bytes
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    relays: tuple[bytes, ...] = ()
    """Offers of the same version by other workers, to read first."""
    announce: bool = False
    """Serve to others what arrives."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the pull that is running."""


class Opening(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a worker, in clear text; see `link`."""

    protocol: int
    nonce: Text
    proof: Text = ""


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `Opening`, in clear text."""

    nonce: Text
    proof: Text
    protocol: int = PROTOCOL


FromWorker = Hello | Relayed | Pulled | Switched
FromTrainer = Welcome | Pull | Cancel


class Decoder:
    """Reads messages of one direction, which are checked before anything is done with them."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | bytearray) -> Any:
        """Read one message.

        Raises:
            WeightsError: it is none.
        """
        try:
            return self._decoder.decode(data)
        except UNDECODABLE as error:
            raise WeightsError(f"A peer sent what is no message: {error}.") from error


from_worker: Final = Decoder(FromWorker)
from_trainer: Final = Decoder(FromTrainer)
opening: Final = Decoder(Opening)
opened: Final = Decoder(Opened)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message.

    Raises:
        WeightsError: it is longer than its receiver accepts.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > LONGEST:
        raise WeightsError(f"A {type(message).__name__} has {len(data)} bytes; at most {LONGEST} are allowed.")
    return data


def shortened(text: str) -> str:
    """Return the beginning of a reason, as long as a message may have it."""
    return text[:4000]
