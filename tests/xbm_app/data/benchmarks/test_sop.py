import pytest

from xbm.errors import InputError
from xbm_app.data.benchmarks import read_benchmark


def replace_line(file, number, text):
    rows = file.read_text().splitlines()
    rows[number - 1] = text
    file.write_text("\n".join(rows) + "\n")


def test_the_lists_give_the_split_and_products_are_the_classes(miniature):
    dataset = read_benchmark("sop", miniature("sop"))
    assert list(dataset.train.class_names) == ["1", "2", "3"]
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert dataset.train.paths[3] == "bicycle_final/000002_0.JPG"
    (protocol,) = dataset.protocols
    assert protocol.gallery is None and protocol.ks == (1, 10, 100, 1000)
    assert list(protocol.query.class_names) == ["11319", "11320"]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("2 1 1 ../elsewhere/1.jpg", "leads out of the data's root"),
        ("2 1 1 /etc/1.jpg", "absolute path"),
        ("2 one 1 a.jpg", "class_id must be a whole number, found 'one'"),
        ("2 1 a.jpg", "expected `image_id class_id super_class_id path`"),
        ("2 7 1 bicycle_final/000001_0.JPG", "has label '7' here and '1' in"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(miniature, line, sentence):
    root = miniature("sop")
    replace_line(root / "Ebay_train.txt", 3, line)
    with pytest.raises(InputError) as error:
        read_benchmark("sop", root)
    assert str(error.value).startswith(f"{root / 'Ebay_train.txt'}, line 3: ")
    assert sentence in str(error.value)


def test_a_test_class_that_was_trained_on_is_refused(miniature):
    root = miniature("sop")
    replace_line(root / "Ebay_test.txt", 2, "10 2 1 bicycle_final/new.JPG")
    with pytest.raises(InputError, match=r"Ebay_test.txt, line 2: class '2' is a training class in .*line 5"):
        read_benchmark("sop", root)
