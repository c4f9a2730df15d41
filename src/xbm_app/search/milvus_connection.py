"""The connection to Milvus: an address, a client that connects again after a loss, and what a loss is called."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from xbm.errors import InputError
from xbm_app.extras import require
from xbm_app.search.rows import UnavailableError

PREFIX = "milvus:"
SECONDS = 10  # for an answer of the engine


class MilvusConnection:
    """Collections of one name at one address: the rows of an index, and the facts about it. It may be shared between threads.

    Args:
        where: `milvus:FILE.db` or `milvus:http://HOST:PORT`, each with `#NAME` if the collection is not `xbm`.
        write: whether the file may be created.
    """

    def __init__(self, where: str, write: bool) -> None:
        require("milvus", "pymilvus")
        import pymilvus.client.iterator.query_iterator  # noqa: F401  sets levels of its own

        for quiet in ("pymilvus", "pymilvus.client.iterator.query_iterator", "grpc._server"):  # what matters is raised
            logging.getLogger(quiet).setLevel(logging.CRITICAL)
        self.folder = where  # as messages name it
        address, _, name = where.removeprefix(PREFIX).partition("#")
        self.name = name or "xbm"
        if not address or not self.name.isidentifier():
            raise InputError(
                f"{where} names no engine: write milvus:FILE.db or milvus:http://HOST:PORT, and #NAME for a collection"
            )
        if not write and "://" not in address and not Path(address).exists():
            raise InputError(f"{address} does not exist: make an index with `xbm index RUN IMAGES --to {where}`")
        self._address, self._lock = address, threading.RLock()
        self._connected: Any = None  # the client, while the engine answers

    @property
    def _facts(self) -> str:
        return f"{self.name}_facts"

    @property
    def _client(self) -> Any:
        """The client; connects if need be, also again after a loss."""
        from pymilvus import MilvusClient

        with self._lock:
            if self._connected is None:
                client = MilvusClient(self._address, token=os.environ.get("MILVUS_TOKEN", ""), timeout=SECONDS)
                for name in (self._facts, self.name):
                    if client.has_collection(name):
                        client.load_collection(name)  # an engine that was started again has not loaded it
                self._connected = client
            return self._connected

    def close(self) -> None:
        with self._lock:
            client, self._connected = self._connected, None
        if client is not None:
            with suppress(Exception):  # which may be the loss itself
                client.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Raises what goes wrong between here and the engine as `UnavailableError`; the next call connects again."""
        from grpc import RpcError
        from pymilvus.exceptions import MilvusException

        try:
            yield
        except (MilvusException, RpcError, OSError) as error:
            self.close()
            reason = str(getattr(error, "message", error)).splitlines()[0][:200]
            raise UnavailableError(f"{self.folder} does not answer ({reason}): see whether the engine is running") from error
