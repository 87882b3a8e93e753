"""Errors of the HTTP API, in the form of OpenAI's."""

from __future__ import annotations

from typing import Any, Final, Literal

from starling.common.errors import StarlingError
from starling.rollout.engine.queue import QueueClosedError

Code = Literal[
    "invalid_json",
    "invalid_value",
    "unsupported_parameter",
    "context_length_exceeded",
    "request_too_large",
    "request_timeout",
    "invalid_api_key",
    "model_not_found",
    "not_found",
    "method_not_allowed",
    "too_many_requests",
    "generation_failed",
    "timeout",
    "stopping",
]

STATUS: dict[Code, int] = {
    "invalid_json": 400,
    "invalid_value": 400,
    "unsupported_parameter": 400,
    "context_length_exceeded": 400,
    "request_too_large": 413,
    "request_timeout": 408,
    "invalid_api_key": 401,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "too_many_requests": 429,
    "generation_failed": 500,
    "timeout": 504,
    "stopping": 503,
}


MAX_TEXT: Final = 2000
"""Characters of an error: it may repeat what a client sent, and waits for the client to read it."""


class ApiError(StarlingError):
    """A rejected or failed request; the text is one sentence that names the value and the remedy.

    Args:
        text: the sentence.
        code: OpenAI's error code, which clients compare; it determines the HTTP status.
        parameter: the parameter at fault, if any.
    """

    def __init__(self, text: str, code: Code = "invalid_value", parameter: str | None = None) -> None:
        super().__init__(text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}...")
        self.code: Code = code
        self.parameter = parameter

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


def api_error_of(error: Exception) -> ApiError:
    """Return the API error for `error`."""
    match error:
        case ApiError():
            return error
        case QueueClosedError():
            return ApiError(str(error), "stopping")
        case _:
            return ApiError(str(error), "generation_failed")


def timeout_error(limit_s: float) -> ApiError:
    """Return the error for a request that took longer than `limit_s`."""
    return ApiError(f"no answer within {limit_s:g} s; ask for fewer tokens, or raise rollout.api.timeout_s", "timeout")
