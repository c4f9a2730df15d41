import json

import pytest

from xbm.errors import InputError
from xbm_app.data.benchmarks import count, read_benchmark


def annotate(root, half, number, **change):
    file = root / half / "annos" / f"{number:06d}.json"
    image = json.loads(file.read_text())
    file.write_text(json.dumps(image | change))
    return file


def test_training_classes_are_styles_above_zero_within_a_pair(miniature):
    train = read_benchmark("deepfashion2", miniature("deepfashion2")).train
    assert list(train.class_names) == ["train, pair 1, style 1", "train, pair 1, style 2", "train, pair 2, style 1"]
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.paths[:3] == ["train/image/000001.jpg", "train/image/000002.jpg", "train/image/000002.jpg"]


def test_user_items_with_a_style_ask_and_all_shop_items_are_searched(miniature):
    (protocol,) = read_benchmark("deepfashion2", miniature("deepfashion2")).protocols
    assert [protocol.query.class_names[label] for label in protocol.query.labels] == [
        "validation, pair 1, style 1",
        "validation, pair 4, style 2",
    ]
    # Style 0 is searched too, and matches nothing that was asked for.
    unpaired = protocol.gallery.class_names.index("validation, unpaired")
    assert protocol.gallery.labels.tolist().count(unpaired) == 2
    assert unpaired not in protocol.query.labels
    assert len(protocol.gallery) == 5
    assert protocol.query.class_names == protocol.gallery.class_names


def test_items_are_cropped_to_their_boxes_and_counted_beside_the_images(miniature):
    dataset = read_benchmark("deepfashion2", miniature("deepfashion2"))
    assert dataset.train.open(0).size == (20, 16)
    counted = count(dataset.protocols[0].gallery)
    assert (counted.images, counted.items) == (3, 5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"source": "shoop"}, "unknown source 'shoop': did you mean 'shop'"),
        ({"pair_id": None}, "item1 needs a whole-number style and its image a whole-number pair_id"),
        ({"item1": {"style": 1, "bounding_box": [1, 2, 3]}}, "item1 needs a bounding_box of four numbers"),
    ],
)
def test_an_annotation_that_is_none_is_named(miniature, change, sentence):
    root = miniature("deepfashion2")
    file = annotate(root, "validation", 3, **change)
    with pytest.raises(InputError) as error:
        read_benchmark("deepfashion2", root)
    assert str(error.value).startswith(str(file)) and sentence in str(error.value)


def test_broken_json_is_named(miniature):
    root = miniature("deepfashion2")
    (root / "train" / "annos" / "000002.json").write_text("{")
    with pytest.raises(InputError, match=r"000002.json is no readable JSON"):
        read_benchmark("deepfashion2", root)
