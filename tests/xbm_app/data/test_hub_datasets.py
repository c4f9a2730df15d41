import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.xbm_app.data.shard_files import picture
from tests.xbm_app.data.test_tar_shards import labels_of, pixels_of
from xbm.errors import InputError
from xbm_app.data.hub_datasets import read_hub
from xbm_app.data.images import EncodedSet
from xbm_app.data.own_data import read_own, whole_path
from xbm_app.data.own_images import Columns

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def write_parquet(path, labels, first=0, **columns):
    """As pandas writes images: without the features of the datasets package."""
    images = [{"bytes": picture(number), "path": None} for number in range(first, first + len(labels))]
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": labels, **columns}), path)
    return path


def saved(labels, first=0):
    """A data set with the features `Image` and `ClassLabel`."""
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["cat", "dog", "cow"])})
    images = [{"bytes": picture(number), "path": None} for number in range(first, first + len(labels))]
    return datasets.Dataset.from_dict({"picture": images, "kind": labels}, features=features)


def test_a_parquet_file_with_images_is_split_by_class(tmp_path):
    file = write_parquet(tmp_path / "birds.parquet", [k % 6 for k in range(18)])
    dataset = read_own(str(file))
    train, test = dataset.train, dataset.protocols[0].query
    assert isinstance(train, EncodedSet) and dataset.name == "birds" and len(train) + len(test) == 18
    assert not set(labels_of(train)) & set(labels_of(test))
    for images in (train, test):
        for index, path in enumerate(images.paths):
            assert np.array_equal(np.asarray(images.open(index)), pixels_of(picture(int(path.split("/")[1]))))
    assert train.sizes().tolist() == [len(train.bytes_of(k)) for k in range(len(train))]


def test_the_splits_of_a_folder_are_kept_with_names_of_classes_and_cameras(tmp_path):
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet", ["a", "b", "a"], site=["", "", ""])
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", ["b"], first=3, site=[""])
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", ["c", "d", "c", "d"], 4, site=["n", "n", "s", "s"])
    dataset = read_own(f"hf:{tmp_path}", Columns(group="site"))
    (protocol,) = dataset.protocols
    assert labels_of(dataset.train) == ["a", "b", "a", "b"] and labels_of(protocol.query) == ["c", "d", "c", "d"]
    assert protocol.name == "re-identification" and protocol.query.groups.tolist() == [0, 0, 1, 1]
    assert np.array_equal(np.asarray(protocol.query.open(3)), pixels_of(picture(7)))


def test_what_save_to_disk_wrote_is_read_in_its_order(tmp_path):
    whole = saved([0, 1, 2, 0, 1, 2])
    datasets.DatasetDict(train=whole.select([5, 0, 3, 2]), test=saved([1, 1], first=6)).save_to_disk(tmp_path / "zoo")
    dataset = read_hub(str(tmp_path / "zoo"), columns=Columns("kind"))
    assert labels_of(dataset.train) == ["cow", "cat", "cat", "cow"] and dataset.name == "zoo"
    assert np.array_equal(np.asarray(dataset.train.open(1)), pixels_of(picture(0)))


@pytest.mark.parametrize(
    ("columns", "text"), [(Columns("species"), "unknown column 'species'"), (Columns(group="site"), "unknown column 'site'")]
)
def test_columns_that_are_not_there_are_refused(tmp_path, columns, text):
    write_parquet(tmp_path / "a.parquet", [1, 2, 3, 4])
    with pytest.raises(InputError, match=text):
        read_hub(str(tmp_path / "a.parquet"), columns=columns)


def test_data_that_cannot_be_used_is_refused_in_one_sentence(tmp_path, monkeypatch):
    datasets.DatasetDict(train=saved([0, 1]), validation=saved([2])).save_to_disk(tmp_path / "halves")
    with pytest.raises(InputError, match="has the splits train, validation: it needs train and test"):
        read_hub(str(tmp_path / "halves"), columns=Columns("kind"))
    pyarrow.parquet.write_table(pyarrow.table({"words": ["a"], "label": [1]}), tmp_path / "words.parquet")
    with pytest.raises(InputError, match="has no column of images, only words, label"):
        read_hub(str(tmp_path / "words.parquet"))
    write_parquet(tmp_path / "nameless.parquet", ["a", None])
    with pytest.raises(InputError, match="train row 1: the label is empty"):
        read_hub(str(tmp_path / "nameless.parquet"))

    def offline(name):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match="hf:nobody/nothing: no such folder, and the hub does not answer"):
        read_own("hf:nobody/nothing")


def test_names_on_the_hub_stay_and_paths_become_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert whole_path("hf:here") == f"hf:{tmp_path / 'here'}" and whole_path("here") == str(tmp_path / "here")
    assert whole_path("hf:someone/birds") == "hf:someone/birds"
