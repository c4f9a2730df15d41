import contextlib
import io
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pymilvus
import pytest
from PIL import Image
from pydantic import BaseModel
from starlette.testclient import TestClient

from tests.xbm_app.serve.bombs import jpeg_of_scans, png_of_zeros, text_named_jpg
from xbm.errors import InputError
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update_embeddings
from xbm_app.serve import server
from xbm_app.serve.access import access_to
from xbm_app.serve.connections import configured
from xbm_app.serve.server import Current, _stride, create_app


@pytest.fixture(scope="module")
def client(searchers, decoders):
    return TestClient(
        create_app(Current(searchers), access_to("127.0.0.1", [], None), decoders), base_url="http://127.0.0.1:8000"
    )


@pytest.fixture(scope="module")
def alone(searchers, decoders):
    return TestClient(
        create_app(Current(searchers[:1]), access_to("127.0.0.1", [], None), decoders), base_url="http://127.0.0.1:8000"
    )


def post(client, content, name="photo.png", **query):
    return client.post("/api/search", files={"image": (name, content)}, params=query)


def test_health_and_what_there_is(client):
    assert client.get("/api/health").json()["status"] == "ok"
    about = client.get("/api/about").json()
    assert [run["images"] for run in about["runs"]] == [72, 72] and about["labels"] == 12
    assert about["runs"][0]["kind"] == "exact" and about["most_bytes"] == 20_000_000


def test_an_upload_finds_itself_by_both_runs(client, searchers, own_photos):
    content = (own_photos / "class_03" / "2.png").read_bytes()
    answer = post(client, content, top=5).json()
    assert answer["query"] is None and len(answer["runs"]) == 2
    first = answer["runs"][0]["results"]
    assert len(first) == 5 and first[0]["path"] == "class_03/2.png" and first[0]["similarity"] == pytest.approx(1, abs=1e-5)
    for searcher, found in zip(searchers, answer["runs"]):
        wanted = searcher.search(searcher.embed(searcher.open(own_photos / "class_03" / "2.png")), 5)
        assert [each["id"] for each in found["results"]] == [hit.id for hit in wanted]


def test_more_like_this_follows_the_same_image_into_the_other_run(client, searchers):
    image = searchers[1].catalogue.find(("class_05/1.png", ""))
    answer = client.get("/api/search", params={"like": image, "run": 1, "top": 9}).json()
    assert answer["query"]["path"] == "class_05/1.png" and [len(run["results"]) for run in answer["runs"]] == [9, 9]
    for searcher, found in zip(searchers, answer["runs"]):
        own = searcher.catalogue.find(("class_05/1.png", ""))
        assert [each["id"] for each in found["results"]] == [hit.id for hit in searcher.like(own, 9)]


def test_an_image_that_the_other_run_lacks_is_said_to_be_unknown_there(client, searchers, monkeypatch):
    monkeypatch.setattr(searchers[1].catalogue, "find", lambda key: None)
    one, other = client.get("/api/search", params={"like": int(searchers[0].ids[0])}).json()["runs"]
    assert one["known"] and len(one["results"]) == 12 and not other["known"] and other["results"] == []


def test_a_label_narrows_search_and_gallery(client):
    found = client.get("/api/search", params={"like": 1, "label": "class_07"}).json()["runs"][0]["results"]
    assert len(found) == 6 and {each["label"] for each in found} == {"class_07"}
    page = client.get("/api/images", params={"label": "class_07", "limit": 4}).json()
    assert page["total"] == 6 and {each["label"] for each in page["images"]} == {"class_07"}
    assert client.get("/api/images", params={"label": "nobody"}).json() == {"images": [], "total": 0}


def test_labels_are_found_by_a_part_of_their_name(client):
    assert [each["label"] for each in client.get("/api/labels", params={"contains": "CLASS_1"}).json()["labels"]] == [
        "class_10",
        "class_11",
    ]
    assert len(client.get("/api/labels", params={"limit": 3}).json()["labels"]) == 3


def test_the_gallery_shows_every_image_once_before_it_starts_over(client):
    pages = [client.get("/api/images", params={"offset": k, "limit": 24}).json()["images"] for k in (0, 24, 48, 72)]
    assert len({each["id"] for page in pages[:3] for each in page}) == 72 and pages[3] == pages[0]
    assert len({each["label"] for each in pages[0]}) > 6  # mixed


@pytest.mark.parametrize("count", [1, 2, 3, 7, 24, 72, 1000, 5007])
def test_the_order_of_the_gallery_visits_every_place(count):
    assert len({k * _stride(count) % count for k in range(count)}) == count


def test_thumbnails(client, searchers):
    answer = client.get(f"/api/thumbnails/0/{searchers[0].ids[0]}")
    assert answer.headers["content-type"] == "image/webp" and Image.open(io.BytesIO(answer.content)).size == (16, 16)
    assert client.get("/api/thumbnails/0/999999").status_code == 404


def test_what_cannot_be_searched_with_is_one_sentence(client, tmp_path):
    for content, name, status, words in [
        (text_named_jpg(tmp_path).read_bytes(), "letter.jpg", 415, "not an image"),
        (png_of_zeros(10_000, 10_000), "bomb.png", 413, "at most 50 million"),
        (b"\xff" * 30_000_000, "large.png", 413, "larger than 20 MB"),
        (png_of_zeros(300, 300)[:-40], "cut.png", 422, "damaged"),
    ]:
        answer = post(client, content, name)
        assert answer.status_code == status and words in answer.json()["error"], answer.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/search?like=99999", 404),
        ("/api/search?like=-1", 422),
        ("/api/search?like=x", 422),
        ("/api/search?like=1&top=0", 422),
        ("/api/search?like=99999999999999999999999", 422),
        ("/api/search?like=1&label=" + "x" * 400, 422),
        ("/api/search", 422),
        ("/api/thumbnails/0/..%2f..%2fetc%2fpasswd", 404),
        ("/api/thumbnails/7/1", 422),
        ("/../../etc/passwd", 404),
        ("/page/app.js", 404),
        ("/docs", 404),
    ],
)
def test_bad_requests(client, path, status):
    answer = client.get(path)
    assert answer.status_code == status and list(answer.json()) == ["error"]


@pytest.mark.parametrize(
    "body", [b"--y\r\n", b"--x\r\nno header\r\n\r\na\r\n--x--\r\n", b"--x\r\nA: b\r\n\r\na\r\n--xz", b"\0"]
)
def test_a_malformed_body_is_refused_and_leaves_no_line_in_the_log(client, caplog, body):
    configured(client.app)
    answer = client.post("/api/search", content=body, headers={"content-type": "multipart/form-data; boundary=x"})
    assert answer.status_code in (400, 422) and list(answer.json()) == ["error"]
    assert [record for record in caplog.records if "multipart" in record.name] == []


def test_a_filter_that_fits_no_value_of_its_column_is_a_422(tmp_path, decoders):
    pq.write_table(pa.table({"embedding": [[1.0, 0.0], [0.0, 1.0]], "when": ["2024-01-01", None]}), tmp_path / "rows.parquet")
    update_embeddings(tmp_path / "rows.parquet", tmp_path / "index", None, pytest.fail)
    current = Current([Searcher(tmp_path / "index", hold=True)])
    asking = TestClient(create_app(current, access_to("127.0.0.1", [], None), decoders), base_url="http://127.0.0.1:8000")
    for path in ("/api/search?like=1&", "/api/images?"):
        assert asking.get(f"{path}filter=when>=2024-01-01").status_code == 200
        answer = asking.get(f"{path}filter=when>=2024")
        assert answer.status_code == 422 and "texts only" in answer.json()["error"]


def test_a_lost_milvus_is_a_503_as_json_and_heals_by_itself(tmp_path, decoders, monkeypatch):
    where = f"milvus:{tmp_path / 'index.db'}"
    np.savez(tmp_path / "rows.npz", embeddings=np.eye(4), price=np.arange(4), color=["red", "blue", "red", "blue"])
    update_embeddings(tmp_path / "rows.npz", where, None, pytest.fail)
    searcher = Searcher(where, hold=True)
    app = create_app(Current([searcher]), access_to("127.0.0.1", [], None), decoders)
    asking = TestClient(app, base_url="http://127.0.0.1:8000")
    image = asking.get("/api/images").json()["images"][0]["id"]
    paths = [f"/api/search?like={image}", "/api/images?filter=path>a", f"/api/thumbnails/0/{image}"]

    def lost(*_, **__):
        raise pymilvus.exceptions.MilvusException(message="the engine is gone")

    with monkeypatch.context() as patch:
        patch.setattr(pymilvus, "MilvusClient", lost)
        searcher.catalogue.close()  # the connection is cut
        for path in paths:
            answer = asking.get(path)
            assert answer.status_code == 503 and "does not answer" in answer.json()["error"] and answer.headers["retry-after"]
        assert asking.get("/api/health").status_code == asking.get("/api/about").status_code == 200
    assert asking.get(paths[0]).json()["runs"][0]["results"]
    for misfit in ("price=red", "color<3"):
        assert asking.get(f"/api/images?filter={misfit}").status_code == 422
    assert asking.get("/api/images?filter=price=9").json()["total"] == 0


def test_a_wrong_method_is_refused_as_json(client):
    for ask in (client.put, client.delete, client.options):
        answer = ask("/api/search")
        assert answer.status_code == 405 and list(answer.json()) == ["error"]


def test_the_second_run_is_not_there_unless_it_was_given(alone):
    assert alone.get("/api/search?like=1&run=1").status_code == 404
    assert len(alone.get("/api/search?like=1").json()["runs"]) == 1


def test_the_name_of_an_upload_is_never_used(client, own_photos):
    content = (own_photos / "class_03" / "2.png").read_bytes()
    assert post(client, content, "../../../etc/passwd").status_code == 200


def test_the_page_is_served_with_what_it_needs_and_nothing_from_elsewhere(client):
    for path, kind in (("/", "text/html"), ("/app.js", "text/javascript"), ("/app.css", "text/css")):
        answer = client.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
        assert "http://" not in answer.text and "https://" not in answer.text and "//cdn" not in answer.text


@pytest.mark.parametrize("work", ["catalogue.thumbnail", "catalogue.key_of", "catalogue.items", "embed_fitted"])
def test_an_index_that_cannot_be_read_is_a_503_and_any_other_failure_a_500_as_json(searchers, decoders, monkeypatch, work):
    client = TestClient(
        create_app(Current(searchers[:1]), access_to("127.0.0.1", [], None), decoders),
        base_url="http://localhost",
        raise_server_exceptions=False,
    )
    asked = {
        "catalogue.thumbnail": lambda: client.get("/api/thumbnails/0/1"),
        "catalogue.key_of": lambda: client.get("/api/search?like=1"),
        "catalogue.items": lambda: client.get("/api/images"),
        "embed_fitted": lambda: post(client, png_of_zeros(9, 9)),
    }[work]
    for error, status, words in [
        (sqlite3.OperationalError("database is locked"), 503, "locked"),
        (KeyError("x"), 500, "failed"),
    ]:

        def failing(*_, error=error):
            raise error

        with monkeypatch.context() as patch:
            owner, _, name = work.rpartition(".")
            patch.setattr(getattr(searchers[0], owner) if owner else searchers[0], name, failing)
            answer = asked()
        assert answer.status_code == status and list(answer.json()) == ["error"] and words in answer.json()["error"]
    assert asked().status_code == 200


def test_a_server_with_too_many_searches_waiting_says_so(client, monkeypatch):
    monkeypatch.setattr(server, "MOST_PENDING", 0)
    answer = client.get("/api/search?like=1")
    assert answer.status_code == 503 and "busy" in answer.json()["error"] and answer.headers["retry-after"] == "2"
    assert client.get("/api/health").status_code == 200


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two_indexes_can_be_shown(searchers, count):
    with pytest.raises(InputError, match="or two to compare, got"):
        Current((searchers * 2)[:count])


def test_the_description_names_every_answer_and_every_refusal(searchers, decoders):
    client = TestClient(create_app(Current(searchers), access_to("127.0.0.1", [], None), decoders), base_url="http://localhost")
    description = client.get("/api/openapi.json").json()
    models = {name: kind for name, kind in vars(server).items() if isinstance(kind, type) and issubclass(kind, BaseModel)}
    own = {name for name, kind in models.items() if kind.__module__ == server.__name__}
    assert own <= description["components"]["schemas"].keys() and len(own) > 8
    assert description["paths"].keys() == {
        "/api/health", "/api/about", "/api/labels", "/api/images", "/api/thumbnails/{run}/{image}", "/api/search",
        "/api/search/vector",
    }  # fmt: skip
    for path, methods in description["paths"].items():
        for operation in methods.values():
            assert operation["description"], path
            refusals = {status: each for status, each in operation["responses"].items() if status != "200"}
            assert {"400", "401", "404", "413", "415", "422", "503"} <= refusals.keys()
            for each in refusals.values():
                assert each["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}


# ------------------------------------------------------------------ the process


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_it_still_answers_who_is_being_served(searchers, own_photos, end):
    command = [sys.executable, "-m", "xbm", "serve", str(searchers[0].folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline()).group(1))
        content = (own_photos / "class_03" / "2.png").read_bytes()
        body = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + content + b"\r\n--x--\r\n"
        head = f"POST /api/search HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        with socket.create_connection(("127.0.0.1", port)) as caller:
            caller.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:200])
            time.sleep(1.5)  # so that it is being served, on a busy machine too
            process.send_signal(end)
            time.sleep(0.5)
            caller.sendall(body[200:])
            caller.settimeout(60)
            answer = b"".join(iter(lambda: caller.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200") and b"class_03/2.png" in answer
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, "stopped\n", "")
    finally:
        process.kill()
        process.wait()


STUCK = """
import sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from xbm_app.search.searcher import Searcher
from xbm_app.serve import connections
from xbm_app.serve.server import serve
connections.GRACE = 1
Searcher.like = lambda *_: time.sleep(1000)  # as a search that never ends
if __name__ == "__main__":
    serve([Path(sys.argv[1])], "127.0.0.1", 0)
"""


@pytest.mark.slow
def test_it_ends_within_its_grace_period_whatever_it_is_doing(searchers, tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK.format(path=sys.path))
    command = [sys.executable, tmp_path / "stuck.py", searchers[0].folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline()).group(1))
        bomb = jpeg_of_scans(7000, 1000)
        form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n' + bomb + b"\r\n--x--\r\n"
        upload = "POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        requests = [
            b"GET /api/search?like=1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
            f"{upload}Content-Length: {len(form)}\r\n\r\n".encode() + form,
            f"{upload}Content-Length: 9999\r\n\r\n".encode(),
            b"GET / HT",
        ]
        with contextlib.ExitStack() as opened:
            callers = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in requests]
            for caller, request in zip(callers, requests):
                caller.sendall(request)
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            begun = time.monotonic()
            process.wait(60)
            assert time.monotonic() - begun < 10  # 2 s, and what a busy machine adds
            callers[0].settimeout(5)
            answer = callers[0].recv(65536)
        assert answer.startswith(b"HTTP/1.1 503 ") and b'{"error": "the server is stopping"}' in answer
        out, err = process.communicate()
        assert process.returncode == 0 and out == "stopped\n" and "Traceback" not in err
    finally:
        process.kill()
        process.wait()
