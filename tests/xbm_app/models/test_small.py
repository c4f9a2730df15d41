"""The small trunk."""

import pytest
import torch

from xbm_app.models.small import SmallNet


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 32, 32), (3, 35, 50), (2, 16, 105)])
def test_images_of_any_size_become_a_map_of_a_sixteenth(channels: int, height: int, width: int) -> None:
    net = SmallNet(channels)
    assert net(torch.randn(2, channels, height, width)).shape == (2, net.width, height // 16, width // 16)


def test_every_parameter_receives_a_gradient() -> None:
    net = SmallNet(1)
    net(torch.randn(7, 1, 32, 32)).square().sum().backward()
    assert all(each.grad is not None and each.grad.abs().sum() > 0 for each in net.parameters())


def test_a_batch_is_normalised_in_training_and_images_are_apart_in_testing() -> None:
    net, images = SmallNet(1), torch.randn(5, 1, 32, 32)
    assert not torch.allclose(net(images)[:1], net(images[:1]), atol=1e-4)
    net.eval()
    torch.testing.assert_close(net(images)[:1], net(images[:1]))
