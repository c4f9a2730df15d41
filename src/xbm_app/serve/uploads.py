"""Uploads: their limits and formats, and the worker processes that decode them.

A small file can take minutes or gigabytes to decode. So the server never decodes one itself: a worker process does, with a
limit on its time and memory, and is killed and replaced if it exceeds them.
"""

import asyncio
import io
import json
import signal
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from threading import Lock
from typing import IO, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from xbm.errors import InputError
from xbm_app.data.decoding import LONGEST, UNREADABLE, decode, fit
from xbm_app.data.parallel import default_workers

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # what browsers show; the file name and declared type are ignored
MOST_BYTES = 20_000_000
MOST_PIXELS = 50_000_000
ENVELOPE = 65_536  # bytes of a request besides the file, for multipart
TOO_LARGE = f"the file is larger than {MOST_BYTES // 1_000_000} MB: use a smaller one"

MOST_SECONDS = 2.5  # to decode one upload; a photograph takes less than one
MOST_MEMORY = 400_000_000  # bytes that a worker may add to what it holds at its start, where the system can limit that
MOST_WAITING = 2.0  # seconds that an upload waits for a worker: together with decoding, each is answered within five
BUSY = "the server is busy with other uploads: try again in a few seconds"
WORKERS = min(4, default_workers())


class UploadError(Exception):
    """An upload that is not searched with.

    Attributes:
        status: 415 for what is not an image, 413 or 422 for what takes too much to decode, 422 for what is damaged, 503 if the
            server is busy or stopping.
        reason: one sentence.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status, self.reason = status, reason


class View(NamedTuple):
    """How a model needs an image: resized by `fit` to this size in this mode."""

    size: int
    mode: str


def view_of(content: bytes, view: View) -> np.ndarray:
    """Decodes an upload and resizes it, exactly like the indexed images.  # (h, w, 3) uint8

    Raises:
        UploadError: it is not an image, has too many pixels, or is damaged.
    """
    try:
        # JPEGs are decoded at twice the size or more: see `Embedder.decoded_side`
        return fit(decode(io.BytesIO(content), 2 * view.size, FORMATS, MOST_PIXELS), view.size, view.mode)
    except Image.DecompressionBombError:
        limit = MOST_PIXELS // 1_000_000
        raise UploadError(413, f"the picture has far too many pixels: use one of at most {limit} million") from None
    except UnidentifiedImageError:
        kinds = "JPEG, PNG, WebP, GIF or BMP"
        raise UploadError(415, f"the file is not an image that can be read: use a {kinds}") from None
    except InputError as error:
        raise UploadError(413, str(error)) from None
    except MemoryError:
        raise UploadError(413, "the picture takes too much memory to decode: use a smaller one") from None
    except UNREADABLE:
        raise UploadError(422, "the image is damaged or incomplete") from None


# ------------------------------------------------------------------ in the server


class Decoders:
    """The worker processes; a context manager that ends them.

    Workers start when the first upload arrives, or earlier by `start`.
    """

    def __init__(self, count: int = WORKERS) -> None:
        self._workers = [_Worker() for _ in range(count)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "decode")

    def __enter__(self) -> "Decoders":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """Kills the workers, whatever they are doing."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)  # their workers are gone, so they end by themselves

    async def views(self, file: IO[bytes], views: Sequence[View]) -> list[np.ndarray]:
        """The upload in `file` as each of `views`.  # (h, w, 3) uint8 each

        Raises:
            UploadError: it cannot be searched with, or no worker has become free.
        """
        job = self._threads.submit(self._decode, file, views, time.monotonic() + MOST_WAITING)
        future = asyncio.wrap_future(job)
        done, _ = await asyncio.wait([future], timeout=MOST_WAITING)
        if not done and job.cancel():  # which it cannot be once it has begun
            raise UploadError(503, BUSY)
        return await future

    def _decode(self, file: IO[bytes], views: Sequence[View], latest: float) -> list[np.ndarray]:
        worker = self._idle.get()  # there are as many threads as workers
        try:
            return worker.decode(file.read(), views, latest)
        finally:
            self._idle.put(worker)
            with suppress(RuntimeError):  # closed
                self._threads.submit(worker.start)  # if it was killed: after the answer, which need not wait for it


class _Worker:
    """One worker process, seen from the server. What it sends is not trusted either: no pickle, and sizes are limited."""

    def __init__(self) -> None:
        self._lock, self._closed, self._ready = Lock(), False, False
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        """Starts the process if there is none."""
        with self._lock:
            if self._closed or self._process is not None:
                return
            context = get_context("spawn")  # a fork would share the server's threads, sockets and memory
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_work, args=(theirs,), name="xbm-decode", daemon=True)
            self._process.start()
            theirs.close()
            self._ready = False

    def close(self) -> None:
        """Ends the process for good, also while another thread waits for it."""
        self._closed = True
        self._kill()

    def _kill(self) -> None:
        with self._lock:
            if self._process is None or self._pipe is None:
                return
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = self._pipe = None

    def decode(self, content: bytes, views: Sequence[View], latest: float) -> list[np.ndarray]:
        """Waits until `latest` for the process to be ready, and then for its answer."""
        self.start()
        pipe = self._pipe
        if pipe is None:
            raise UploadError(503, "the server is stopping")
        try:
            if not self._ready:
                if not pipe.poll(max(0.0, latest - time.monotonic())):
                    raise UploadError(503, BUSY)
                pipe.recv_bytes(maxlength=1)
                self._ready = True
            return _ask(pipe, content, views)
        except TimeoutError:
            words = f"the picture takes more than {MOST_SECONDS:g} s to decode: use a smaller or simpler one"
            raise self._killed(422, words) from None
        except (EOFError, OSError, ValueError, LookupError):  # it has crashed, or was killed by the system or by `close`
            words = "the image cannot be decoded" if self._ready else "no image can be decoded at the moment"
            raise self._killed(422 if self._ready else 503, words) from None

    def _killed(self, status: int, reason: str) -> UploadError:
        self._kill()
        return UploadError(503, "the server is stopping") if self._closed else UploadError(status, reason)


def _ask(pipe: Connection, content: bytes, views: Sequence[View]) -> list[np.ndarray]:
    """Sends an upload to a worker, and returns its views."""
    end, answers = time.monotonic() + MOST_SECONDS, []
    pipe.send_bytes(json.dumps(views).encode())
    pipe.send_bytes(content)
    for view in views:
        if not pipe.poll(max(0.0, end - time.monotonic())):
            raise TimeoutError
        header = json.loads(pipe.recv_bytes(maxlength=10_000))
        if "status" in header:
            raise UploadError(int(header["status"]), str(header["reason"]))
        most = 3 * (LONGEST + 1) * view.size**2
        answers.append(np.frombuffer(pipe.recv_bytes(maxlength=most), np.uint8).reshape(header["shape"]))
    return answers


# ------------------------------------------------------------------ in a worker


def _work(pipe: Connection) -> None:
    """Decodes what arrives until the server closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the server ends its workers
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # uploads have their own limit
    _limit_memory()
    try:
        pipe.send_bytes(b"1")
        while True:
            views = [View(*view) for view in json.loads(pipe.recv_bytes())]
            content = pipe.recv_bytes()
            for view in views:
                try:
                    pixels = view_of(content, view)
                    pipe.send_bytes(json.dumps({"shape": pixels.shape}).encode())
                    pipe.send_bytes(pixels.tobytes())
                except UploadError as refusal:
                    pipe.send_bytes(json.dumps({"status": refusal.status, "reason": refusal.reason}).encode())
                    break
    except (EOFError, OSError):
        return


def _limit_memory() -> None:
    try:
        import resource
        from pathlib import Path

        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MOST_MEMORY, held + MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, OSError, ValueError):  # not Linux
        return
