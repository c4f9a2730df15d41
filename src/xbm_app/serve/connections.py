"""Connections: how many there may be, how long a client may take, and how the server ends.

uvicorn has no time limit on a request that is being sent and no limit on connections below that of file descriptors, so a
thousand clients that send half a request would silence it. Here a client that is waited for gives way to a new one.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from socket import socket
from types import FrameType

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0  # for a request to arrive, and
LEAST_RATE = 20_000  # bytes per second beyond that: 20 MB may take 17 minutes
KEPT_FILES = 64  # file descriptors for the index, uploads and workers
MOST_CONNECTIONS = 500
ACCEPTED_AT_ONCE = 32
QUEUE = 4096  # connections that the kernel keeps until they are accepted, or its own limit
GRACE = 8  # seconds after SIGTERM until requests are cut off; containers are killed after 10
LAST_SECONDS = 1.0  # after that, until the process ends whatever it is doing


def most_connections() -> int:
    """As many as the limit on file descriptors allows: those being accepted or closed count too."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except ImportError:  # Windows
        return MOST_CONNECTIONS
    free = limit - KEPT_FILES - 4 * ACCEPTED_AT_ONCE
    return MOST_CONNECTIONS if limit < 0 else max(8, min(MOST_CONNECTIONS, free))


class Connection(H11Protocol):
    """One connection, closed if its client takes too long to send a request or to read the answer.

    Attributes:
        since: when the server began to wait for the client.
    """

    most = most_connections()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._begin()
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._reading is None:  # the first bytes of the next request
            self._begin()
        self._received += len(data)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None  # from here on uvicorn's limit for idle connections counts
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "the request is not valid HTTP")

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn: to send a request, or the rest of one."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def _begin(self) -> None:
        self.since, self._received = self.loop.time(), 0
        self._reading = self.loop.call_later(REQUEST_SECONDS, self._check)

    def _check(self) -> None:
        """Ends a request that arrives too slowly."""
        if not self.is_waiting or self.transport.is_closing():
            return
        left = self.since + REQUEST_SECONDS + self._received / LEAST_RATE - self.loop.time()
        if left > 0:
            self._reading = self.loop.call_later(left, self._check)
        elif self._received:
            self._refuse(408, "the request did not arrive in time")
        else:
            self.transport.abort()

    def _make_room(self) -> None:
        """Closes a tenth of the connections: those that are waited for longest, of the addresses that have the most of them."""
        others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        waiting = [other for other in others if other.is_waiting]
        if not waiting:
            self._refuse(503, "the server is busy: try again in a few seconds")
            return
        count = Counter(other.address for other in waiting)
        waiting.sort(key=lambda other: (-count[other.address], other.since))
        for other in waiting[: max(1, self.most // 10)]:
            self.connections.discard(other)  # now, not when the loop comes to it
            other.transport.abort()

    def _refuse(self, status: int, reason: str) -> None:
        body = json.dumps({"error": reason}).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """A server that ends within its grace period, whatever its threads are doing.

    Args:
        at_end: called before the process is ended by force.
    """

    def __init__(self, config: uvicorn.Config, at_end: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._at_end = at_end

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(QUEUE)  # uvicorn has set it to the number that is accepted at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            last = threading.Timer(GRACE + LAST_SECONDS, self._end)
            last.daemon = True
            last.start()
        super().handle_exit(sig, frame)

    def _end(self) -> None:
        self._at_end()
        sys.stdout.flush()
        os._exit(0)


def configured(app: object, **changes: object) -> uvicorn.Config:
    """How uvicorn runs the application. Requests are not logged, so that no client can fill a disk; errors are."""
    logging.getLogger("python_multipart").setLevel(logging.CRITICAL)  # a line per malformed body, which is answered with 400
    options = {
        "http": Connection, "ws": "none", "lifespan": "off", "log_level": "error", "access_log": False, "server_header": False,
        "backlog": ACCEPTED_AT_ONCE, "timeout_graceful_shutdown": GRACE, **changes,
    }  # fmt: skip
    return uvicorn.Config(app, **options)  # type: ignore[arg-type]


def expect_signals() -> None:
    """uvicorn shuts down cleanly and then raises the signal again, which would kill the process without these handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
