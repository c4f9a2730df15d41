"""The embedding model: rows of unit length, pooling, frozen batch normalisation, parameter groups."""

import copy

import pytest
import torch
from torch import Tensor, nn

from xbm.errors import InputError
from xbm_app.models import EmbeddingModel, build_model, freeze_batch_norm, parameter_groups
from xbm_app.models.embedding import _positions
from xbm_app.models.trunks import Trunk


def small(dim: int = 7, **options: str) -> EmbeddingModel:
    return build_model("small", dim=dim, weights="none", channels=1, **options)


class Fixed(nn.Module):
    """A trunk that answers with what it was given."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.features = features

    def forward(self, images: Tensor) -> Tensor:
        return self.features


def over(features: Tensor, width: int, pooling: str = "average", **options: int | bool) -> EmbeddingModel:
    def nowhere() -> dict[str, Tensor]:
        raise AssertionError

    trunk = Trunk(Fixed(features), width, (0.5,), (0.5,), nowhere, **options)  # type: ignore[arg-type]
    return EmbeddingModel(trunk, 3, pooling)


IMAGES = torch.zeros(2, 1, 8, 8)


@pytest.mark.parametrize("method", ["forward", "pooled"])
@pytest.mark.parametrize("autocast", [False, True])
def test_rows_are_float32_and_of_unit_length(method: str, autocast: bool) -> None:
    model = small()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rows = getattr(model, method)(torch.randn(5, 1, 33, 40))
    assert rows.dtype == torch.float32
    torch.testing.assert_close(torch.linalg.vector_norm(rows, dim=1), torch.ones(5))
    assert rows.shape == (5, 7 if method == "forward" else model.head.in_features)


def test_pooling_is_the_mean_or_the_maximum_over_places() -> None:
    features = torch.randn(2, 5, 3, 4)
    for pooling, expected in (("average", features.mean((2, 3))), ("max", features.amax((2, 3)))):
        torch.testing.assert_close(over(features, 5, pooling).pooled(IMAGES), nn.functional.normalize(expected))


def test_the_head_is_linear_with_bias_on_features_that_are_not_normalised() -> None:
    features = torch.randn(2, 5, 3, 4)
    model = over(features, 5)
    assert model.head.bias is not None
    expected = features.mean((2, 3)) @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model(IMAGES), nn.functional.normalize(expected))


def test_every_layout_is_brought_to_one_column_a_place() -> None:
    places = torch.randn(2, 5, 12)
    feature_map = places.reshape(2, 5, 3, 4)
    tokens = torch.cat([torch.full((2, 2, 5), 99.0), places.mT], 1)
    assert torch.equal(_positions(feature_map, 5, 0), places)
    assert torch.equal(_positions(feature_map.permute(0, 2, 3, 1), 5, 0), places)
    assert torch.equal(_positions(tokens, 5, 2), places)
    assert torch.equal(_positions(places[:, :, 0], 5, 0), places[:, :, :1])


def test_a_trunk_that_pools_by_itself_refuses_max_pooling() -> None:
    assert over(torch.randn(2, 5), 5, pools=True)(IMAGES).shape == (2, 3)
    with pytest.raises(InputError, match="leave pooling at average"):
        over(torch.randn(2, 5), 5, "max", pools=True)


@torch.no_grad()
@pytest.mark.parametrize(("name", "side"), [("test_vit", 160), ("test_resnet", 96), ("test_efficientnet", 64)])
def test_any_timm_model_embeds(name: str, side: int) -> None:
    model = build_model(f"timm/{name}", dim=9, weights="none").eval()
    rows = model(torch.randn(2, 3, side, side))
    torch.testing.assert_close(torch.linalg.vector_norm(rows, dim=1), torch.ones(2))
    assert len(model.mean) == len(model.std) == model.channels == 3


def test_frozen_batch_norm_keeps_its_statistics_through_every_later_train_call() -> None:
    model = small()
    freeze_batch_norm(model)
    before = copy.deepcopy({name: value for name, value in model.state_dict().items() if "running" in name})
    assert before
    for call in (model.train, model.eval, model.train):
        call()
        model(torch.randn(5, 1, 32, 32))
    assert model.training and model.head.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and not any(module.training for module in norms)
    assert all(each.requires_grad for each in model.parameters())


def test_without_freezing_statistics_move() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items() if "running" in name}
    model(torch.randn(5, 1, 32, 32))
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items() if name in before)


def test_freezing_leaves_an_evaluating_model_evaluating() -> None:
    model = small().eval()
    freeze_batch_norm(model)
    assert not model.training and not any(module.training for module in model.modules())


def test_a_frozen_model_inside_a_wrapper_stays_frozen() -> None:
    model = small()
    freeze_batch_norm(model)
    nn.Sequential(model).train()
    assert not any(module.training for module in model.modules() if isinstance(module, nn.BatchNorm2d))


def test_groups_hold_every_parameter_once_and_scale_the_trunk_only() -> None:
    model = small()
    trunk, head = parameter_groups(model, 0.3, trunk_lr_scale=0.1)
    assert (trunk["lr"], head["lr"]) == (pytest.approx(0.03), 0.3)
    ids = [id(each) for group in (trunk, head) for each in group["params"]]
    assert sorted(ids) == sorted(id(each) for each in model.parameters())
    assert {id(each) for each in head["params"]} == {id(model.head.weight), id(model.head.bias)}


def test_an_optimizer_moves_each_group_at_its_own_rate() -> None:
    model = small()
    optimizer = torch.optim.Adam(parameter_groups(model, 0.01, trunk_lr_scale=0.0), weight_decay=5e-4)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    model(torch.randn(5, 1, 32, 32)).square().mul(torch.arange(7)).sum().backward()
    optimizer.step()
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == name.startswith("trunk."), name


def test_a_negative_scale_is_refused() -> None:
    with pytest.raises(InputError, match="trunk_lr_scale must be at least 0"):
        parameter_groups(small(), 0.1, trunk_lr_scale=-1)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 32, 32), torch.zeros(1, 32, 32), torch.zeros(2, 1, 32, 32, dtype=torch.uint8)]
)
def test_images_of_another_kind_are_refused_with_what_to_pass(images: Tensor) -> None:
    with pytest.raises(InputError, match=r"pass floats \(B, 1, H, W\)"):
        small()(images)


def test_an_unknown_pooling_names_the_two() -> None:
    with pytest.raises(InputError, match="did you mean 'average'"):
        small(pooling="averag")


def test_an_embedding_needs_a_dimension() -> None:
    with pytest.raises(InputError, match="must be at least 1, got 0"):
        small(dim=0)


def test_a_state_dict_restores_the_model_exactly() -> None:
    images = torch.randn(3, 1, 32, 32)
    first, second = small(), small()
    first(images)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.eval()(images), second.eval()(images))
