import shutil

import pytest

from xbm_app.data.benchmarks import missing_drawings, read_benchmark


def test_background_trains_and_evaluation_tests(miniature):
    dataset = read_benchmark("omniglot", miniature("omniglot"))
    assert list(dataset.train.class_names) == [
        "Greek/character01",
        "Greek/character02",
        "Latin/character01",
        "Latin/character02",
    ]
    assert dataset.protocols[0].query.class_names[0] == "Angelic/character01"
    assert len(dataset.train) == 12


@pytest.mark.parametrize("halves", [("python/images_background", "python/images_evaluation"), ("train", "test")])
def test_the_other_layouts_give_the_same_classes(miniature, halves):
    root = miniature("omniglot")
    before = read_benchmark("omniglot", root)
    for old, new in zip(("images_background", "images_evaluation"), halves):
        (root / new).parent.mkdir(exist_ok=True)
        shutil.move(root / old, root / new)
    after = read_benchmark("omniglot", root)
    assert after.train.class_names == before.train.class_names
    assert after.train.paths[0].startswith(halves[0])


def test_drawings_that_lack_are_named(miniature):
    root = miniature("omniglot")
    names = missing_drawings(read_benchmark("omniglot", root))
    assert len(names) == 8 * 17
    assert names[0] == "images_background/Greek/character01/0001_04.png"
