import numpy as np
import pytest
import torch
from PIL import Image

from xbm import InputError
from xbm_app.export import Portable, record, run_onnx, run_program, windows, write_onnx, write_program
from xbm_app.models import build_model
from xbm_app.train.load import load


class Bytes(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixels):
        return self.model(pixels.float() / 128 - 1)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_any_number_of_images_at_once(exported, count):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 1, 16, 16), dtype=np.uint8)
    one, other = (run(exported.folder / name)(pixels) for run, name in ((run_onnx, "model.onnx"), (run_program, "model.pt2")))
    assert one.shape == (count, 12) and np.allclose(one, other, atol=1e-5)
    assert np.allclose(np.linalg.norm(one, axis=1), 1, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["googlenet", "resnet50", "bn_inception", "efficientnet_lite0", "timm/vit_tiny_patch16_224"])
def test_every_trunk_comes_out_as_it_went_in(trunk, tmp_path):
    torch.set_num_threads(2)
    size = 224 if "vit" in trunk else 96
    model = Bytes(build_model(trunk, 32, weights="none")).eval()
    program = record(model, 3, size)
    write_onnx(program, tmp_path / "model.onnx", {"crop": str(size)})
    write_program(program, tmp_path / "model.pt2")
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, size, size), dtype=np.uint8)
    with torch.no_grad():
        wanted = model(torch.from_numpy(pixels)).numpy()
    for run, name in ((run_onnx, "model.onnx"), (run_program, "model.pt2")):
        assert np.abs(run(tmp_path / name)(pixels) - wanted).max() < 1e-4
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.pt2", "checksums.json"}


def test_the_file_says_how_images_are_prepared(exported):
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    found = session.get_modelmeta().custom_metadata_map
    assert {name: found[name] for name in ("resize", "crop", "channels", "longest")} == {
        "resize": "16", "crop": "16", "channels": "1", "longest": "0",
    }  # fmt: skip
    (given,), (made,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.type, given.shape[1:]) == ("pixels", "tensor(uint8)", [1, 16, 16])
    assert (made.name, made.type, made.shape[1]) == ("embedding", "tensor(float)", 12)
    assert isinstance(given.shape[0], str)


def test_a_torch_whose_exporter_fails_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.6.0"))
    with pytest.raises(InputError, match=r"ONNX needs torch 2\.7 or later, this is 2\.6\.0"):
        write_onnx(None, tmp_path / "model.onnx", {})
    assert not any(tmp_path.iterdir())


# ------------------------------------------------------------------ the exported model


def test_bytes_in_the_runs_own_embeddings_out(searchable, own_photos):
    embedder = load(searchable)
    views = [embedder.view(Image.open(path).convert("RGB")) for path in sorted(own_photos.rglob("*.png"))[:9]]
    pixels = torch.from_numpy(windows(embedder, views))
    assert pixels.dtype == torch.uint8 and pixels.shape == (9, 1, 16, 16)
    with torch.no_grad():
        found = Portable(embedder)(pixels)
    assert torch.allclose(found, embedder.embed_views(views), atol=1e-5)
    assert torch.allclose(found.norm(dim=1), torch.ones(9), atol=1e-5)


def test_the_window_is_the_centre_as_in_testing(searchable):
    embedder = load(searchable)
    view = np.arange(20 * 26, dtype=np.uint8).reshape(20, 26, 1)
    (window,) = windows(embedder, [view])
    assert np.array_equal(window[0], view[2:18, 5:21, 0])
    offset, gain = (each.numpy() for each in (Portable(embedder).offset, Portable(embedder).gain))
    assert np.array_equal((window - offset) * gain, embedder.pixels([view])[0].numpy())


def test_the_run_itself_is_left_as_it_was(searchable):
    embedder = load(searchable)
    Portable(embedder).model.head.bias.data += 1
    assert torch.equal(embedder.model.head.bias, load(searchable).model.head.bias)
