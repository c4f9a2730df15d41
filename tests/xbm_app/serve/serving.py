"""A server in a thread of this process."""

import threading
import time
from collections.abc import Iterator

from xbm_app.search.searcher import Searcher
from xbm_app.serve.access import access_to, listen
from xbm_app.serve.connections import Server, configured
from xbm_app.serve.server import Current, create_app
from xbm_app.serve.uploads import Decoders


def running(searchers: list[Searcher], decoders: Decoders) -> Iterator[str]:
    """Yields its address once, and ends it when asked again."""
    with listen("127.0.0.1", 0) as opened:
        app = create_app(Current(searchers), access_to("127.0.0.1", [], None), decoders)
        # A browser that is closed in the middle of a request leaves one that never ends.
        server = Server(configured(app, timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{opened.getsockname()[1]}/"
        server.should_exit = True
        thread.join()
