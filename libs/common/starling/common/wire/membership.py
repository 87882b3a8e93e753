"""Membership: replicas join, report their state, hold leases, share devices and leave."""

from __future__ import annotations

from typing import Any

import msgspec

from starling.common.ids import Role
from starling.common.wire.structs import HeldLease, ModelFile, ModelLimits, ProfileReport, Status, Wait


class RequestSettings(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="request_settings"):
    """Asks for the settings of a replica with the sender's name. Sent by `starling join` before there is a replica, in
    an envelope whose run is empty; answered by `RoleSettings`. It makes the sender no member, and changes nothing."""

    with_model: bool = False
    """Send the small files of the model folder, too."""


class RoleSettings(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="settings"):
    """Settings of one role, for a process that joins the run. Sent in answer to `RequestSettings`.

    Buffers: the bytes of each of `files`.
    """

    sections: dict[str, Any] = {}
    """The sections of the run's configuration that this role reads (values of TOML), without secrets, and without the
    folders and addresses of the controller."""
    withheld: tuple[str, ...] = ()
    """Keys that are left out, because their values look like secrets."""
    connected: bool = False
    """Another process is connected with this name."""
    files: tuple[ModelFile, ...] = ()
    """Of the folder `model.path` of the controller's machine: configuration, tokenizer and templates, no weights."""
    problem: str = ""
    """Why there are no settings, or no files."""


class ReportFault(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="report_fault"):
    """A replica cannot start, or ends, for a fault that an operator has to mend, such as a full disk. Sent beside its
    membership, by which nothing changes; the live views show it."""

    reason: str


class Hello(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="hello"):
    """A replica asks to join. Sent twice a second until `Welcome` arrives, and again after `RequestHello`.

    Buffer 0, if `has_layout`: a `weightsync` `Layout` in MessagePack, of at most 64 MiB. More than 4096 slots are
    refused.
    """

    role: Role
    host: str
    pid: int
    num_slots: int = 0
    """Groups that the replica works on at a time (rollout, reward, teacher)."""
    version: int = -1
    """Weight version that it holds; -1 for none."""
    has_layout: bool = False
    serves: bool = False
    """It can offer the version that it holds to other replicas (`PublishWeights`)."""
    peer: str = ""
    """Policy that can make steps together with others, and copy its state from one of them: the host and port at which
    they find it. Empty for one that trains alone."""
    settings_digest: str = ""
    """Such a policy: digest of the settings that decide what a step computes, which must be those of the others."""
    checkpoint: str = ""
    """Rollout of a run without a policy: the digest of the model folder that it has loaded
    (`folder_digests.model_digest`), 32 hexadecimal digits. Empty in other runs."""
    limits: ModelLimits | None = None
    """Policy of a run with steps of groups: what its model can read of them. Other results are refused."""
    clock_s: float = 0.0
    """Seconds since 1970 by the sender's clock when this was sent; 0 from one that does not say. Only compared with the
    controller's clock, to report a wrong one: every deadline is in monotonic time."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="welcome"):
    """The replica is a member. Sent in answer to `Hello` and to every `Heartbeat`, so that silence means a lost
    controller.

    The replica sends a heartbeat every `heartbeat_s` and is evicted after `lease_s` without a message.
    """

    heartbeat_s: float
    lease_s: float
    shares_devices: bool = False
    """Other replicas may take its devices when it is lost: it must release them itself when no message that it sent
    within `lease_s` was answered."""


class RequestHello(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="introduce"):
    """The controller does not know the sender. Sent in answer to a message of an unknown replica; answered by
    `Hello`."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="refused"):
    """The replica cannot become a member and must exit. Sent when its run, key, role or model does not fit."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="heartbeat"):
    """A replica's whole state. Sent every `heartbeat_s`; the controller answers with what differs from its view."""

    leases: tuple[HeldLease, ...] = ()
    version: int = -1
    """Weight version in use; -1 for none."""
    gauges: dict[str, float] = {}
    """Measurements for the live view: tokens_per_s, queue_depth, ... The controller keeps the first 64."""
    offered: int = -1
    """Newest version that it offers; -1 for none."""
    waits: tuple[Wait, ...] = ()
    """Everything that it waits for now."""
    profile: ProfileReport | None = None
    """Its newest profile; absent before the first one."""


class ReleaseLeases(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="release"):
    """The replica may forget these leases. Sent when their results have arrived, or are no longer needed."""

    leases: tuple[str, ...]


class LeaseFailed(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="lease_failed"):
    """A replica could not do the work of a lease, and no longer holds it. Sent in place of the result."""

    lease: str
    status: Status
    reason: str
    fatal: bool = False
    """Non-retryable: no other attempt at this replica could succeed."""
    version: int = -1
    """Weight version that a policy holds, which may be the cause; -1 if not reported."""
    rejected: tuple[str, ...] = ()
    """Prompts of the groups of a step that the policy cannot train, whatever else is in the step."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="sleep"):
    """Release the devices' memory. Sent when a replica that shares the devices is to use them; answered by `Slept`."""

    lease: str


class Slept(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="slept"):
    """The replica's devices are free. Sent when `Sleep` is done."""

    lease: str


class Wake(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="wake"):
    """Take the devices' memory back. Sent when the other replicas have released it; answered by `Woken`."""

    lease: str


class Woken(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="awake"):
    """The replica has its devices again. Sent when `Wake` is done."""

    lease: str


class Drain(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="drain"):
    """No more work follows: say `Leave` and exit with 0. Sent when the run is over."""

    reason: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="leave"):
    """A replica's last message. Sent when it exits gracefully; its leases are free."""

    reason: str
