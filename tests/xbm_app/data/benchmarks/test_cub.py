import pytest

from xbm.errors import InputError
from xbm_app.data.benchmarks import read_benchmark


def edit(file, old, new):
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def test_the_first_hundred_species_train(miniature):
    dataset = read_benchmark("cub", miniature("cub"))
    assert list(dataset.train.class_names) == ["099.Ovenbird", "100.Brown_Pelican"]
    assert list(dataset.protocols[0].query.class_names) == ["101.White_Pelican", "102.Western_Wood_Pewee"]
    assert dataset.train.paths[0] == "images/099.Ovenbird/bird_0.jpg"
    assert dataset.train.boxes is None


@pytest.mark.parametrize(
    ("file", "old", "new", "sentence"),
    [
        ("classes.txt", "101.White_Pelican", "099.Ovenbird", r"classes.txt, line 3: class '099.Ovenbird' is already in"),
        ("classes.txt", "101 101", "99 101", r"classes.txt, line 3: id 99 is already in .*line 1"),
        ("image_class_labels.txt", "3 100", "3 77", r"image_class_labels.txt, line 3: names an id that classes.txt"),
        ("image_class_labels.txt", "3 100\n", "", r"images.txt, line 3: 100.Brown_Pelican/bird_0.jpg has no label"),
        ("images.txt", "2 099.Ovenbird/bird_1.jpg", "2 ../x.jpg", r"images.txt, line 2: '../x.jpg' leads out"),
    ],
)
def test_lists_that_disagree_are_named_by_file_and_line(miniature, file, old, new, sentence):
    root = miniature("cub")
    edit(root / file, old, new)
    with pytest.raises(InputError, match=sentence):
        read_benchmark("cub", root)
