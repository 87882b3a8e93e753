"""Guard in front of the page: who may ask what, and what a browser may do with the answers.

- The token opens everything below ``/api/``. It is sent in a header and never in a cookie, so that no other site can
  use it, and no other server of the same host is sent it.
- The ``Host`` of a request must be an IP address, ``localhost`` or a name that was allowed: a name of a stranger that
  leads here (DNS rebinding) is refused.
- A request that changes a run must come from the page itself: its ``Origin`` is the host that was asked, and its body
  is JSON, which a form of another site cannot send.
- The page loads its own scripts and styles, and nothing else; texts cannot become scripts.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any, Final

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES: Final = 16 << 10
TOKEN_BYTES: Final = 32
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "media-src blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


def make_token() -> str:
    """Return a new token."""
    return secrets.token_urlsafe(TOKEN_BYTES)


class Guard:
    """ASGI application in front of another one, which answers only what may be asked."""

    def __init__(self, application: Application, token: str, names: Collection[str]) -> None:
        """Ask for `token`; `names` are host names by which the page may be reached, besides addresses."""
        self._application, self._token = application, token.encode()
        self._names = frozenset(name.casefold() for name in names) | {"localhost"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        send = _with_headers(send)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        if scope["method"] == "POST":
            body = await _body(receive)
            if body is None:
                await _refuse(send, 413, f"the request has more than {MAX_BODY_BYTES} bytes")
                return
            receive = _replay(body, receive)
        await self._application(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and the sentence for a request that is not answered, None for one that is."""
        headers = _single(scope["headers"])
        if headers is None:
            return 400, "a header is there twice"
        host = headers.get("host", "")
        if not self._is_own(host):
            return 403, f"{host[:100]!r} is no name of this page; write its address, or start it with --allow-host NAME"
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return 405, "only GET and POST are answered"
        if not scope["path"].startswith("/api/"):
            return None if scope["method"] != "POST" else (405, "only GET is answered here")
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return 403, "another site asks; open the page itself"
        given = headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, b"Bearer " + self._token):
            return 401, "the token is missing or wrong; open the address that `starling dashboard` has printed"
        if scope["method"] == "POST":
            return _cross_site(headers, host, scope["scheme"])
        return None

    def _is_own(self, host: str) -> bool:
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "")
        if port and not port.isdecimal():
            return False
        name = name.removesuffix(".").casefold()
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name[1:-1] if name.startswith("[") and name.endswith("]") else name)
        except ValueError:
            return False
        return True


def _cross_site(headers: dict[str, str], host: str, scheme: str) -> tuple[int, str] | None:
    """Return why a request to change something is not from the page itself, None where it is."""
    origins = {f"http://{host}", f"https://{host}"}  # TLS may end in front of this server
    if headers.get("origin", "") not in origins:
        return 403, "the request does not come from this page (Origin)"
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return 415, "send application/json"
    return None


def _single(raw: list[tuple[bytes, bytes]]) -> dict[str, str] | None:
    """Return the headers that decide, None where one of them is there twice."""
    deciding = {b"host", b"authorization", b"origin", b"content-type", b"sec-fetch-site"}
    found = [(name, value) for name, value in raw if name in deciding]
    if len({name for name, _ in found}) != len(found):
        return None
    return {name.decode("ascii"): value.decode("latin-1") for name, value in found}


def _with_headers(send: Send) -> Send:
    async def sender(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", []))
            named = {name for name, _ in headers}
            headers += [(name, value) for name, value in HEADERS if name not in named]
            if b"cache-control" not in named:
                headers.append((b"cache-control", b"no-store"))
            message = {**message, "headers": headers}
        await send(message)

    return sender


async def _refuse(send: Send, status: int, sentence: str) -> None:
    body = sentence.encode("utf-8", "replace")
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _body(receive: Receive) -> bytes | None:
    """Return the body of a request, None where it is too long, or the client is gone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receiver of a body that was read, and after it of what follows."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiver() -> MutableMapping[str, Any]:
        return messages.pop() if messages else await receive()

    return receiver
