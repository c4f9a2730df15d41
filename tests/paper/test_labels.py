import json

import numpy as np
import pytest

from paper.labels import labels_file, read_labels, runs_of, write_labels
from paper.record import Records
from xbm.errors import InputError
from xbm_app.data.images import Dataset, ImageSet, Protocol


@pytest.fixture
def dataset():
    labels = np.array([2, 2, 0, 1, 1, 1, 2])
    test = ImageSet("cars test", labels, ["a", "b", "c"], pixels=np.zeros((7, 4, 4), np.uint8))
    train = ImageSet("cars train", labels[:2] * 0, ["z"], pixels=np.zeros((2, 4, 4), np.uint8))
    return Dataset("cars", train, (Protocol("test", test, (1,)),))


def test_labels_come_back_in_the_order_of_the_queries(dataset, tmp_path):
    path = write_labels(tmp_path, dataset)
    assert path == labels_file(tmp_path, "cars") and json.loads(path.read_text())["protocol"] == "test"
    assert read_labels(tmp_path, "cars", 7).tolist() == [2, 2, 0, 1, 1, 1, 2]
    assert read_labels(tmp_path, "cub", 7) is None


def test_labels_of_other_images_are_refused(dataset, tmp_path):
    write_labels(tmp_path, dataset)
    with pytest.raises(InputError, match="has 7 queries, the results have 8"):
        read_labels(tmp_path, "cars", 8)


def test_they_are_no_result(dataset, tmp_path):
    write_labels(tmp_path, dataset)
    assert len(Records(tmp_path)) == 0


def test_runs_of_equal_labels():
    assert runs_of([]) == [] and runs_of([1, 1, 0, 0, 0, 1]) == [(1, 2), (0, 3), (1, 1)]
