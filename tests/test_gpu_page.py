"""The page of GPU figures is what the recorded results say."""

from benchmarks.gpu_page import PAGE, page


def test_the_page_is_written_from_the_results():
    assert PAGE.read_text() == page(), "run `python -m benchmarks.gpu_page`"
