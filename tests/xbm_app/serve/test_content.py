"""An index that is updated while it is served: answers come from its old content, then from its new one, never from between."""

import io
import shutil
import threading

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.tiny import xbm
from xbm_app.search.catalogue import FILE
from xbm_app.search.searcher import Searcher
from xbm_app.search.update import update
from xbm_app.serve.access import access_to
from xbm_app.serve.server import Current, create_app


@pytest.fixture
def photos(own_photos, tmp_path):
    return shutil.copytree(own_photos, tmp_path / "photos")


@pytest.fixture
def index(searchable, photos, tmp_path):
    out = tmp_path / "index"
    assert xbm("index", searchable, photos, "--out", out).code == 0
    return out


@pytest.fixture
def current(index):
    return Current([Searcher(index, hold=True)])


@pytest.fixture
def client(current, decoders):
    return TestClient(create_app(current, access_to("127.0.0.1", [], None), decoders), base_url="http://localhost")


def new_picture(folder):
    """A picture unlike the others, added to the folder."""
    image = Image.fromarray(np.random.default_rng(7).integers(0, 256, (16, 16, 3), np.uint8))
    image.save(folder / "class_00" / "new.png")
    return (folder / "class_00" / "new.png").read_bytes()


def nearest(client, content):
    return client.post("/api/search", files={"image": content}, params={"top": 3}).json()["runs"][0]["results"]


def repaint(photos):
    """Changes every picture, so that every row of the index is replaced."""
    for path in photos.rglob("*.png"):
        image = Image.open(path).convert("RGB")
        image.putpixel((0, 0), (1, 2, 3))
        image.save(path, compress_level=0)


def test_reindexing_under_load_gives_no_empty_answer_and_then_the_new_images(client, current, index, searchable, photos):
    before = (photos / "class_03" / "2.png").read_bytes()
    shown = [image["id"] for image in client.get("/api/images").json()["images"]]
    ended, answers, empty = threading.Event(), [], []

    def ask():
        while not ended.is_set():
            for image in shown[:4]:
                found = [
                    nearest(client, before),
                    client.get(f"/api/search?like={image}&top=3").json().get("runs", [{}])[0].get("results"),
                    client.get(f"/api/search?like={image}&top=3&label=class_03").json()["runs"][0]["results"],
                    client.get("/api/images").json()["images"],
                    client.get(f"/api/thumbnails/0/{image}").content,
                ]
                answers.extend(found)
                empty.extend(number for number, each in enumerate(found) if not each)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        repaint(photos)
        content = new_picture(photos)
        assert xbm("index", searchable, photos, "--out", index).code == 0
        assert nearest(client, content)[0]["similarity"] < 0.9999  # still as it was
    finally:
        ended.set()
        asking.join()
    assert len(answers) >= 20 and empty == []
    current.refresh()
    assert nearest(client, content)[0]["path"] == "class_00/new.png"
    assert client.get("/api/about").json()["runs"][0]["images"] == 73
    assert not {image["id"] for image in client.get("/api/images").json()["images"]} & set(shown)


def test_an_update_that_was_cut_off_is_not_shown_until_it_is_complete(client, current, index, searchable, photos):
    content = new_picture(photos)
    update(searchable, photos, index, pytest.fail, quiet=True)  # without its end, as if it had been killed
    current.refresh()
    assert client.get("/api/about").json()["runs"][0]["images"] == 72
    assert xbm("index", searchable, photos, "--out", index).code == 0
    current.refresh()
    assert nearest(client, content)[0]["path"] == "class_00/new.png"


def test_an_update_without_changes_is_not_loaded_again(current, index, searchable, photos):
    before = current.content
    assert xbm("index", searchable, photos, "--out", index).code == 0
    current.refresh()
    assert current.content is before


def test_an_index_that_was_deleted_is_shown_until_it_is_there_again(client, current, index, searchable, photos, capsys):
    shutil.rmtree(index)
    current.refresh()
    current.refresh()
    assert capsys.readouterr().err.count("note: still showing the index as it was: ") == 1
    assert len(nearest(client, (photos / "class_03" / "2.png").read_bytes())) == 3
    assert client.get("/api/thumbnails/0/1").status_code == 200
    content = new_picture(photos)
    assert xbm("index", searchable, photos, "--out", index).code == 0
    current.refresh()
    assert nearest(client, content)[0]["path"] == "class_00/new.png"


def test_a_catalogue_that_is_lost_is_a_503_as_json(client, current, index):
    current.content.searchers[0].catalogue._database.execute("COMMIT")
    (index / FILE).write_bytes(b"no longer a database" * 1000)
    for path in ("/api/search?like=1", "/api/images", "/api/thumbnails/0/1"):
        answer = client.get(path)
        assert answer.status_code == 503 and "the index cannot be read" in answer.json()["error"], path
    picture = io.BytesIO()
    Image.new("RGB", (20, 20)).save(picture, "PNG")
    assert client.post("/api/search", files={"image": picture.getvalue()}).status_code == 503
    assert client.get("/api/health").status_code == 200


def test_it_looks_for_updates_by_itself(current, index, searchable, photos, monkeypatch):
    monkeypatch.setattr("xbm_app.serve.server.LOOK_SECONDS", 0.02)
    new_picture(photos)
    switched = threading.Event()
    refresh = current.refresh
    monkeypatch.setattr(current, "refresh", lambda: (refresh(), len(current.content.searchers[0].ids) == 73 and switched.set()))
    with current.refreshed():
        assert xbm("index", searchable, photos, "--out", index).code == 0
        assert switched.wait(20)
