"""Operations: commands of an operator, the controller's replies, and the profiles that replicas take for them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class QueryRun(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="ask"):
    """Asks for the state of the run, or for what it waits for. Sent by `starling status` and `starling why`; answered
    by `OperatorReply`."""

    request: str
    """Id chosen by the sender, repeated in the reply."""
    about: Literal["status", "why"]


class ChangeSetting(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="change_setting"):
    """Changes a setting of the running job. Sent by `starling set`; answered by `OperatorReply`. A repeated request
    counts once."""

    request: str
    key: str
    """As in the recipe, for example ``policy.optimizer.learning_rate``."""
    value: float | int | bool | str


class RequestEvaluation(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="request_evaluation"):
    """Requests an evaluation of the newest version. Sent by `starling evaluate` with a running job; answered by
    `OperatorReply`. A repeated request counts once."""

    request: str
    num_completions: int = 0
    """Completions of each prompt; 0 for the number in the recipe."""


class RequestCheckpoint(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="request_checkpoint"):
    """Has a policy save a state of the newest version before its next step. Sent by `starling checkpoint`; answered by
    `OperatorReply`, before the state is written."""

    request: str


class RequestStop(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="request_stop"):
    """Stops the run gracefully. Sent by `starling stop`; answered by `OperatorReply`."""

    request: str
    reason: str


class ScaleReplicas(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="scale_replicas"):
    """Sets how many replicas of a role the run should have. Sent by `starling scale`; answered by `OperatorReply`. A
    repeated request counts once."""

    request: str
    role: str
    """rollout, policy, reward or teacher."""
    num: int


class DrainReplica(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="drain_replica"):
    """Drains one replica, and lowers the number that the run should have of its role. Sent by `starling drain`;
    answered by `OperatorReply`. A repeated request counts once."""

    request: str
    name: str


class RequestProfile(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="request_profile"):
    """Profiles some processes of the run. Sent by `starling profile`, again and again until all of them have ended;
    answered by `OperatorReply`. A repeated request starts nothing, and is answered with the present state."""

    request: str
    """Also the id of the profile, and the name of its folder: 32 hexadecimal digits."""
    targets: tuple[str, ...]
    """Names of replicas, and ``controller``."""
    num_steps: int = 3
    """Optimizer steps after which a policy ends its profile."""
    seconds: float = 10.0
    """After which other processes end theirs."""
    num_groups: int = 0
    """Groups after which other processes but the controller end theirs, in place of `seconds`; 0 for none."""
    limit_s: float = 300.0
    """After which every process ends its profile, whatever it has recorded."""
    ranks: tuple[int, ...] = (0,)
    """Ranks of a policy; empty for all."""
    memory: bool = False
    """Record allocations, too."""
    flames: bool = False
    """Sample the stacks of Python, too, with py-spy."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="profile"):
    """Profile this process. Sent when an operator asks for it, and again until a heartbeat reports `profile`; the
    fields are those of `RequestProfile`. It is no lease: the work of the replica goes on."""

    profile: str
    num_steps: int
    seconds: float
    num_groups: int
    limit_s: float
    ranks: tuple[int, ...] = ()
    memory: bool = False
    flames: bool = False


class OperatorReply(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="reply"):
    """The answer to an operator. Sent for every request."""

    request: str
    ok: bool
    text: str
    """The answer, or the reason of a refusal, in words."""
    data: dict[str, Any] = {}
    """The same for programs (JSON values)."""
