"""Which maps the kernels can read where they lie."""

import pytest
import torch

from xbm_app.models.fused.layout import as_rows, pixel_stride, readable, vector

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
    assert vector(64, 24, 96) == 8 and vector(64, 20) == vector(67) == 1


def test_a_cpu_without_the_interpreter_reads_nothing(monkeypatch):
    x = torch.empty(3, 5, 7, 4).to(**LAST)
    monkeypatch.setattr("xbm_app.models.fused.layout.INTERPRETED", False)
    assert not readable(x)
    monkeypatch.setattr("xbm_app.models.fused.layout.has_kernels", lambda device: True)
    assert readable(x) and not readable(x.double()) and not readable(x.contiguous()) and not readable(x[:0])
    assert not readable(x[0])
