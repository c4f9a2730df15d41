import re

from PIL import Image

from xbm_app.search.results_page import write_results_page
from xbm_app.search.searcher import Hit, Searcher


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
