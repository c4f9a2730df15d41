"""The losses that a config names: ours, and those of pytorch-metric-learning."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml

from tests.tiny import tiny_config
from xbm.errors import InputError
from xbm.losses import ContrastiveLoss, MetricLearningLoss, MultiSimilarityLoss
from xbm.memory import CrossBatchMemory
from xbm_app.train import losses
from xbm_app.train.config import Config, from_dict, override, to_dict
from xbm_app.train.dataset import begin_run
from xbm_app.train.loop import train
from xbm_app.train.losses import check_name, losses_of, pair_loss, takes_memory
from xbm_app.train.metrics import read_metrics
from xbm_app.train.state import RunState

CLASSES, DIM = 6, 5


def config(**changes):
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return override(Config(), {"model.dim": DIM, "memory.ratio": 0.0, **named})


def built(name, **options):
    """The object of pytorch-metric-learning that a config with these options trains."""
    return losses_of(config(loss__name=f"pml/{name}", loss__options=options), CLASSES)[0].loss.loss


def test_the_losss_settings_reach_it():
    loss = pair_loss(config(loss__options={"margin": 0.3}, loss__reduction="mean", loss__exclude="instance"))
    assert isinstance(loss, ContrastiveLoss) and (loss.margin, loss.reduction, loss.exclude) == (0.3, "mean", "instance")
    assert isinstance(pair_loss(config(loss__name="multi_similarity")), MultiSimilarityLoss)
    batch, memory = losses_of(config(memory__ratio=1.0, memory__reduction="balanced"), CLASSES)
    assert (batch.reduction, memory.reduction) == ("sum", "balanced")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss__name": "contrastiv"}, "unknown loss 'contrastiv': did you mean 'contrastive'"),
        ({"loss__options": {"marign": 0.3}}, "unknown option of the contrastive loss 'marign': did you mean 'margin'"),
        ({"loss__options": {"engine": "triton"}}, "unknown option of the contrastive loss 'engine'"),
        ({"loss__options": {"margin": "wide"}}, "margin must be a finite number, got 'wide'"),
        ({"loss__reduction": "men"}, "did you mean 'mean'"),
        ({"loss__name": "pml/ProxyAncorLoss"}, "unknown loss 'pml/ProxyAncorLoss': did you mean 'pml/ProxyAnchorLoss'"),
        ({"loss__name": "pml/VICRegLoss"}, "unknown loss 'pml/VICRegLoss'"),
        ({"loss__name": "pml/"}, "unknown loss 'pml/'"),
        (
            {"loss__name": "pml/ProxyAnchorLoss", "loss__options": {"alhpa": 3}},
            r"unknown option of the pml/ProxyAnchorLoss loss 'alhpa': did you mean 'alpha'\? \(alpha, margin\)",
        ),
        ({"loss__name": "pml/ProxyAnchorLoss", "loss__options": {"num_classes": 3}}, "unknown option .* 'num_classes'"),
        ({"loss__name": "pml/ProxyAnchorLoss", "loss__options": {"alpha": "big"}}, "alpha in loss.options must be a number"),
        ({"loss__name": "pml/ProxyAnchorLoss", "loss__options": {"alpha": True}}, "alpha in loss.options must be a number"),
        ({"loss__name": "pml/MarginLoss", "loss__options": {"learn_beta": 1}}, "learn_beta in loss.options must be true or"),
        ({"loss__name": "pml/PNPLoss", "loss__options": {"variant": "Z"}}, "pml/PNPLoss refuses loss.options=.*variant=Z"),
        ({"loss__name": "pml/SoftTripleLoss", "loss__options": {"centers_per_class": 1.5}}, "pml/SoftTripleLoss refuses"),
        (
            {"loss__name": "pml/RankedListLoss"},
            "pml/RankedListLoss needs values for margin and Tn: set them, such as --set loss.options.margin=1 --set",
        ),
        (
            {"loss__name": "pml/ProxyAnchorLoss", "memory__ratio": 0.5},
            "pml/ProxyAnchorLoss compares anchors only with its own proxies, so a memory has no effect: set memory.ratio=0",
        ),
        (
            {"loss__name": "pml/FastAPLoss", "memory__ratio": 1},
            "compares anchors only with the batch, so a memory has no effect",
        ),
        (
            {"loss__name": "pml/TripletMarginLoss", "loss__options": {"swap": True}, "memory__ratio": 1},
            "compares anchors only with the batch, so a memory has no effect",
        ),
    ],
)
def test_losses_that_cannot_be_are_refused(changes, message):
    with pytest.raises(InputError, match=message) as caught:
        losses_of(config(**changes), CLASSES)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------ those of pytorch-metric-learning

OFFERED = sorted(
    name
    for name, kind in vars(pml).items()
    if inspect.isclass(kind) and issubclass(kind, pml.BaseMetricLossFunction)
    if name not in ("BaseMetricLossFunction", "GenericPairLoss", "ManifoldLoss", "VICRegLoss")
)
NEEDED = {"RankedListLoss": {"margin": 0.4, "Tn": 1.0}}


@pytest.mark.parametrize("name", OFFERED)
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # their HistogramLoss
def test_every_one_is_built_with_the_sizes_of_the_data_and_the_model(name):
    check_name(f"pml/{name}")
    loss_fn, other = losses_of(config(loss__name=f"pml/{name}", loss__options=NEEDED.get(name, {})), CLASSES)
    assert loss_fn is other and type(loss_fn.loss.loss) is getattr(pml, name)
    v, labels = F.normalize(torch.randn(CLASSES, DIM)), torch.arange(CLASSES) // 2
    value, stats = loss_fn(v, labels, ids=torch.arange(CLASSES), return_stats=True)
    assert value.isfinite() and stats.valid_negatives.tolist() == [0] * CLASSES and stats.read()
    assert torch.equal(value, loss_fn(v, labels, ids=torch.arange(CLASSES)))
    for parameter in loss_fn.parameters():
        assert {DIM} <= {*parameter.shape} and any(size % CLASSES == 0 for size in parameter.shape)
    assert takes_memory(f"pml/{name}") is MetricLearningLoss.takes_memory(getattr(pml, name))


def test_the_losses_with_parameters_are_these():
    learned = [
        name
        for name in OFFERED
        if [*losses_of(config(loss__name=f"pml/{name}", loss__options=NEEDED.get(name, {})), 6)[0].parameters()]
    ]
    assert learned == [
        "ArcFaceLoss", "CosFaceLoss", "LargeMarginSoftmaxLoss", "NormalizedSoftmaxLoss", "P2SGradLoss", "ProxyAnchorLoss",
        "ProxyNCALoss", "SoftTripleLoss", "SphereFaceLoss", "SubCenterArcFaceLoss",
    ]  # fmt: skip


def test_options_reach_them_in_the_kind_that_they_need():
    loss = built("ProxyAnchorLoss", alpha=16, margin=0.2)
    assert (loss.alpha, loss.margin, loss.num_classes, tuple(loss.proxies.shape)) == (16, 0.2, CLASSES, (CLASSES, DIM))
    assert tuple(built("SoftTripleLoss", centers_per_class=3).fc.shape) == (DIM, 3 * CLASSES)
    assert tuple(built("SubCenterArcFaceLoss", sub_centers=2, margin=20.5).W.shape) == (DIM, 2 * CLASSES)
    assert built("DynamicSoftMarginLoss", num_bins=7).hist_.shape == (7,)
    assert built("ProxyNCALoss", softmax_scale=3).softmax_scale == 3  # an argument of its base
    assert built("CosFaceLoss", scale=8.5).scale == 8.5
    assert built("PNPLoss", variant="Ds").variant == "Ds"
    beta = built("MarginLoss", learn_beta=True, num_classes=CLASSES, beta=1.5).beta
    assert beta.requires_grad and beta.tolist() == [1.5] * CLASSES
    assert built("SignalToNoiseRatioContrastiveLoss", neg_margin=0.5).neg_margin == 0.5


def test_options_survive_the_way_through_a_file():
    chosen = config(loss__name="pml/PNPLoss", loss__options="{variant: Ds, alpha: 4, b: 1e-3}")
    assert chosen.loss.options == {"variant": "Ds", "alpha": 4.0, "b": 1e-3} and from_dict(to_dict(chosen)) == chosen


def test_one_that_takes_a_memory_is_trained_on_it():
    loss_fn, _ = losses_of(config(loss__name="pml/ContrastiveLoss", memory__ratio=1.0, loss__exclude="copy"), CLASSES)
    memory, labels, ids = CrossBatchMemory(6, DIM), torch.arange(6) // 2, torch.arange(6)
    v = F.normalize(torch.randn(6, DIM))
    memory.enqueue(v, labels, ids)
    direct = MetricLearningLoss(pml.ContrastiveLoss(), exclude="copy")(v, labels, memory, ids=ids)
    assert torch.equal(loss_fn(v, labels, memory, ids=ids), direct) and direct > 0


def test_the_package_is_optional(monkeypatch):
    monkeypatch.setattr(losses, "THEIRS", "no_such_package")
    assert takes_memory("contrastive") and losses_of(config(), CLASSES)
    for call in (check_name, takes_memory, lambda name: losses_of(config(loss__name=name), CLASSES)):
        with pytest.raises(InputError) as caught:
            call("pml/ProxyAnchorLoss")
        assert str(caught.value) == "this needs the package no_such_package: pip install 'xbm[metric-learning]'"


def test_a_run_with_proxies_logs_no_valid_pairs(photos, tmp_path):
    changes = {"loss__name": "pml/ProxyAnchorLoss", "memory__ratio": 0.0, "optim__iterations": 10}
    result = train(tiny_config(photos, **changes), tmp_path / "run", quiet=True)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    assert 0 <= result["recall@1"] <= 1 and all(row["loss"] > 0 for row in rows)
    assert all(row["valid_negatives_batch"] != row["valid_negatives_batch"] for row in rows)  # NaN: not measured


def test_its_loss_falls(photos, tmp_path):
    rates = {"optim__iterations": 60, "optim__decay_at": (), "log__every": 10}
    config = tiny_config(photos, loss__name="pml/ProxyAnchorLoss", memory__ratio=0.0, loss__lr_factor=10.0, **rates)
    train(config, tmp_path / "run", quiet=True)
    first, *_, last = (row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.csv"))
    assert last < 0.8 * first


def test_seeds_decide_the_proxies_and_leave_the_model_alone(photos, tmp_path):
    def build(name, **changes):
        chosen = tiny_config(photos, memory__ratio=0.0, **changes)
        return RunState(chosen, begin_run(chosen, tmp_path / name), tmp_path / name)

    plain, one = build("plain"), build("one", loss__name="pml/ProxyAnchorLoss")
    again, other = (build(f"seed {seed}", loss__name="pml/ProxyAnchorLoss", seed=seed) for seed in (0, 1))
    assert torch.equal(plain.model.head.weight, one.model.head.weight)
    (a,), (b,), (c,) = (list(run.loss_fn.parameters()) for run in (one, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)
