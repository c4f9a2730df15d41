import shutil

import numpy as np
import pytest
from scipy.io import savemat

from xbm.errors import DamagedFileError, InputError
from xbm_app.data.benchmarks import read_benchmark
from xbm_app.data.benchmarks.cars import missing

OFFICIAL = ["Dodge Charger Sedan 2012", "Volvo 240 Sedan 1993"], ["Acura RL Sedan 2012", "FIAT 500 Abarth 2012"]


def names(dataset):
    return list(dataset.train.class_names), list(dataset.protocols[0].query.class_names)


@pytest.mark.parametrize("layout", ["cars", "cars_annos", "cars_devkit"])
def test_the_owners_order_decides_who_trains_not_the_alphabet(miniature, layout):
    # By the alphabet, Acura and Dodge would train and Volvo would be tested.
    dataset = read_benchmark("cars", miniature(layout))
    assert names(dataset) == OFFICIAL
    assert OFFICIAL[0] + OFFICIAL[1] != sorted(OFFICIAL[0] + OFFICIAL[1])


def test_folders_without_an_index_are_refused_with_the_reason(miniature):
    root = miniature("cars")
    (root / "098.Volvo 240 Sedan 1993").rename(root / "Volvo 240 Sedan 1993")
    with pytest.raises(
        InputError,
        match=r"Volvo 240 Sedan 1993: the number of this class is unknown.* order is not alphabetical; put cars_annos",
    ):
        read_benchmark("cars", root)


@pytest.mark.parametrize("halves", [False, True])
def test_folders_without_an_index_are_put_in_order_by_a_devkit(miniature, halves):
    root, kit = miniature("cars"), miniature("cars_devkit")
    shutil.copytree(kit / "devkit", root / "devkit")
    for folder in [folder for folder in root.iterdir() if folder.name != "devkit"]:
        plain = folder.name[4:].replace(" ", "_")  # unpackers change spaces and slashes
        if halves:
            for half in ("train", "test"):
                (root / half / plain).mkdir(parents=True)
                for file in folder.glob(f"{half}_*"):
                    file.rename(root / half / plain / file.name)
            folder.rmdir()
        else:
            folder.rename(root / plain)
    train, test = names(read_benchmark("cars", root))
    assert [name.replace("_", " ") for name in train] == OFFICIAL[0]
    assert [name.replace("_", " ") for name in test] == OFFICIAL[1]


def test_both_halves_of_the_owners_classification_split_are_used(miniature):
    dataset = read_benchmark("cars", miniature("cars_devkit"))
    assert dataset.train.paths == [
        "cars_train/00001.jpg",
        "cars_train/00002.jpg",
        "cars_test/00001.jpg",
        "cars_test/00002.jpg",
    ]
    assert dataset.train.labels.tolist() == [0, 1, 0, 1]


def test_a_devkit_without_test_labels_is_refused(miniature):
    root = miniature("cars_devkit")
    (root / "devkit" / "cars_test_annos_withlabels.mat").unlink()
    with pytest.raises(InputError, match=r"cars_test_annos_withlabels.mat is missing"):
        read_benchmark("cars", root)


def test_the_gaps_in_the_numbering_name_the_missing_images(miniature):
    root = miniature("cars")
    (root / "098.Volvo 240 Sedan 1993" / "train_000005.jpg").unlink()  # its neighbours: train_000004, test_000006
    (root / "096.Dodge Charger Sedan 2012" / "train_000001.jpg").unlink()
    dataset = read_benchmark("cars", root)
    assert missing(dataset, total=12) == [
        "096.Dodge Charger Sedan 2012/train_000001",
        "098.Volvo 240 Sedan 1993/test_000005 or 098.Volvo 240 Sedan 1993/train_000005",
    ]


def test_a_gap_among_images_of_one_kind_is_named_exactly(miniature, draw):
    root = miniature("cars")
    for number in (13, 15):
        draw(root / "100.FIAT 500 Abarth 2012" / f"test_{number:06d}.jpg")
    assert missing(read_benchmark("cars", root), total=15) == ["100.FIAT 500 Abarth 2012/test_000014"]


def test_other_file_names_tell_nothing_about_gaps(miniature, draw):
    root = miniature("cars")
    draw(root / "100.FIAT 500 Abarth 2012" / "mine.jpg")
    assert missing(read_benchmark("cars", root)) == []


@pytest.mark.parametrize(
    ("folder", "sentence"),
    [
        ("098.Volvo 850", "class 98 is also 'Volvo 240 Sedan 1993'"),
        ("197.Volvo 850", "classes run from 1 to 196"),
        ("097.FIAT 500 Abarth 2012", "classes 97 and 100 are both named 'FIAT 500 Abarth 2012'"),
    ],
)
def test_classes_that_collide_are_refused(miniature, draw, folder, sentence):
    root = miniature("cars")
    draw(root / folder / "train_000099.jpg")
    with pytest.raises(InputError, match=sentence):
        read_benchmark("cars", root)


def test_a_mat_file_that_is_none_is_refused(miniature):
    root = miniature("cars_annos")
    (root / "cars_annos.mat").write_bytes(b"MATLAB 5.0 MAT-file, cut")
    with pytest.raises(DamagedFileError, match=r"cars_annos.mat is no readable .mat file"):
        read_benchmark("cars", root)


def test_a_mat_file_without_annotations_is_refused(miniature):
    root = miniature("cars_annos")
    savemat(root / "cars_annos.mat", {"class_names": np.array([["a"]], dtype=object)})
    with pytest.raises(InputError, match="has no `annotations` with relative_im_path and class"):
        read_benchmark("cars", root)
