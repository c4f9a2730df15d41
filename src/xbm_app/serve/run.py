"""Running the server: where it listens, what it prints, how it ends."""

import ipaddress
import secrets
import signal
import socket
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import uvicorn
from PIL import Image

from xbm.errors import InputError
from xbm_app.search.searcher import Searcher
from xbm_app.search.threads import quickest_threads
from xbm_app.serve.app import create_app
from xbm_app.serve.guard import Access

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
PATIENCE = 10  # seconds that requests under way get at the end


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def access_to(host: str, allowed: Sequence[str], token: str | None) -> Access:
    """Who may call a server that listens on `host`: outside this machine, only who has the token."""
    names = LOOPBACK | {host.lower(), *(name.lower() for name in allowed)}
    if is_loopback(host):
        return Access(names, token=token)
    return Access(names | {socket.gethostname().lower()}, addresses=True, token=token or secrets.token_urlsafe(16))


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=256)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host} port {port} ({reason}): give another --port, 0 for any, or --host") from None


def address(host: str, port: int, token: str | None) -> str:
    """What to open in a browser."""
    reached = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    name = f"[{reached}]" if ":" in reached else reached
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def serve(folders: Sequence[Path], host: str, port: int, allowed: Sequence[str] = (), token: str | None = None) -> None:
    """Serves until it is told to stop (Ctrl-C, SIGTERM); requests under way are still answered."""
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # uploads have a limit of their own
    access = access_to(host, allowed, token)
    with listen(host, port) as opened, ExitStack() as stack:
        searchers = [Searcher(folder) for folder in folders]
        app = create_app(searchers, access)
        stack.enter_context(quickest_threads(searchers[0].model, batch=1))
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=PATIENCE, lifespan="off"
        )
        # uvicorn ends in an orderly way and then sends itself the signal again; without this that would be the end after all
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, lambda *_: None)
        print(f"Open {address(host, opened.getsockname()[1], access.token)} (Ctrl-C ends it)", flush=True)
        uvicorn.Server(config).run(sockets=[opened])
    print("stopped", flush=True)
