"""Errors of the HTTP front end: a status and one sentence."""

from __future__ import annotations

from typing import Any, Final

from starling.common.errors import StarlingError

Responses = dict[int | str, dict[str, Any]]
"""Descriptions of answers by their status, as FastAPI has them."""
REFUSALS: Final[Responses] = {
    status: {"description": text}
    for status, text in (
        (401, "no token, or a wrong one"),
        (408, "the body took too long"),
        (413, "the body is too large"),
        (422, "the body is not valid; `detail` says why"),
        (429, "a limit is reached; try again after `retry-after` seconds"),
        (503, "the service starts or stops, or cannot reach its store; try again after `retry-after` seconds"),
    )
}
"""Descriptions of the statuses of requests that are refused."""


class HttpError(StarlingError):
    """A request that is not served.

    Args:
        status: the HTTP status.
        text: one sentence that names the value and the remedy.
        retry_after_s: when the client may try again; None to not say.
        details: in place of the sentence in the body, as FastAPI has them for a body that is not valid.
    """

    def __init__(
        self, status: int, text: str, *, retry_after_s: int | None = None, details: list[dict[str, Any]] | None = None
    ) -> None:
        super().__init__(text)
        self.status, self.retry_after_s, self.details = status, retry_after_s, details

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return {"detail": str(self) if self.details is None else self.details}

    @property
    def headers(self) -> dict[str, str]:
        """Further headers of the response."""
        headers = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status in (408, 413):  # the rest of the body must not be read as the next request
            headers["connection"] = "close"
        return headers


class UnreadableResult(HttpError):
    """A stored result that is damaged, of another version, or of another program.

    Args:
        id: of the request.
    """

    def __init__(self, id: str) -> None:
        super().__init__(404, f"the result of request {id!r} cannot be read; ask again")


class StoreUnavailable(HttpError):
    """The store of requests cannot be reached, or does not answer in time; nothing is known of what it did.

    Args:
        reason: for the log; clients are not told.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(503, "the store of requests cannot be reached; try again", retry_after_s=1)
        self.reason = reason
