"""`xbm serve`: a web page to search with."""

from pathlib import Path
from typing import Annotated

import typer


def serve(
    indexes: Annotated[list[Path], typer.Argument(help="an index, or the run folder it lies in; two are compared")],
    host: Annotated[str, typer.Option(help="where to listen; anything but this machine asks for a token")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one")] = 8000,
    allow_host: Annotated[list[str] | None, typer.Option(help="a further name that the server may be called by")] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="XBM_TOKEN", help="asked for with every request; made up where one is needed"),
    ] = None,
) -> None:
    """Search with a web page: drop, paste or pick an image, or click one; two indexes are compared side by side.

    The API is at /api/search, its description at /api/openapi.json. Nothing is fetched from the network.

    Example: `xbm serve runs/2026-01-31_120000_cars` · `xbm serve with_memory without_memory --port 9000`
    """
    from xbm_app.extras import require

    require("search", "faiss", "fastapi", "uvicorn", "python_multipart")
    from xbm_app.serve.server import serve as run

    run(indexes, host, port, allow_host or (), token)
