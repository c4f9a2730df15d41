"""What a store was made from, and data sets that are read from stores alone."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tiny import draw_photos, tiny_config
from xbm.errors import InputError
from xbm_app.data.images import Dataset, ImageSet, Protocol, parts
from xbm_app.data.own_images import read_folder
from xbm_app.data.store import describe, folder_of, prepare, read_stored, write_outline
from xbm_app.train.dataset import read_run
from xbm_app.train.loop import train

PIXELS = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)


@pytest.fixture
def photos(tmp_path):
    return draw_photos(tmp_path / "photos")


def store(dataset: Dataset, out):
    for part, images in parts(dataset).items():
        prepare(images, out / folder_of(part), resize=16, quiet=True)
    write_outline(dataset, out)
    return out


def test_a_folder_of_stores_is_the_data_set_it_was_made_from(photos, tmp_path):
    made = read_folder(photos)
    first = made.protocols[0]
    half = np.arange(len(first.query)) % 2 == 0
    query, gallery = (
        first.query.select(np.flatnonzero(side), f"{made.name} {name}")
        for side, name in ((half, "query 1"), (~half, "gallery"))
    )
    asked = Protocol("asked", query, (1, 3), gallery, one_per_class=2)
    made = replace(made, protocols=(asked, first))
    found = read_stored(store(made, tmp_path / "out"))
    assert found.name == made.name and [p.name for p in found.protocols] == ["asked", first.name]
    assert (found.protocols[0].ks, found.protocols[0].one_per_class) == ((1, 3), 2)
    assert found.protocols[1].gallery is None and len(found.protocols[0].gallery) == len(gallery)
    for part, images in parts(made).items():
        same = parts(found)[part]
        assert (same.name, list(same.class_names), list(same.paths)) == (images.name, images.class_names, list(images.paths))
        assert np.array_equal(same.labels, images.labels)
        assert np.array_equal(np.asarray(same.open(1)), np.asarray(images.open(1)))


def test_a_part_of_a_stored_set_shows_its_own_pictures(photos, tmp_path):
    found = read_stored(store(read_folder(photos), tmp_path / "out")).train
    part = found.select(np.array([7, 3]))
    assert np.array_equal(np.asarray(part.open(0)), np.asarray(found.open(7)))
    assert len(part.store) == 2 and part.labels.tolist() == part.store.labels.tolist()


@pytest.mark.parametrize("holdout", [0.0, 0.4])
def test_a_run_from_the_store_alone_is_the_run_from_the_files(photos, tmp_path, holdout):
    out = store(read_folder(photos), tmp_path / "out")
    usual = tiny_config(photos, data__holdout=holdout, optim__iterations=3)
    # own data splits its classes when a run begins; the store keeps that split
    alone = replace(usual, data=replace(usual.data, name="cars", root=None, store=str(out)))
    one, other = train(usual, tmp_path / "one", quiet=True), train(alone, tmp_path / "other", quiet=True)
    assert one["protocols"] == other["protocols"] and one["data"]["train_images"] == other["data"]["train_images"]
    assert len(read_run(alone, tmp_path / "other").train) == one["data"]["train_images"]


def test_a_folder_that_is_no_store_is_told(tmp_path):
    with pytest.raises(InputError, match="xbm prepare"):
        read_stored(tmp_path)


def generated(pixels=PIXELS, labels=(0, 1, 1)):
    return ImageSet("generated", np.array(labels), ["a", "b"], pixels=pixels)


def test_the_same_set_gives_an_equal_manifest_and_any_change_another():
    base = describe(generated(), 4, "square")
    assert describe(generated(), 4, "square") == base
    assert describe(generated(PIXELS + 1), 4, "square") != base
    assert describe(generated(labels=(0, 0, 1)), 4, "square") != base
    assert describe(generated(), 5, "square") != base
    assert describe(generated(), 4, "shorter") != base


def test_shards_cover_all_images_once():
    manifest = replace(describe(generated(), 4, "square"), labels=[0] * 1000, resize=200)
    assert [i for shard in manifest.shards for i in shard] == list(range(1000))
    assert len(manifest.shards) > 1


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(InputError, match="square"):
        describe(generated(), 4, "sqare")
