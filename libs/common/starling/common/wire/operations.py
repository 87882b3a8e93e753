"""Operations: commands of an operator, and the controller's replies."""

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


class RequestStop(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="request_stop"):
    """Stops the run gracefully. Sent by `starling stop`; answered by `OperatorReply`."""

    request: str
    reason: str


class OperatorReply(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="reply"):
    """The answer to an operator. Sent for every request."""

    request: str
    ok: bool
    text: str
    """The answer, or the reason of a refusal, in words."""
    data: dict[str, Any] = {}
    """The same for programs (JSON values)."""
