"""The page about trunks is what the recorded results say; each family is checked anew by the slow tests."""

import json

import pytest

from benchmarks import trunks
from xbm_app.export import TOLERANCE


def test_the_page_is_written_from_the_results():
    assert trunks.PAGE.read_text() == trunks.page(), "run `python -m benchmarks.trunks --page`"


def test_every_family_passed():
    results = json.loads(trunks.RESULTS.read_text())["trunks"]
    assert {family: r["trunk"] for family, r in results.items()} == trunks.FAMILIES
    for family, r in results.items():
        assert r["resumes"] and r["evaluates"] and r["onnx"] <= TOLERANCE and r["indexed"] == 1.0, family


@pytest.mark.slow
@pytest.mark.parametrize("family", trunks.FAMILIES)
def test_a_family_trains_resumes_evaluates_exports_and_is_indexed(family, tmp_path):
    found = trunks.check_trunk(trunks.FAMILIES[family], tmp_path)
    assert found["resumes"] and found["evaluates"] and found["onnx"] <= TOLERANCE and found["indexed"] == 1.0
    recorded = json.loads(trunks.RESULTS.read_text())["trunks"][family]
    stated = ("own_side", "side_of_photographs", "side", "interpolation", "width", "parameters", "layers", "resampled")
    assert {name: found[name] for name in stated} == {name: recorded[name] for name in stated}
