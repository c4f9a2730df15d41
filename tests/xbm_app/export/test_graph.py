import numpy as np
import torch

from xbm_app.export.graph import Portable, windows
from xbm_app.train.load import load


def test_bytes_in_the_runs_own_embeddings_out(searchable, own_photos):
    embedder = load(searchable)
    views = [embedder.view(embedder_image) for embedder_image in map(open_rgb, sorted(own_photos.rglob("*.png"))[:9])]
    pixels = torch.from_numpy(windows(embedder, views))
    assert pixels.dtype == torch.uint8 and pixels.shape == (9, 1, 16, 16)
    with torch.no_grad():
        found = Portable(embedder)(pixels)
    assert torch.allclose(found, embedder.embed_views(views), atol=1e-5)
    assert torch.allclose(found.norm(dim=1), torch.ones(9), atol=1e-5)


def open_rgb(path):
    from PIL import Image

    return Image.open(path).convert("RGB")


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
