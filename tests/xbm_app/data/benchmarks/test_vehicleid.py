import pytest

from xbm.errors import InputError
from xbm_app.data.benchmarks import read_benchmark


def test_three_sizes_are_scored_in_two_ways_each(miniature):
    dataset = read_benchmark("vehicleid", miniature("vehicleid"))
    names = [(protocol.name, protocol.one_per_class) for protocol in dataset.protocols]
    assert names == [
        ("small leave-one-out", 0),
        ("small one-per-class", 10),
        ("medium leave-one-out", 0),
        ("medium one-per-class", 10),
        ("large leave-one-out", 0),
        ("large one-per-class", 10),
    ]
    assert dataset.protocols[0].query is dataset.protocols[1].query
    assert [len(protocol.query) for protocol in dataset.protocols[::2]] == [6, 9, 6]
    assert all(protocol.ks == (1, 5) for protocol in dataset.protocols)


def test_images_keep_the_zeros_of_their_names_and_classes_are_vehicles(miniature):
    train = read_benchmark("vehicleid", miniature("vehicleid")).train
    assert train.paths[:2] == ["image/0000010.jpg", "image/0000011.jpg"]
    assert list(train.class_names) == ["1", "2", "3"]


def test_vehicle_ids_far_apart_never_share_a_label(miniature):
    # 2**32 + 1 and 1 are one class to any reader that squeezes ids through 32 bits.
    root = miniature("vehicleid")
    with (root / "train_test_split" / "train_list.txt").open("a") as file:
        file.write("0000040 4294967297\n")
    train = read_benchmark("vehicleid", root).train
    assert train.num_classes == 4 and train.labels[-1] == 3
    assert train.class_names[3] == "4294967297"


def test_a_test_vehicle_in_training_is_refused(miniature):
    root = miniature("vehicleid")
    with (root / "train_test_split" / "test_list_1600.txt").open("a") as file:
        file.write("0009999 3\n")
    with pytest.raises(InputError, match=r"test_list_1600.txt, line 10: class '3' is a training class"):
        read_benchmark("vehicleid", root)


def test_a_missing_list_says_where_it_belongs(miniature):
    root = miniature("vehicleid")
    (root / "train_test_split" / "test_list_2400.txt").unlink()
    with pytest.raises(InputError, match=r"test_list_2400.txt is missing: point --root"):
        read_benchmark("vehicleid", root)
