import shutil

import pytest

from xbm.errors import InputError
from xbm_app.data.benchmarks import read_benchmark


def edit(root, old, new):
    file = root / "Eval" / "list_eval_partition.txt"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


def test_queries_and_gallery_share_one_numbering(miniature):
    dataset = read_benchmark("inshop", miniature("inshop"))
    assert list(dataset.train.class_names) == ["id_00000002", "id_00000007", "id_00000080"]
    (protocol,) = dataset.protocols
    assert protocol.query.labels.tolist() == [0, 1]
    assert protocol.gallery.labels.tolist() == [0, 0, 1, 1]
    assert protocol.query.class_names == protocol.gallery.class_names == ["id_00000005", "id_00000006"]
    assert protocol.query.paths[0] == "Img/img/WOMEN/Dresses/id_00000005/01_1_front.jpg"


def test_images_in_a_plain_img_folder_and_the_list_in_anno_are_found(miniature):
    root = miniature("inshop")
    shutil.move(root / "Img" / "img", root / "img")
    shutil.move(root / "Eval", root / "Anno")
    dataset = read_benchmark("inshop", root)
    assert dataset.train.paths[0].startswith("img/WOMEN")
    assert dataset.train.open(0).size == (23, 19)


def test_a_list_that_was_cut_is_refused(miniature):
    root = miniature("inshop")
    edit(root, "12\n", "13\n")
    with pytest.raises(InputError, match=r"line 1: promises 13 rows but 12 follow"):
        read_benchmark("inshop", root)


def test_a_query_without_a_gallery_image_is_named_by_line(miniature):
    root = miniature("inshop")
    edit(root, "id_00000005 query", "id_00000099 query")
    with pytest.raises(InputError, match=r"line 9: no gallery image shows query item 'id_00000099'"):
        read_benchmark("inshop", root)


def test_an_unknown_status_is_told_the_nearest(miniature):
    root = miniature("inshop")
    edit(root, "id_00000005 query", "id_00000005 qery")
    with pytest.raises(InputError, match=r"line 9: unknown evaluation_status 'qery': did you mean 'query'"):
        read_benchmark("inshop", root)


def test_a_name_that_leaves_the_root_is_refused_though_a_prefix_hides_it(miniature):
    root = miniature("inshop")
    edit(root, "img/WOMEN/Dresses/id_00000002/01_1_front.jpg", "../../secret.jpg")
    with pytest.raises(InputError, match=r"line 3: '../../secret.jpg' leads out"):
        read_benchmark("inshop", root)
