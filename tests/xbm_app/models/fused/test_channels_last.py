"""Which maps the kernels can read in place, and how they are divided into tiles."""

import subprocess
import sys

import pytest
import torch

from xbm_app.models.fused import channels_last
from xbm_app.models.fused.channels_last import as_rows, pixel_stride, readable, vector_size

LAST = {"memory_format": torch.channels_last}


@pytest.mark.parametrize(
    ("x", "stride"),
    [
        (torch.empty(3, 5, 7, 4).to(**LAST), 5),
        (torch.empty(3, 20, 7, 4).to(**LAST)[:, 3:8], 20),
        (torch.empty(3, 20, 1, 1)[:, 3:8], 20),
        (torch.empty(1, 5, 1, 1), 5),
        (torch.empty(3, 1, 7, 4), 1),
        (torch.empty(3, 20, 1, 4).to(**LAST)[:, :5], 20),
        (torch.empty(3, 5, 7, 4), None),
        (torch.empty(3, 5, 7, 4).to(**LAST)[:, :, :5], None),  # images farther apart than rows say
        (torch.empty(3, 5, 7, 4).to(**LAST)[:, :, :, ::2], 10),
        (torch.empty(3, 5, 7, 4).to(**LAST)[:, :, :, ::3], None),
        (torch.empty(3, 5, 7, 8).to(**LAST)[:, :, :, :4], None),
        (torch.empty(3, 10, 7, 4).to(**LAST)[:, ::2], None),
        (torch.empty(()).expand(3, 5, 7, 4), None),
        (torch.empty(1, 5, 1, 1).expand(3, 5, 7, 4), None),
    ],
)
def test_the_distance_of_pixels_is_found_or_the_map_is_refused(x, stride):
    assert pixel_stride(x) == stride
    rows, distance = as_rows(x)
    assert pixel_stride(rows) == distance and (rows is x) == (stride is not None)
    if stride is not None:
        x.copy_(torch.arange(x.numel()).view(x.shape))
        N, C, H, W = x.shape
        assert torch.equal(x.as_strided((N * H * W, C), (stride, 1)), x.permute(0, 2, 3, 1).reshape(-1, C))


def test_eight_channels_are_read_at_once_where_everything_is_a_multiple():
    assert vector_size(64, 24, 96) == 8 and vector_size(64, 20) == vector_size(67) == 1


def test_a_cpu_without_the_interpreter_reads_nothing(monkeypatch):
    x = torch.empty(3, 5, 7, 4).to(**LAST)
    monkeypatch.setattr("xbm_app.models.fused.channels_last.INTERPRETED", False)
    assert not readable(x)
    monkeypatch.setattr("xbm_app.models.fused.channels_last.has_kernels", lambda device: True)
    assert readable(x) and not readable(x.double()) and not readable(x.contiguous()) and not readable(x[:0])
    assert not readable(x[0])


CPU = torch.device("cpu")
CONFIGS = [channels_last.REDUCTION, channels_last.ELEMENTWISE, channels_last.NEIGHBORHOOD]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("C", [1, 16, 24, 64, 67, 96, 208, 832, 2048])
@pytest.mark.parametrize("P", [2, 49, 3136, 802_816, 20_000_000])
def test_every_program_has_a_tile_and_no_channel_is_left_out(P, C, config, monkeypatch):
    monkeypatch.setattr(channels_last, "resources", lambda device: (132, 227 * 1024))
    k = channels_last.tile_map(P, C, config, CPU)
    assert k.blocks * k.channels >= C > (k.blocks - 1) * k.channels
    assert k.pixels * k.channels == config.size and k.pixels & (k.pixels - 1) == 0
    assert (k.splits - 1) * k.pixels < P and k.splits < 65536
    assert k.splits * k.blocks <= max(132 * config.per_processor, k.blocks)
    assert k.blocks <= -(-C // 16), "one ticket a block: fuse() hands out one for 16 channels"


def test_narrow_blocks_are_taken_where_wide_ones_would_be_mostly_empty():
    assert [channels_last.channel_block(C) for C in (16, 24, 64, 96, 192, 480)] == [16, 32, 64, 32, 64, 64]


def test_a_tensor_off_the_grid_of_16_bytes_has_no_key():
    x = torch.empty(64)
    assert (
        channels_last.launch_key(CPU, (x, x), 3) == (CPU, torch.float32, torch.float32, 3)
        and channels_last.launch_key(CPU, (x, x[1:]), 3) is None
    )


@pytest.mark.slow
def test_models_can_be_fused_where_there_is_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from xbm_app.models import build_model; from xbm_app.models.fused import fuse\n"
        "model = fuse(build_model('small', weights='none', channels=1))\n"
        "model(torch.zeros(2, 1, 32, 32).to(memory_format=torch.channels_last)).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
