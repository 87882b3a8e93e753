"""Commands of rank 0 to the other ranks of a replica, each of which stands for a method of `PolicyRank`."""

from __future__ import annotations

import msgspec

from starling.common.ids import TrainerKind
from starling.common.wire import messages as wire


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load the model. The answer is the layout of this rank's part."""

    store: str = ""
    """Of ranks on several hosts, see `RankHost`."""


class Serve(msgspec.Struct, frozen=True, kw_only=True, tag="serve"):
    """Prepare to publish."""

    layout: bytes
    """Of all ranks."""


class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """Make a step."""

    message: wire.TrainStep
    buffers: tuple[bytes, ...]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot"):
    """Copy the present weights, as a version, into a snapshot."""

    version: int
    layouts: tuple[str, ...]
    plans: tuple[bytes, ...]
    """To the layouts of rollouts, by their keys in `layouts`."""


class AddRoots(msgspec.Struct, frozen=True, kw_only=True, tag="add_roots"):
    """Compute these layout roots of the newest snapshot, too."""

    layouts: tuple[str, ...]
    plans: tuple[bytes, ...]


class Roots(msgspec.Struct, frozen=True, kw_only=True, tag="roots"):
    """Answer with this rank's parts of the layout roots of a version; other commands are executed meanwhile."""

    version: int
    timeout_s: float


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Answer with the offer of this rank's newest snapshot, once it is digested; other commands are executed
    meanwhile."""

    timeout_s: float


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """Leave the device to others."""


class Wake(msgspec.Struct, frozen=True, kw_only=True, tag="wake"):
    """Return to the device."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag="resume"):
    """Restore a saved state, which rank 0 has verified."""

    url: str
    next_kind: TrainerKind | None


class SendState(msgspec.Struct, frozen=True, kw_only=True, tag="send_state"):
    """Send the present state to the same rank of another replica."""

    peers: tuple[str, str]
    """Addresses of the stores of this replica and of the other one."""
    group: str
    version: int


class ReceiveState(msgspec.Struct, frozen=True, kw_only=True, tag="receive_state"):
    """Copy the state of the same rank of another replica."""

    peers: tuple[str, str]
    """Addresses of the stores of the other replica and of this one."""
    group: str


class TakeState(msgspec.Struct, frozen=True, kw_only=True, tag="take_state"):
    """Copy the present state into host memory."""

    version: int


class WriteState(msgspec.Struct, frozen=True, kw_only=True, tag="write_state"):
    """Write the copied state. Executed while other commands are."""

    path: str
    """Of the folder of its tensors, on the file system of the states."""


class TakeExport(msgspec.Struct, frozen=True, kw_only=True, tag="take_export"):
    """Copy the weights of an export into host memory."""

    merged: bool
    """See `ExportFiles`."""


class WriteExport(msgspec.Struct, frozen=True, kw_only=True, tag="write_export"):
    """Write the copied weights into files that rank 0 has created. Executed while other commands are."""

    folder: str
    shard_mb: int
    merged: bool
    node: int
    """Whose ranks write; those of others have nothing to do."""


class StartProfile(msgspec.Struct, frozen=True, kw_only=True, tag="start_profile"):
    """Profile this rank, if it is one of those of the order. It answers nothing, also where it cannot."""

    order: wire.Profile


class EndProfile(msgspec.Struct, frozen=True, kw_only=True, tag="end_profile"):
    """End the profile and write its files. The answer is a `RankProfiled`."""


class RankProfiled(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has recorded."""

    text: str = ""
    files: tuple[str, ...] = ()


Command = (
    Load
    | Serve
    | Train
    | Snapshot
    | Offer
    | AddRoots
    | Roots
    | Sleep
    | Wake
    | Resume
    | SendState
    | ReceiveState
    | TakeState
    | WriteState
    | TakeExport
    | WriteExport
    | StartProfile
    | EndProfile
)
