"""The search server: its API, its page, and the process that serves them. Nothing that a client sends is used as a path."""

import asyncio
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from math import gcd
from pathlib import Path
from typing import Annotated, Any, TypeVar

import PIL.Image
import uvicorn
from fastapi import FastAPI, File, Query, Request, UploadFile
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from xbm import __version__
from xbm.errors import InputError
from xbm_app.data.parallel import default_workers
from xbm_app.search.searcher import Hit, Searcher, quickest_threads
from xbm_app.serve.access import Access, Guard, access_to, address, listen
from xbm_app.serve.uploads import MOST_BYTES, MOST_PIXELS, open_upload

T = TypeVar("T")
PAGE = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"), "/app.css": ("app.css", "text/css")}
LARGEST = 2**63 - 1  # largest id in SQLite
PATIENCE = 10  # seconds for requests in progress when the server stops

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
    kind: str = Field(description="exact or compressed")
    recall: float = Field(description="recall@10 against exact search, measured when the index was made")


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


class Images(BaseModel):
    images: list[Image]
    total: int = Field(description="number of images to page through")


class Result(Image):
    similarity: float = Field(description="cosine similarity to the query")


class Found(BaseModel):
    name: str
    known: bool = Field(description="false if this run's index does not contain the query image")
    results: list[Result] = Field(description="nearest first")


class Answer(BaseModel):
    query: Image | None = Field(description="the query image if it is in the index; null for an upload")
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
    422: {"model": Error, "description": "an invalid value, or a damaged image"},
}
Top = Annotated[int, Query(ge=1, le=100, description="number of results")]
LabelQuery = Annotated[str | None, Query(max_length=300, description="search only images with this label")]
Place = Annotated[int, Query(ge=0, le=1, description="position of the run in /api/about")]


def create_app(searchers: Sequence[Searcher], access: Access) -> ASGIApp:
    """The application for one index, or for two to compare.

    Images are decoded by a few threads. Model and search run on a single thread, since their libraries use all cores
    themselves.
    """
    if not 1 <= len(searchers) <= 2:
        raise InputError(f"give one index, or two to compare, got {len(searchers)}")
    app = FastAPI(
        title="xbm", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", responses=REFUSALS
    )
    decoding, searching = ThreadPoolExecutor(default_workers(), "decode"), ThreadPoolExecutor(1, "search")
    labels, names = searchers[0].catalogue.labels(), distinct_names(searchers)

    async def on(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def searcher(run: int) -> Searcher:
        if run >= len(searchers):
            raise HTTPException(404, "there is only one run: leave run at 0")
        return searchers[run]

    @app.get("/api/health")
    async def health() -> Health:
        """Whether the server is running; needs no token."""
        return Health(status="ok", version=__version__)

    @app.get("/api/about")
    async def about() -> About:
        """What can be searched, and the limits of uploads."""
        runs = [
            Run(name=n, images=len(s.ids), dim=s.model.dim, kind=s.neighbours.kind, recall=s.catalogue.get("recall@10", 1.0))
            for n, s in zip(names, searchers)
        ]
        return About(runs=runs, labels=len(labels), most_bytes=MOST_BYTES, most_pixels=MOST_PIXELS)

    @app.get("/api/labels")
    async def find_labels(
        contains: Annotated[str, Query(max_length=300)] = "", limit: Annotated[int, Query(ge=1, le=500)] = 50
    ) -> Labels:
        """Labels that contain some text."""
        part = contains.casefold()
        matching = [Label(label=label, images=count) for label, count in labels if part in label.casefold()]
        return Labels(labels=matching[:limit])

    @app.get("/api/images")
    async def browse(
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=100)] = 24,
        label: LabelQuery = None,
    ) -> Images:
        """Images to start from, in a mixed order that starts over at the end."""
        first = searchers[0]

        def page() -> Images:
            ids = first.ids if label is None else first.catalogue.ids(label)
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
        webp = searcher(run).catalogue.thumbnail(image)
        if webp is None:
            raise HTTPException(404, "no such image in this index")
        return Response(webp, media_type="image/webp", headers={"cache-control": "private, max-age=3600"})

    @app.post("/api/search")
    async def search(image: Annotated[UploadFile, File()], top: Top = 12, label: LabelQuery = None) -> Answer:
        """The images nearest to an uploaded one, for each run."""
        start = time.perf_counter()
        content = await image.read()
        sides = {s.model.decoded_side for s in searchers}
        opened = await on(decoding, lambda: {side: open_upload(content, side) for side in sides})
        hits = await on(searching, lambda: [s.search(s.embed(opened[s.model.decoded_side]), top, label) for s in searchers])
        runs = [_found(name, of_run) for name, of_run in zip(names, hits)]
        return Answer(query=None, runs=runs, seconds=time.perf_counter() - start)

    @app.get("/api/search")
    async def more_like_this(
        like: Annotated[int, Query(ge=0, le=LARGEST, description="the id of an image")],
        run: Place = 0,
        top: Top = 12,
        label: LabelQuery = None,
    ) -> Answer:
        """The images nearest to an image of the index, without the image itself, for each run."""
        start = time.perf_counter()
        catalogue = searcher(run).catalogue
        key, item = catalogue.key_of(like), catalogue.items([like]).get(like)
        if key is None or item is None:
            raise HTTPException(404, "no such image in this index")

        def search_runs() -> list[Found]:
            ids = [s.catalogue.find(key) for s in searchers]
            hits = [None if image is None else s.like(image, top, label) for image, s in zip(ids, searchers)]
            return [_found(name, of_run) for name, of_run in zip(names, hits)]

        runs = await on(searching, search_runs)
        return Answer(query=Image(**item._asdict()), runs=runs, seconds=time.perf_counter() - start)

    for path, (name, kind) in PAGE.items():
        app.add_api_route(path, _asset(name, kind), include_in_schema=False)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = " ".join(str(part) for part in first["loc"][1:]) or "the request"
        return JSONResponse({"error": f"{field}: {first['msg']}"}, 422)

    return Guard(app, access)


def distinct_names(searchers: Sequence[Searcher]) -> list[str]:
    """The names of the runs, with their parent folders if two runs have the same name."""
    names = [s.name for s in searchers]
    if len(set(names)) < len(names):
        names = ["/".join(s.catalogue.get("run").split("/")[-2:]) for s in searchers]
    return names


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


def serve(folders: Sequence[Path], host: str, port: int, allowed: Sequence[str] = (), token: str | None = None) -> None:
    """Serves until Ctrl-C or SIGTERM; requests in progress are still answered."""
    warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)  # uploads have their own limit
    access = access_to(host, allowed, token)
    with listen(host, port) as listener:
        searchers = [Searcher(folder) for folder in folders]
        app = create_app(searchers, access)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=PATIENCE, lifespan="off"
        )
        # uvicorn shuts down cleanly and then raises the signal again, which would kill the process without these handlers.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        with quickest_threads(searchers[0].model, batch=1):
            print(f"Open {address(host, listener.getsockname()[1], access.token)} (press Ctrl-C to stop)", flush=True)
            uvicorn.Server(config).run(sockets=[listener])
    print("stopped", flush=True)
