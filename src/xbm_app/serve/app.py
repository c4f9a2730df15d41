"""The web application: a page, and the API that it uses. Nothing that a client sends is ever taken for a path."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from math import gcd
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, File, Path, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from xbm import __version__
from xbm.errors import InputError
from xbm_app.data.parallel import default_workers
from xbm_app.search.searcher import Hit, Searcher
from xbm_app.serve.answers import About, Answer, Error, Found, Health, Image, Images, Label, Labels, Result, Run
from xbm_app.serve.guard import MOST_BYTES, Access, App, Guard
from xbm_app.serve.uploads import MOST_PIXELS, open_upload

T = TypeVar("T")
PAGE = {"/": ("index.html", "text/html"), "/app.js": ("app.js", "text/javascript"), "/app.css": ("app.css", "text/css")}
LARGEST = 2**63 - 1  # of an id, in SQLite
WRONG: dict[int | str, dict[str, Any]] = {
    400: {"model": Error, "description": "called by a wrong name, or not to be understood"},
    401: {"model": Error, "description": "a token is needed"},
    403: {"model": Error, "description": "sent by the page of another site"},
    404: {"model": Error, "description": "there is no such image"},
    413: {"model": Error, "description": "too large"},
    415: {"model": Error, "description": "not an image"},
    422: {"model": Error, "description": "a value that cannot be, or a damaged image"},
}
Top = Annotated[int, Query(ge=1, le=100, description="how many results")]
LabelQuery = Annotated[str | None, Query(max_length=300, description="search only images with this label")]
Place = Annotated[int, Query(ge=0, le=1, description="place of the run in /api/about")]


def create_app(searchers: Sequence[Searcher], access: Access) -> App:
    """The application for one index, or for two to compare.

    Pictures are decoded by a few threads; model and search run on one thread of their own, since the libraries below share
    their work among the cores themselves.
    """
    if not 1 <= len(searchers) <= 2:
        raise InputError(f"{len(searchers)} indexes cannot be shown: give one, or two to compare")
    app = FastAPI(
        title="xbm", version=__version__, docs_url=None, redoc_url=None, openapi_url="/api/openapi.json", responses=WRONG
    )
    decoding, searching = ThreadPoolExecutor(default_workers(), "decode"), ThreadPoolExecutor(1, "search")
    labels, names = searchers[0].catalogue.labels(), distinct_names(searchers)

    async def on(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def searcher(run: int) -> Searcher:
        if run >= len(searchers):
            raise HTTPException(404, "there is only one run here: leave run at 0")
        return searchers[run]

    @app.get("/api/health")
    async def health() -> Health:
        """Whether the server is up; needs no token."""
        return Health(status="ok", version=__version__)

    @app.get("/api/about")
    async def about() -> About:
        """What can be searched, and what may be uploaded."""
        runs = [
            Run(
                name=name,
                images=len(s.ids),
                dim=s.model.dim,
                kind=s.neighbours.kind,
                recall=s.catalogue.get("recall@10", 1.0),
            )
            for name, s in zip(names, searchers)
        ]
        return About(runs=runs, labels=len(labels), most_bytes=MOST_BYTES, most_pixels=MOST_PIXELS)

    @app.get("/api/labels")
    async def find_labels(
        contains: Annotated[str, Query(max_length=300)] = "", limit: Annotated[int, Query(ge=1, le=500)] = 50
    ) -> Labels:
        """Labels that contain some text."""
        wanted = contains.casefold()
        found = [Label(label=label, images=count) for label, count in labels if wanted in label.casefold()]
        return Labels(labels=found[:limit])

    @app.get("/api/images")
    async def browse(
        offset: Annotated[int, Query(ge=0, le=LARGEST)] = 0,
        limit: Annotated[int, Query(ge=1, le=100)] = 24,
        label: LabelQuery = None,
    ) -> Images:
        """Images to begin with, in an order that mixes them; past the end it starts over."""
        first = searchers[0]

        def page() -> Images:
            ids = first.ids if label is None else first.catalogue.ids(label)
            count = len(ids)
            stride = _stride(count)
            some = [int(ids[(offset + k) * stride % count]) for k in range(min(limit, count))]
            items = first.catalogue.items(some)
            images = [Image(**items[each]._asdict()) for each in some if each in items]
            return Images(images=images, total=count)

        return await on(searching, page)

    @app.get("/api/thumbnails/{run}/{image}", response_class=Response, responses={200: {"content": {"image/webp": {}}}})
    async def thumbnail(run: Annotated[int, Path(ge=0, le=1)], image: Annotated[int, Path(ge=0, le=LARGEST)]) -> Response:
        """An image of an index, made small."""
        webp = searcher(run).catalogue.thumbnail(image)
        if webp is None:
            raise HTTPException(404, "there is no such image in this index")
        return Response(webp, media_type="image/webp", headers={"cache-control": "private, max-age=3600"})

    @app.post("/api/search")
    async def search(image: Annotated[UploadFile, File()], top: Top = 12, label: LabelQuery = None) -> Answer:
        """The images nearest to an uploaded one, by each run."""
        begun = time.perf_counter()
        content = await image.read()
        sides = {s.model.decoded_side for s in searchers}
        opened = await on(decoding, lambda: {side: open_upload(content, side) for side in sides})
        found = await on(searching, lambda: [s.search(s.embed(opened[s.model.decoded_side]), top, label) for s in searchers])
        runs = [_found(name, hits) for name, hits in zip(names, found)]
        return Answer(query=None, runs=runs, seconds=time.perf_counter() - begun)

    @app.get("/api/search")
    async def more_like_this(
        like: Annotated[int, Query(ge=0, le=LARGEST, description="the id of an image")],
        run: Place = 0,
        top: Top = 12,
        label: LabelQuery = None,
    ) -> Answer:
        """The images nearest to one of the index, itself left out, by each run."""
        begun = time.perf_counter()
        asked = searcher(run).catalogue
        key, item = asked.key_of(like), asked.items([like]).get(like)
        if key is None or item is None:
            raise HTTPException(404, "there is no such image in this index")

        def look() -> list[Found]:
            own = [s.catalogue.find(key) for s in searchers]
            found = [None if each is None else s.like(each, top, label) for each, s in zip(own, searchers)]
            return [_found(name, hits) for name, hits in zip(names, found)]

        runs = await on(searching, look)
        return Answer(query=Image(**item._asdict()), runs=runs, seconds=time.perf_counter() - begun)

    for address, (name, kind) in PAGE.items():
        app.add_api_route(address, _asset(name, kind), include_in_schema=False)

    @app.exception_handler(HTTPException)
    async def told(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = " ".join(str(each) for each in first["loc"][1:]) or "the request"
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)

    return Guard(app, access)


def distinct_names(searchers: Sequence[Searcher]) -> list[str]:
    """The runs' names; with their folders' where two runs are called the same."""
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
    """A step that visits every one of `count` places before it repeats, neighbours far apart."""
    stride = max(1, round(count * 0.618))
    while gcd(stride, max(1, count)) != 1:
        stride += 1
    return stride
