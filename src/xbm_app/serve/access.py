"""Who may reach the server: where it listens, and the check of host, origin, token and size of every request.

The page of another site must not be able to use a server on this machine through the visitor's browser (DNS rebinding, forged
requests), so unknown host names are refused. If other machines can reach the server, a token is required as well.
"""

import asyncio
import hmac
import ipaddress
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from xbm.errors import InputError
from xbm_app.serve.uploads import ENVELOPE, MOST_BYTES, TOO_LARGE

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
DRAINED_BYTES, DRAINED_SECONDS = 256_000_000, 20  # read of a refused request, so that the client sees the refusal
COOKIE = "xbm_token"
OPEN = frozenset({"/api/health"})  # paths that need no token
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
    """Which requests are answered.

    Attributes:
        hosts: names of this server.
        addresses: whether any IP address is accepted as well; no foreign name can be disguised as one.
        token: required token, or None if only this machine can reach the server.
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
        return name in self.hosts or (self.addresses and _ip(name) is not None)

    def admits(self, token: str | None) -> bool:
        """Whether a token is correct, compared in constant time."""
        return self.token is None or (token is not None and hmac.compare_digest(token.encode(), self.token.encode()))


def access_to(host: str, allowed: Sequence[str], token: str | None) -> Access:
    """Access to a server that listens on `host`; if other machines can reach it, a token is generated unless given."""
    token = (token or "").strip() or None  # HTTP removes the spaces around a header's value
    if token is not None and not token.isprintable():
        raise InputError("the token contains a character that cannot be sent: use letters, digits and punctuation")
    names = LOOPBACK | {host.lower(), *(name.lower() for name in allowed)}
    if is_loopback(host):
        return Access(names, token=token)
    return Access(names | {socket.gethostname().lower()}, addresses=True, token=token or secrets.token_urlsafe(16))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that a host is given as; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host} port {port} ({reason}): give another --port, 0 for any, or --host") from None


def address(host: str, port: int, token: str | None) -> str:
    """The address to open in a browser."""
    reached = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    name = f"[{reached}]" if ":" in reached else reached
    return f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")


class Guard:
    """An ASGI application around another that refuses what `Access` or the size limit does not allow."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not supported
        send = _with_headers(send)
        refusal = self._refusal(Request(scope))
        if refusal is None:
            await self._answer(scope, receive, send)
            return
        await _drain(receive)
        await refusal(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, _counted(receive), sending)
        except asyncio.CancelledError:  # the server ends and cannot wait any longer
            if not begun:
                await _refuse(503, "the server is stopping")(scope, receive, send)

    def _refusal(self, request: Request) -> Response | None:
        """The response to a request that is not allowed; None lets it pass."""
        host, origin, path = request.headers.get("host", ""), request.headers.get("origin"), request.scope["path"]
        if not self._access.knows(host):
            return _refuse(400, "unknown host name: use the address that `xbm serve` printed, or start it with --allow-host")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return _refuse(403, "requests from other sites are not allowed")
        if self._access.token is not None and path not in OPEN:
            token = request.query_params.get("token")
            if path == "/" and token is not None and self._access.admits(token):
                # From here on the cookie is enough, so the token is in no address that the user may share.
                cookie = f"{COOKIE}={quote(token, safe='')}; HttpOnly; SameSite=Strict; Path=/"
                cookie += "; Secure" if request.scope["scheme"] == "https" else ""
                return Response(status_code=303, headers={"location": "/", "set-cookie": cookie})
            if not self._access.admits(_token(request)):
                words = "a token is needed: open the address that `xbm serve` printed, or send it as `Authorization: Bearer`"
                return _refuse(401, words, {"www-authenticate": "Bearer"})
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > MOST_BYTES + ENVELOPE:
            return _refuse(413, TOO_LARGE)
        return None


def _refuse(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps({"error": message}), status, headers, "application/json")


def _token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip().encode("latin-1").decode(errors="replace")  # clients send UTF-8, Starlette reads Latin-1
    return unquote(request.cookies.get(COOKIE, ""))


def _counted(receive: Receive) -> Receive:
    """Limits how much is read: a request need not state its length."""
    read = 0

    async def counted() -> Message:
        nonlocal read
        message = await receive()
        read += len(message.get("body", b""))
        if read > MOST_BYTES + ENVELOPE:
            await _drain(receive)
            raise HTTPException(413, TOO_LARGE)
        return message

    return counted


async def _drain(receive: Receive) -> None:
    """Discards the rest of a request: a client that is still sending would not see the response."""
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
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
