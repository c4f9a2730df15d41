import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.tiny import draw_photos, xbm
from xbm_app.train.load import load


def test_the_parity_is_printed_and_the_folder_last(searchable, tmp_path):
    code, out, err = xbm("export", searchable, "--out", tmp_path / "model")
    assert code == 0, err
    onnx, program, last = out.splitlines()
    assert onnx.startswith("model.onnx: ") and "largest difference from the run" in onnx and "36 test images" in onnx
    assert program.startswith("model.pt2: ") and last == str(tmp_path / "model") and err == ""


def test_bad_input_of_export(tmp_path, monkeypatch):
    code, _, err = xbm("export", tmp_path / "nowhere")
    assert code == 2 and "does not exist: pass a run folder" in err
    code, _, err = xbm("export", tmp_path)
    assert code == 2 and "holds no checkpoint" in err
    monkeypatch.setattr("xbm_app.extras.find_spec", lambda name: None)
    code, _, err = xbm("export", tmp_path)
    assert code == 2 and "pip install 'xbm[export]'" in err and err.count("\n") == 1


@pytest.fixture
def images(tmp_path):
    root = draw_photos(tmp_path / "images", classes=3, each=2)
    Image.new("RGB", (40, 20), "red").save(root / "loose.jpg")
    (root / "notes.txt").write_text("no image")
    return root


def test_vectors_with_ids_paths_and_folders_as_npz(finished, images, tmp_path):
    code, out, err = xbm("embed", finished, images, "--out", tmp_path / "new" / "v.npz")
    assert code == 0 and "7 embeddings of 12 dimensions" in out, err
    with np.load(tmp_path / "new" / "v.npz", allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    assert found["ids"].tolist() == list(range(7)) and found["embeddings"].shape == (7, 12)
    assert found["paths"].tolist()[0] == "loose.jpg" and found["paths"].tolist()[1] == "class_00/0.png"
    assert [found["classes"][k] for k in found["labels"]] == [".", *(f"class_0{k // 2}" for k in range(6))]
    wanted = load(finished).embed([images / path for path in found["paths"]]).numpy()
    np.testing.assert_allclose(found["embeddings"], wanted, atol=1e-5)


def test_vectors_as_parquet_are_the_same(finished, images, tmp_path):
    assert xbm("embed", finished, images, "--out", tmp_path / "v.parquet").code == 0
    assert xbm("embed", finished, images, "--out", tmp_path / "v.npz").code == 0
    table = pq.read_table(tmp_path / "v.parquet")
    assert table.column_names == ["id", "path", "label", "embedding"]
    with np.load(tmp_path / "v.npz") as file:
        assert np.array_equal(np.stack(table["embedding"].to_numpy()), file["embeddings"])
        assert table["path"].to_pylist() == file["paths"].tolist() and table["id"].to_pylist() == file["ids"].tolist()
    assert table["label"].to_pylist()[1] == "class_00"
    assert {path.name for path in tmp_path.iterdir()} == {"images", "v.npz", "v.parquet"}  # nothing half written


def test_the_vectors_can_be_scored(finished, images, tmp_path):
    (images / "loose.jpg").unlink()
    assert xbm("embed", finished, images, "--out", tmp_path / "v.npz").code == 0
    code, out, err = xbm("evaluate", tmp_path / "v.npz", "--ks", "1,2")
    assert code == 0 and "recall@1" in out, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["IMAGES", "--out", "v.csv"], "v.csv must end in .npz or .parquet"),
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty contains no images"),
    ],
)
def test_bad_input_of_embed(finished, images, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    code, _, err = xbm("embed", finished, *(images if word == "IMAGES" else word for word in words))
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_broken_image_is_named_and_left_out(finished, images, tmp_path):
    assert xbm("embed", finished, images, "--out", tmp_path / "whole.npz").code == 0
    (images / "class_01" / "0.png").write_bytes(b"no picture")
    code, out, err = xbm("embed", finished, images, "--out", tmp_path / "v.npz")
    assert code == 0 and "6 embeddings of 12 dimensions" in out and "1 images left out" in out
    assert "class_01/0.png cannot be read as an image" in err
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "v.npz") as file:
        kept = whole["paths"] != "class_01/0.png"
        assert file["paths"].tolist() == whole["paths"][kept].tolist() and file["ids"].tolist() == list(range(6))
        np.testing.assert_allclose(file["embeddings"], whole["embeddings"][kept], atol=1e-5)


def test_no_image_that_can_be_read(finished, tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(b"no picture")
    code, _, err = xbm("embed", finished, tmp_path / "images", "--out", tmp_path / "v.npz")
    assert code == 2 and "none of the images" in err and not (tmp_path / "v.npz").exists()
