"""What docs/data.md says about streams is what was recorded, and meets what streams are for."""

import json

from benchmarks import streams


def test_the_figures_are_those_of_the_results():
    assert streams.PAGE.read_text() == streams.page(), "run `python -m benchmarks.streams --page`"


def test_a_stream_without_decoding_is_nearly_as_fast_as_a_store_small_and_exact():
    results = json.loads(streams.RESULTS.read_text())
    assert results["read ppm"]["stream"] >= 0.8 * results["read ppm"]["store"]
    assert results["training"]["peak bytes"] < 2e9 and results["training"]["resumes exactly"]
