"""A manifest is equal exactly when the pixels and labels behind it are."""

import dataclasses

import numpy as np
import pytest

from xbm.errors import InputError
from xbm_app.data.images import ImageSet
from xbm_app.data.store import describe

PIXELS = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)


def made(pixels=PIXELS, labels=(0, 1, 1)):
    return ImageSet("made", np.array(labels), ["a", "b"], pixels=pixels)


def test_the_same_set_gives_an_equal_manifest_and_any_change_another():
    base = describe(made(), 4, "square")
    assert describe(made(), 4, "square") == base
    assert describe(made(PIXELS + 1), 4, "square") != base
    assert describe(made(labels=(0, 0, 1)), 4, "square") != base
    assert describe(made(), 5, "square") != base
    assert describe(made(), 4, "shorter") != base


def test_shards_cover_all_images_once():
    manifest = dataclasses.replace(describe(made(), 4, "square"), labels=[0] * 1000, resize=200)
    assert [i for shard in manifest.shards for i in shard] == list(range(1000))
    assert len(manifest.shards) > 1


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(InputError, match="square"):
        describe(made(), 4, "sqare")
