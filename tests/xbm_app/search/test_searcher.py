import re
import shutil
import time
from datetime import datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from xbm.errors import InputError, XbmError
from xbm_app.search.catalogue import Catalogue
from xbm_app.search.filters import filters_of
from xbm_app.search.searcher import (
    MOST,
    Hit,
    OwnEncoder,
    Searcher,
    find_index,
    quickest_threads,
    shown_path,
    write_results_page,
)
from xbm_app.search.update import Changes, update, update_embeddings
from xbm_app.train.load import Embedder, load


@pytest.fixture(scope="module")
def searcher(made_index):
    return Searcher(made_index)


def test_an_image_of_the_index_finds_itself_and_then_the_truly_nearest(searcher, own_photos):
    image = searcher.open(own_photos / "class_03" / "2.png")
    hits = searcher.search(searcher.embed(image), top=72)
    assert hits[0].path == "class_03/2.png" and hits[0].label == "class_03" and hits[0].similarity == pytest.approx(1, abs=1e-5)
    vectors = searcher.catalogue.vectors(np.array([hit.id for hit in hits]))
    assert np.allclose([hit.similarity for hit in hits], vectors @ searcher.embed(image)[0], atol=1e-5)
    assert [hit.similarity for hit in hits] == sorted((hit.similarity for hit in hits), reverse=True) and len(hits) == 72


def test_more_like_this_leaves_the_image_itself_out(searcher):
    first = searcher.ids[0].item()
    everything = searcher.search(searcher.catalogue.vectors(np.array([first])), 6)
    assert everything[0].id == first and searcher.like(first, 5) == everything[1:]
    assert len(searcher.like(first, 500)) == 71


def test_a_label_narrows_the_search(searcher):
    hits = searcher.like(searcher.ids[0].item(), 20, filters_of([], "class_07"))
    assert len(hits) == 6 and {hit.label for hit in hits} == {"class_07"}
    assert searcher.like(searcher.ids[0].item(), 20, filters_of([], "nobody")) == []


@pytest.mark.parametrize("top", [0, MOST + 1])
def test_no_or_too_many_results_are_refused(searcher, top):
    with pytest.raises(InputError, match="must be 1 to 1000"):
        searcher.like(1, top)


def test_it_needs_nothing_but_its_folder(made_index, own_photos, tmp_path):
    moved = Searcher(shutil.copytree(made_index, tmp_path / "elsewhere"))
    image = moved.open(own_photos / "class_00" / "0.png")
    assert moved.search(moved.embed(image), 1)[0].path == "class_00/0.png" and moved.name == "run"


def test_a_query_that_is_no_image_is_one_sentence(searcher, tmp_path):
    (tmp_path / "text.jpg").write_text("text")
    with pytest.raises(InputError, match=r"text.jpg cannot be read as an image"):
        searcher.open(tmp_path / "text.jpg")
    with pytest.raises(InputError, match="does not exist: give the path of an image"):
        searcher.open(tmp_path / "none.jpg")


def test_a_large_photograph_is_decoded_as_it_is_for_the_index(searcher, tmp_path):
    Image.effect_noise((900, 700), 80).convert("RGB").save(tmp_path / "big.jpg")
    side = searcher.model.decoded_side
    assert side == 32 and max(searcher.open(tmp_path / "big.jpg").size) < 900


def test_a_run_folder_stands_for_the_index_in_it(tmp_path):
    (tmp_path / "index").mkdir()
    assert find_index(tmp_path) == tmp_path
    (tmp_path / "index" / "index.sqlite").touch()
    assert find_index(tmp_path) == tmp_path / "index"


def test_an_index_without_images_says_so(tmp_path):
    Catalogue(tmp_path, write=True).close()
    with pytest.raises(InputError, match="contains no images yet"):
        Searcher(tmp_path)


def test_paths_are_shown_so_that_they_can_be_opened_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "photos", "a/b.png") == "photos/a/b.png"
    assert shown_path(tmp_path.parent / "other", "a.png") == str(tmp_path.parent / "other" / "a.png")


# ------------------------------------------------------------------ threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("quick", [1, 2])
def test_the_faster_number_is_chosen_and_given_back(searchable, monkeypatch, two_threads, quick):
    model = load(searchable, device="cpu")
    slowed = lambda self, views: time.sleep(0.001 if torch.get_num_threads() == quick else 0.1)  # noqa: E731
    monkeypatch.setattr(Embedder, "embed_views", slowed)
    with quickest_threads(model, batch=3) as chosen:
        assert chosen == quick == torch.get_num_threads()
    assert torch.get_num_threads() == 2


def test_one_thread_leaves_no_choice(searchable, monkeypatch):
    model = load(searchable, device="cpu")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(Embedder, "embed_views", lambda *_: pytest.fail("measured"))
    with quickest_threads(model, batch=3) as chosen:
        assert chosen == 1
    torch.set_num_threads(before)


# ------------------------------------------------------------------ encoders of the user's own


def test_a_text_finds_images_by_an_encoder_of_ones_own(own_encoder, colors, tmp_path):
    encoder = OwnEncoder(f"{own_encoder}:Encoder")
    assert update(encoder, colors, tmp_path / "index", pytest.fail, quiet=True) == Changes(new=4)
    searcher = Searcher(tmp_path / "index", encoder=encoder)
    assert [hit.path for hit in searcher.search(searcher.embed_text("red"), 2)] == ["photos/0.png", "photos/1.png"]
    assert [hit.path for hit in searcher.search(searcher.embed_text("red"), 1, filters_of(["price>=20"]))] == ["photos/3.png"]
    assert searcher.search(searcher.embed(Image.new("RGB", (9, 9), (0, 0, 99))), 1)[0].path == "photos/3.png"
    with pytest.raises(InputError, match="contains no model"):
        Searcher(tmp_path / "index").embed_text("red")
    with pytest.raises(InputError, match="was made by"):
        Searcher(tmp_path / "index", encoder=OwnEncoder(f"{own_encoder}:images_only"))


def test_encoders_that_do_not_fit_are_refused(own_encoder, colors, tmp_path):
    for name, says in {
        "toy": "module:object", "no_such_module:x": "no module", f"{own_encoder}:COLORS": "not a function",
        f"{own_encoder}:no": "not a function",
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=says):
            OwnEncoder(name)
    with pytest.raises(InputError, match="not finite"):
        update(OwnEncoder(f"{own_encoder}:broken"), colors, tmp_path / "index", pytest.fail, quiet=True)
    with pytest.raises(InputError, match="encode_text"):
        OwnEncoder(f"{own_encoder}:images_only").embed_text(["red"])


# ------------------------------------------------------------------ the page of `xbm search --sheet`


def test_the_page_shows_queries_and_results_and_fetches_nothing(made_index, own_photos, tmp_path):
    searcher = Searcher(made_index)
    image = searcher.open(own_photos / "class_01" / "0.png")
    hits = searcher.search(searcher.embed(image), 5)
    page = write_results_page(
        tmp_path / "new" / "s.html", "Sheet", [("a.png", image, hits)], searcher.catalogue.thumbnail
    ).read_text()
    assert page.count("<img") == 6 and page.count("data:image/webp;base64,") == 6
    assert [float(each) for each in re.findall(r"<b>([\d.]+)</b>", page)] == [round(hit.similarity, 3) for hit in hits]
    assert not re.findall(r"(?:src|href)=\"(?!data:)[^\"]*", page)


def test_what_comes_from_the_data_is_never_markup(tmp_path):
    hit = Hit(1, -0.5, "<b>bold</b>", "<script>.png")
    page = write_results_page(
        tmp_path / "s.html", "<i>", [("<u>", Image.new("RGB", (4, 4)), [hit])], lambda _: None
    ).read_text()
    assert "<b>bold" not in page and "<script>" not in page and "<u>" not in page and "−0.500" in page


def test_a_search_without_results_says_so(tmp_path):
    page = write_results_page(tmp_path / "s.html", "t", [("q", Image.new("RGB", (4, 4)), [])], lambda _: None).read_text()
    assert "nothing found" in page


@pytest.mark.parametrize(
    "returned", ["None", "[[1.0], [1.0, 2.0]]", "['a', 'b']", "[object(), object()]", "{}", "np.zeros((2, 0))"]
)
def test_what_an_encoder_returns_by_mistake_is_one_sentence(tmp_path, monkeypatch, returned):
    name = f"odd_{abs(hash(returned))}"
    (tmp_path / f"{name}.py").write_text(f"import numpy as np\ndef encode(images): return {returned}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match="must return an array"):
        OwnEncoder(f"{name}:encode").embed_views([np.zeros((9, 9, 3), np.uint8)] * 2)


def test_an_encoder_that_fails_is_named_with_the_place_in_its_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "failing_encoder.py").write_text("def encode(images):\n    raise KeyError('weights')\n")
    with pytest.raises(XbmError, match=r"failing_encoder.py, line 2: KeyError: 'weights'") as error:
        OwnEncoder("failing_encoder:encode").embed_views([np.zeros((9, 9, 3), np.uint8)])
    assert not isinstance(error.value, InputError)  # the server answers 500 and shows where
    (tmp_path / "broken_encoder.py").write_text("x = 1\ny = x.z\n")
    with pytest.raises(InputError, match=r"broken_encoder.py, line 2: AttributeError"):
        OwnEncoder("broken_encoder:y")


def test_a_text_or_filter_that_is_not_utf_8_is_refused(own_encoder):
    with pytest.raises(InputError, match="not UTF-8"):
        OwnEncoder(f"{own_encoder}:Encoder").embed_text(["\udcff"])
    for words in ((["label=\udcff"], None), ([], "\udcff"), (["\udcff=1"], None)):
        with pytest.raises(InputError, match="not UTF-8"):
            filters_of(*words)


@pytest.fixture
def kinds(tmp_path):
    """An index of vectors with ids of 19 digits, truth values, timestamps and words."""
    noon = datetime(2024, 1, 31, 12, tzinfo=timezone(timedelta(hours=2)))
    columns = {
        "number": [2**63 - 1, 2**62, 7], "flag": [True, False, None], "said": ["true", "false", "7"],
        "when": [noon, noon + timedelta(days=1), None], "empty": pa.array([None] * 3, pa.int64()),
    }  # fmt: skip
    vectors = pa.array(np.eye(3, dtype=np.float32).tolist(), pa.list_(pa.float32()))
    pq.write_table(pa.table({"embedding": vectors, **columns}), tmp_path / "rows.parquet")
    update_embeddings(tmp_path / "rows.parquet", tmp_path / "index", None, pytest.fail)
    return Searcher(tmp_path / "index")


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        (f"number={2**63 - 1}", [0]), (f"number>={2**62}", [0, 1]), ("flag=true", [0]), ("flag=False", [1]),
        ("flag!=true", [1, 2]), ("said=true", [0]), ("when>=2024-02-01", [1]), ("when>=2024-01-31 10:00", [0, 1]),
        ("when>2024-01-31T10:00:01", [1]), ("when<2024-02-01", [0]),
    ],
)  # fmt: skip
def test_large_ids_truth_values_and_times_are_found(kinds, condition, rows):
    filters = filters_of([condition])
    assert sorted(int(hit.path) for hit in kinds.search(np.eye(3)[0], 3, filters)) == rows
    assert (kinds.ids_of(filters) - kinds.ids[0]).tolist() == rows


@pytest.mark.parametrize(
    "condition", ["when>=2024", "number=red", "flag=yes", "empty=3", "empty<x", "number>=99999999999999999999"]
)
def test_a_value_of_another_kind_than_its_column_is_refused(kinds, condition):
    filters = filters_of([condition])
    for search in (
        lambda: kinds.search(np.eye(3)[0], 3, filters),
        lambda: kinds.like(1, 3, filters),
        lambda: kinds.ids_of(filters),
    ):
        with pytest.raises(InputError, match="no row meets"):
            search()


def test_a_value_of_the_right_kind_may_find_nothing(kinds):
    assert kinds.search(np.eye(3)[0], 3, filters_of(["number=8"])) == [] == kinds.ids_of(filters_of(["said=8.5x"])).tolist()
