"""The search server: its API, its page, and the process that serves them. Nothing that a client sends is used as a path."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from math import gcd
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from fastapi import FastAPI, File, Query, Request, UploadFile
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from xbm import __version__
from xbm.errors import InputError
from xbm_app.search.encoders import OwnEncoder
from xbm_app.search.filters import filters_of
from xbm_app.search.rows import Item, UnavailableError
from xbm_app.search.searcher import Hit, Searcher, quickest_threads
from xbm_app.serve.access import Access, Guard, access_to, address, listen
from xbm_app.serve.connections import Server, configured, expect_signals
from xbm_app.serve.content import Content, Current
from xbm_app.serve.schema import About, Answer, Error, Found, Health, Image, Images, Label, Labels, Result, Run, Vector
from xbm_app.serve.uploads import MOST_BYTES, MOST_PIXELS, Decoders, UploadError, View

T = TypeVar("T")
PAGE = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"), "/app.css": ("app.css", "text/css")}
LARGEST = 2**63 - 1  # largest id in SQLite
MOST_PENDING = 128  # searches that wait for their turn; further ones are refused at once
BUSY = "the server is busy: try again in a few seconds"

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
