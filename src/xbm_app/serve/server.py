"""The search server: what it shows, its API, its page, and the process that serves them.

Nothing that a client sends is used as a path.
"""

import asyncio
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.resources import files
from math import gcd
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import FastAPI, File, Query, Request, UploadFile
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from xbm import __version__
from xbm.errors import InputError, XbmError
from xbm_app.search.catalogue import Item
from xbm_app.search.filters import filters_of
from xbm_app.search.milvus import UnavailableError
from xbm_app.search.searcher import Hit, OwnEncoder, Searcher, quickest_threads
from xbm_app.serve.access import Access, Guard, access_to, address, listen
from xbm_app.serve.connections import Server, configured, expect_signals
from xbm_app.serve.uploads import MOST_BYTES, MOST_PIXELS, Decoders, UploadError, View

T = TypeVar("T")
PAGE = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"), "/app.css": ("app.css", "text/css")}
LARGEST = 2**63 - 1  # largest id in SQLite
MOST_PENDING = 128  # searches that wait for their turn; further ones are refused at once
BUSY = "the server is busy: try again in a few seconds"
LOOK_SECONDS = 1.0  # between two looks at whether an index has been updated

# ------------------------------------------------------------------ what is shown


class Content:
    """What is shown at one time: one index, or two to compare. A request takes it once and keeps to it.

    Attributes:
        searchers: one or two.
        names: of their runs, with their parent folders if both runs have the same name.
        recalls: recall@10 of each index against exact search; None if it was not measured.
        labels: (label, number of images) of the first index.
    """

    def __init__(self, searchers: Sequence[Searcher]) -> None:
        if not 1 <= len(searchers) <= 2:
            raise InputError(f"give one index, or two to compare, got {len(searchers)}")
        self.searchers = tuple(searchers)
        self.names = [s.name for s in searchers]
        if len(set(self.names)) < len(searchers):
            self.names = ["/".join(s.catalogue.get("run").split("/")[-2:]) for s in searchers]
        self.recalls = [s.catalogue.get("recall@10", 1.0) for s in searchers]
        self.labels = searchers[0].catalogue.labels()


class Current:
    """Holds the current content, which is replaced as a whole when `xbm index` has updated an index.

    Args:
        searchers: one or two that hold their content.
    """

    def __init__(self, searchers: Sequence[Searcher]) -> None:
        self.content = Content(searchers)
        self._unreadable = False

    def refresh(self) -> None:
        """Switches to indexes that have been updated; if one cannot be read, keeps what there is and says so once."""
        try:
            newer = [searcher.newer() for searcher in self.content.searchers]
            if any(newer):
                self.content = Content([new or old for new, old in zip(newer, self.content.searchers)])
            self._unreadable = False
        except (XbmError, OSError, sqlite3.Error) as error:
            if not self._unreadable:
                self._unreadable = True
                print(f"note: still showing the index as it was: {error}", file=sys.stderr, flush=True)

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Looks for updates in the background."""
        ended = Event()

        def look() -> None:
            while not ended.wait(LOOK_SECONDS):
                self.refresh()

        Thread(target=look, name="refresh", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


# ------------------------------------------------------------------ the JSON of the API, which /api/openapi.json describes


class Error(BaseModel):
    error: str = Field(description="what is wrong, in one sentence")


class Health(BaseModel):
    status: str = Field(examples=["ok"])
    version: str


class Run(BaseModel):
    name: str = Field(description="the run whose model produced the vectors")
    images: int
    dim: int = Field(description="dimension of the vectors")
    kind: str = Field(description="exact, compressed or milvus")
    recall: float | None = Field(description="recall@10 against exact search when the index was made; null if not measured")
    reads_images: bool = Field(description="whether an uploaded image can be a query")
    reads_text: bool = Field(description="whether a text can be a query")
    columns: list[str] = Field(description="what filters can compare, beside label and path")


class About(BaseModel):
    runs: list[Run] = Field(description="one run, or two to compare; `run` in other calls is a position in this list")
    labels: int = Field(description="number of labels")
    most_bytes: int = Field(description="largest upload, in bytes")
    most_pixels: int = Field(description="largest upload, in pixels")


class Label(BaseModel):
    label: str
    images: int = Field(description="number of images with this label")


class Labels(BaseModel):
    labels: list[Label]


class Image(BaseModel):
    id: int
    label: str
    path: str = Field(description="relative to the indexed folder")
    data: dict[str, str | int | float] = Field(description="the other columns of its table")


class Images(BaseModel):
    images: list[Image]
    total: int = Field(description="number of images to page through")


class Result(Image):
    similarity: float = Field(description="cosine similarity to the query")


class Found(BaseModel):
    name: str
    known: bool = Field(description="false if this run's index does not contain the query image")
    results: list[Result] = Field(description="nearest first")


class Vector(BaseModel):
    vector: list[float] = Field(max_length=100_000, description="of the same length as those of the index")


class Answer(BaseModel):
    query: Image | None = Field(description="the query image if it is in the index; null for an upload, a text or a vector")
    runs: list[Found]
    seconds: float


# ------------------------------------------------------------------ the API

REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "unknown host name, or a malformed request"},
    401: {"model": Error, "description": "a token is required"},
    403: {"model": Error, "description": "sent by the page of another site"},
    404: {"model": Error, "description": "no such image"},
    413: {"model": Error, "description": "too large"},
    415: {"model": Error, "description": "not an image"},
    422: {"model": Error, "description": "an invalid value, or an image that is damaged or takes too long to decode"},
    503: {"model": Error, "description": "the server is busy, or the index cannot be read"},
}
Top = Annotated[int, Query(ge=1, le=100, description="number of results")]
LabelQuery = Annotated[str | None, Query(max_length=300, description="search only images with this label")]
Filters = Annotated[
    list[Annotated[str, Field(max_length=300)]] | None,
    Query(alias="filter", max_length=20, description="conditions that must all be met, such as price<=20"),
]
Offset = Annotated[int, Query(ge=0, le=900, description="results to leave out: those of earlier pages")]
Place = Annotated[int, Query(ge=0, le=1, description="position of the run in /api/about")]


def create_app(current: Current, access: Access, decoders: Decoders) -> ASGIApp:
    """The application.

    The event loop only passes requests on. Model and search run on a single thread, since their libraries use all cores
    themselves, and thumbnails are read on another.
    """
    app = FastAPI(
        title="xbm", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", responses=REFUSALS
    )
    searching, reading = ThreadPoolExecutor(1, "search"), ThreadPoolExecutor(1, "read")
    pending = 0

    async def on(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        nonlocal pending
        if pending >= MOST_PENDING:
            raise HTTPException(503, BUSY, {"retry-after": "2"})
        pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            pending -= 1

    def searcher(content: Content, run: int) -> Searcher:
        if run >= len(content.searchers):
            raise HTTPException(404, "there is only one run: leave run at 0")
        return content.searchers[run]

    async def nearest(content: Content, search: Callable[[Searcher, int], list[Hit]]) -> Answer:
        start = time.perf_counter()

        def search_runs() -> list[Found]:
            return [_found(name, search(s, k)) for k, (name, s) in enumerate(zip(content.names, content.searchers))]

        return Answer(query=None, runs=await on(searching, search_runs), seconds=time.perf_counter() - start)

    @app.get("/api/health")
    async def health() -> Health:
        """Whether the server is running; needs no token."""
        return Health(status="ok", version=__version__)

    @app.get("/api/about")
    async def about() -> About:
        """What can be searched, and the limits of uploads."""
        content = current.content
        runs = [
            Run(
                name=name,
                images=s.count,
                dim=s.dim,
                kind=s.neighbours.kind,
                recall=recall,
                reads_images=s.model is not None,
                reads_text=s.reads_text,
                columns=s.columns,
            )
            for name, s, recall in zip(content.names, content.searchers, content.recalls)
        ]
        return About(runs=runs, labels=len(content.labels), most_bytes=MOST_BYTES, most_pixels=MOST_PIXELS)

    @app.get("/api/labels")
    async def find_labels(
        contains: Annotated[str, Query(max_length=300)] = "", limit: Annotated[int, Query(ge=1, le=500)] = 50
    ) -> Labels:
        """Labels that contain some text."""
        part = contains.casefold()
        matching = [Label(label=label, images=count) for label, count in current.content.labels if part in label.casefold()]
        return Labels(labels=matching[:limit])

    @app.get("/api/images")
    async def browse(
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=100)] = 24,
        label: LabelQuery = None,
        filters: Filters = None,
    ) -> Images:
        """Images to start from, in a mixed order that starts over at the end."""
        first, conditions = current.content.searchers[0], filters_of(filters, label)

        def page() -> Images:
            ids = first.ids_of(conditions)
            count = len(ids)
            stride = _stride(count)
            shown = [int(ids[(offset + k) * stride % count]) for k in range(min(limit, count))]
            items = first.catalogue.items(shown)
            images = [Image(**items[image]._asdict()) for image in shown if image in items]
            return Images(images=images, total=count)

        return await on(searching, page)

    @app.get("/api/thumbnails/{run}/{image}", response_class=Response, responses={200: {"content": {"image/webp": {}}}})
    async def thumbnail(run: Annotated[int, InPath(ge=0, le=1)], image: Annotated[int, InPath(ge=0, le=LARGEST)]) -> Response:
        """A small version of an image of the index."""
        shown = searcher(current.content, run)
        webp = await on(reading, lambda: shown.catalogue.thumbnail(image))
        if webp is None:
            raise HTTPException(404, "no such image in this index")
        return Response(webp, media_type="image/webp", headers={"cache-control": "private, max-age=3600"})

    @app.post("/api/search")
    async def search(
        image: Annotated[UploadFile, File()],
        top: Top = 12,
        label: LabelQuery = None,
        filters: Filters = None,
        offset: Offset = 0,
    ) -> Answer:
        """The images nearest to an uploaded one, for each run."""
        content, conditions = current.content, filters_of(filters, label)
        fitted = await decoders.views(image.file, [View(*s.fitting) for s in content.searchers])
        return await nearest(content, lambda s, k: s.search(s.embed_fitted(fitted[k]), top, conditions, offset))

    @app.post("/api/search/vector")
    async def search_by_vector(
        body: Vector, top: Top = 12, label: LabelQuery = None, filters: Filters = None, offset: Offset = 0
    ) -> Answer:
        """The images nearest to a vector from the same encoder, for each run."""
        vector, conditions = np.array(body.vector), filters_of(filters, label)
        return await nearest(current.content, lambda s, _: s.search(s.unit(vector), top, conditions, offset))

    @app.get("/api/search")
    async def more_like_this(
        like: Annotated[int | None, Query(ge=0, le=LARGEST, description="the id of an image")] = None,
        text: Annotated[str | None, Query(min_length=1, max_length=1000, description="instead of an image")] = None,
        run: Place = 0,
        top: Top = 12,
        label: LabelQuery = None,
        filters: Filters = None,
        offset: Offset = 0,
    ) -> Answer:
        """The images nearest to an image of the index, without the image itself, or to a text, for each run."""
        start = time.perf_counter()
        content, conditions = current.content, filters_of(filters, label)
        if (like is None) == (text is None):
            raise HTTPException(422, "pass like, the id of an image, or text")
        if text is not None:
            return await nearest(content, lambda s, _: s.search(s.embed_text(text), top, conditions, offset))
        asked, wanted = searcher(content, run).catalogue, int(like or 0)

        def search_runs() -> tuple[Item | None, list[Found]]:
            key, item = asked.key_of(wanted), asked.items([wanted]).get(wanted)
            if key is None or item is None:
                return None, []
            ids = [s.catalogue.find(key) for s in content.searchers]
            near = zip(ids, content.searchers)
            hits = [None if image is None else s.like(image, top, conditions, offset) for image, s in near]
            return item, [_found(name, of_run) for name, of_run in zip(content.names, hits)]

        item, runs = await on(searching, search_runs)
        if item is None:
            raise HTTPException(404, "no such image in this index")
        return Answer(query=Image(**item._asdict()), runs=runs, seconds=time.perf_counter() - start)

    for path, (name, kind) in PAGE.items():
        app.add_api_route(path, _asset(name, kind), include_in_schema=False)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(UploadError)
    async def refused_upload(_: Request, error: UploadError) -> JSONResponse:
        return JSONResponse({"error": error.reason}, error.status, {"retry-after": "2"} if error.status == 503 else None)

    @app.exception_handler(sqlite3.Error)
    async def unreadable(_: Request, error: sqlite3.Error) -> JSONResponse:
        return JSONResponse({"error": f"the index cannot be read ({error}): try again later"}, 503, {"retry-after": "2"})

    @app.exception_handler(UnavailableError)
    async def unavailable(_: Request, error: UnavailableError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 503, {"retry-after": "2"})

    @app.exception_handler(InputError)
    async def refused_input(_: Request, error: InputError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "the server failed to answer: see its messages"}, 500)  # where the error is shown too

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = " ".join(str(part) for part in first["loc"][1:]) or "the request"
        return JSONResponse({"error": f"{field}: {first['msg']}"}, 422)

    return Guard(app, access)


def _found(name: str, hits: list[Hit] | None) -> Found:
    results = [Result(**hit._asdict()) for hit in hits or []]
    return Found(name=name, known=hits is not None, results=results)


def _asset(name: str, kind: str) -> Callable[[], Any]:
    content = files("xbm_app.serve").joinpath("page", name).read_bytes()

    async def asset() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8")

    return asset


def _stride(count: int) -> int:
    """A step that visits all `count` positions before it repeats and keeps adjacent ones apart."""
    stride = max(1, round(count * 0.618))
    while gcd(stride, max(1, count)) != 1:
        stride += 1
    return stride


# ------------------------------------------------------------------ the process


def serve(
    indexes: Sequence[str | Path],
    host: str,
    port: int,
    allowed: Sequence[str] = (),
    token: str | None = None,
    encoder: str | None = None,
) -> None:
    """Serves until Ctrl-C or SIGTERM; requests in progress are still answered, for some seconds."""
    own = None if encoder is None else OwnEncoder(encoder)
    access = access_to(host, allowed, token)
    with listen(host, port) as listener, Decoders() as decoders:
        decoders.start()
        current = Current([Searcher(index, encoder=own, hold=True) for index in indexes])
        server = Server(configured(create_app(current, access, decoders)), at_end=decoders.close)
        expect_signals()
        with quickest_threads(current.content.searchers[0].model, batch=1), current.refreshed():
            print(f"Open {address(host, listener.getsockname()[1], access.token)} (press Ctrl-C to stop)", flush=True)
            server.run(sockets=[listener])
    print("stopped", flush=True)
