"""What every request passes before anything looks at it: host, origin, token, size; and the headers of every answer.

The page of another site must not be able to use a server on this machine through the visitor's browser (DNS rebinding, forged
requests), so names that were not asked for are refused; outside this machine a token is needed on top.
"""

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.exceptions import HTTPException

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 20_000_000  # of an upload
ENVELOPE = 65_536  # what multipart puts around it
DRAINED_BYTES, DRAINED_SECONDS = 256_000_000, 20  # of a request that is refused, so that the refusal is read
COOKIE = "xbm_token"
OPEN = frozenset({"/api/health"})  # needs no token
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        hosts: names that the server goes by.
        addresses: whether it may also be called by any IP address, which no foreign name can be made to look like.
        token: what is asked for on top; None on this machine alone.
    """

    hosts: frozenset[str]
    addresses: bool = False
    token: str | None = None

    def knows(self, host: str) -> bool:
        """Whether a Host header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self.hosts:
            return True
        try:
            return self.addresses and bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def admits(self, given: str | None) -> bool:
        """Whether a token is the right one; takes as long for a nearly right one."""
        return self.token is None or (given is not None and hmac.compare_digest(given.encode(), self.token.encode()))


class Guard:
    """Refuses, as an ASGI application around another, what `Access` and the size limit do not let pass."""

    def __init__(self, app: App, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no web sockets here
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        send = _with_headers(send)
        refused = self._refused(scope, headers)
        if refused is None:
            await self._app(scope, _counted(receive), send)
            return
        status, sentence, extra = refused
        await _drained(receive)
        await _answer(send, status, sentence, extra)

    def _refused(self, scope: Scope, headers: dict[str, str]) -> tuple[int, str, dict[str, str]] | None:
        """Status, sentence and further headers; None lets the request pass."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._access.knows(host):
            return 400, "this server does not go by that name: use the address that `xbm serve` printed, or --allow-host", {}
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return 403, "requests from the pages of other sites are not answered", {}
        if self._access.token is not None and scope["path"] not in OPEN:
            asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [None])[0]
            if scope["path"] == "/" and asked is not None and self._access.admits(asked):
                # from here on the cookie does, and the token stands in no address that is copied on
                cookie = f"{COOKIE}={asked}; HttpOnly; SameSite=Strict; Path=/"
                return 303, "", {"location": "/", "set-cookie": cookie}
            if not self._access.admits(_token(headers)):
                said = "a token is needed: open the address that `xbm serve` printed, or send it as `Authorization: Bearer`"
                return 401, said, {"www-authenticate": "Bearer"}
        length = headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_BYTES + ENVELOPE:
            return 413, too_large(), {}
        return None


def too_large() -> str:
    return f"the file is larger than {MOST_BYTES // 1_000_000} MB: give a smaller one"


def _token(headers: dict[str, str]) -> str | None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if cookie is None else cookie.value


def _counted(receive: Receive) -> Receive:
    """Reads on until too much has come: a request may keep silent about its length."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MOST_BYTES + ENVELOPE:
            await _drained(receive)
            raise HTTPException(413, too_large())
        return message

    return counted


async def _drained(receive: Receive) -> None:
    """Reads the rest of a request and forgets it: a client that is still sending would not see the answer."""
    read = 0
    try:
        async with asyncio.timeout(DRAINED_SECONDS):
            while read < DRAINED_BYTES:
                message = await receive()
                read += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending


async def _answer(send: Send, status: int, sentence: str, extra: dict[str, str]) -> None:
    body = json.dumps({"error": sentence}).encode() if sentence else b""
    headers = {"content-type": "application/json", "content-length": str(len(body)), **extra}
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
