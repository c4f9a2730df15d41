"""Presets: Table 7 to the letter, the recipes, and every data set from its owners' files to its protocol's figures."""

import importlib.util
from itertools import count
from pathlib import Path

import pytest
import torch
from PIL import Image

from xbm.errors import InputError
from xbm.losses import LOSSES
from xbm_app.data.benchmarks import BENCHMARKS, read_benchmark
from xbm_app.models.trunks import TRUNKS
from xbm_app.train import state as task
from xbm_app.train.config import Config, check, flat, override
from xbm_app.train.load import evaluate_run
from xbm_app.train.loop import train
from xbm_app.train.losses import pair_loss
from xbm_app.train.presets import DATASETS, FACTS, MANY, RECIPES, preset, recipe_of

# The paper's Table 7, typed from it: learning rate, where it falls to a tenth, iterations, R_M, α, m.
TABLE_7 = {
    "sop": (3e-4, (24_000,), 34_000, 1.0, None, None),
    "inshop": (3e-4, (24_000,), 34_000, 0.2, None, None),
    "vehicleid": (1e-4, (30_000,), 50_000, 0.5, None, None),
    "deepfashion2": (3e-4, (20_000,), 36_000, 1.0, None, None),
    "cub": (3e-5, (), 1_400, None, 0.2, 0.9),
    "cars": (1e-4, (1_400,), 2_000, None, 0.1, 0.9),
}
SIX = sorted(TABLE_7)


@pytest.mark.parametrize("name", SIX)
def test_table_7(name):
    rate, decay, iterations, ratio, alpha, momentum = TABLE_7[name]
    config = preset(name)
    assert (config.optim.lr, config.optim.decay_at, config.optim.iterations) == (rate, decay, iterations)
    assert config.optim.weight_decay == 5e-4 and config.optim.schedule == "step"
    if ratio is not None:
        assert (config.memory.update, config.memory.ratio, config.memory.start) == ("queue", ratio, 1000)
    else:
        memory = task.memory_of(config, 13, torch.device("cpu"))
        assert (memory.update, memory.size, memory.alpha, memory.momentum) == ("backprop", 13, alpha, momentum)
        assert config.memory.start == 0


@pytest.mark.parametrize("name", SIX)
def test_the_rest_is_the_papers(name):
    config = preset(name)
    assert (config.data.resize, config.data.crop, config.data.augmentation) == (256, 224, "paper")
    assert (config.batch.size, config.batch.per_class, config.model.pooling) == (64, 4, "average")
    assert (config.model.trunk, config.model.dim, config.model.weights) == ("googlenet", 512, "imagenet")
    assert config.memory.fill and (config.memory.batch_weight, config.memory.weight) == (0.0, 1.0)
    assert (config.loss.name, config.loss.reduction, config.recipe, config.data.holdout) == ("contrastive", "sum", "paper", 0)
    assert pair_loss(config).margin == 0.5
    assert not config.model.freeze_batch_norm and config.model.trunk_lr == 1.0


def test_the_constants_that_the_paper_leaves_out():
    ms, triplet = (pair_loss(preset("sop", loss)) for loss in ("ms", "triplet"))
    assert (ms.alpha, ms.beta, ms.base, ms.epsilon) == (2.0, 40.0, 0.5, 0.1)
    assert triplet.margin == 0.1


@pytest.mark.parametrize("name", sorted(DATASETS))
@pytest.mark.parametrize("loss", ["contrastive", "triplet", "ms"])
@pytest.mark.parametrize(("trunk", "dim"), [("googlenet", 512), ("bn_inception", 512), ("resnet50", 128)])
def test_every_data_set_with_every_loss_and_every_trunk(name, loss, trunk, dim):
    config = preset(name, loss, trunk)
    check(config)
    assert config.preset == config.data.name == name
    assert (config.model.trunk, config.model.dim, config.model.weights) == (trunk, dim, "imagenet")
    assert config.loss.name == {"ms": "multi_similarity"}.get(loss, loss)
    rest = override(config, {"loss.name": "contrastive", "model.trunk": "googlenet", "model.dim": 512})
    assert rest == preset(name, "contrastive", "googlenet")  # nothing else differs


def test_all_data_sets_have_a_preset():
    assert set(DATASETS) == {*BENCHMARKS, "glyphs", "own"}


def changes(name: str) -> dict:
    paper, official = (flat(preset(name, recipe=recipe)) for recipe in ("paper", "official"))
    return {key: (paper[key], official[key]) for key in paper if paper[key] != official[key]}


def test_the_two_recipes_differ_as_the_design_says():
    assert changes("sop") == {
        "recipe": ("paper", "official"),
        "memory.batch_weight": (0.0, 1.0),  # memory only | in-batch + 1.0 × memory
        "memory.fill": (True, False),  # from images of the warm model | empty
        "memory.size": (None, 55_000),
        "optim.lr": (3e-4, 1e-4),
        "optim.schedule": ("step", "plateau"),
        "optim.decay_at": ((24_000,), ()),
        "optim.iterations": (34_000, 35_000),
        "data.augmentation": ("paper", "official"),
        "data.holdout": (0.0, 0.2),  # where the released code looks at the test list
        "log.evaluate_every": (0, 1000),
        "model.pooling": ("average", "max"),
        "model.dim": (512, 128),
        "model.head_init": ("uniform", "kaiming"),
    }
    # on Cars, Table 7 has 1e-4 too, no queue, and no warm-up
    assert changes("cars").keys() == changes("sop").keys() - {"optim.lr"} | {"memory.update", "memory.momentum", "memory.start"}
    assert preset("sop") == preset("sop", recipe="paper")
    model = task.model_of(preset("glyphs"))
    kinds = {recipe: task.augmentation_of(preset("sop", recipe=recipe), model) for recipe in RECIPES}
    assert (kinds["paper"].mode, kinds["paper"].kind) == ("square", "crop")
    assert (kinds["official"].mode, kinds["official"].kind) == ("shorter", "resized_crop")
    assert kinds["official"].scale == (0.2, 1.0)


@pytest.mark.parametrize("name", [*SIX, "own"])
def test_the_released_code_has_one_memory_for_all_data(name):
    for trunk in ("googlenet", "resnet50"):
        config = preset(name, trunk=trunk, recipe="official")
        check(config)
        memory = task.memory_of(config, 13, torch.device("cpu"))
        assert (memory.update, memory.size, memory.dim, len(memory)) == ("queue", 55_000, 128, 0)
        assert (config.memory.start, config.memory.batch_weight, config.memory.weight) == (1000, 1.0, 1.0)
        assert (config.optim.lr, config.optim.weight_decay, config.optim.iterations) == (1e-4, 5e-4, 35_000)
        assert (config.batch.size, config.batch.per_class, config.loss.reduction) == (64, 4, "sum")


@pytest.mark.parametrize("recipe", ["paper", "official"])
def test_every_fact_stands_beside_a_setting(recipe):
    assert set(FACTS[recipe]) <= flat(Config()).keys()
    silent = {"memory.ratio", "memory.momentum", "memory.alpha", "memory.doubt", "memory.reduction", "optim.decay_at"}
    assert RECIPES[recipe].keys() - silent <= FACTS[recipe].keys()


def test_own_data_are_large_from_so_many_images_on():
    slots, queue = (recipe_of("auto", "imagenet", "own", images) for images in (MANY - 1, MANY))
    assert slots["memory.update"] == "moving_average" and slots == recipe_of("auto", "imagenet", "own")
    assert (queue["memory.update"], queue["memory.doubt"], queue["memory.ratio"]) == ("queue", "keep", 1.0)
    assert queue == recipe_of("auto", "imagenet", "sop")  # as of any large data set that is remembered whole
    assert recipe_of("auto", "none", "own", MANY) == RECIPES["auto"]  # from scratch it is a queue anyway
    assert recipe_of("paper", "imagenet", "own", MANY) == {}


def test_auto_says_of_loss_and_memory_what_the_study_found_and_leaves_the_rest():
    for name in DATASETS:
        auto, paper = flat(preset(name, recipe="auto")), flat(preset(name))
        changed = {key for key in auto if auto[key] != paper[key]}
        assert {key.split(".")[0] for key in changed} <= {"recipe", "loss", "memory"}, name
        assert auto["memory.reduction"] == ("balanced" if auto["model.weights"] == "none" else None), name
        assert auto["memory.batch_weight"] == 1.0
        assert (auto["loss.reduction"], auto["memory.start"]) == ("sum", 0)
        keyed = auto["memory.update"] == "moving_average"
        assert (auto["memory.fill"], auto["memory.doubt"]) == ((True, "skip") if keyed else (False, "keep")), name


def test_auto_averages_the_views_of_an_image_where_the_trunk_is_pretrained():
    def kept(*given, **more):
        memory = preset(*given, recipe="auto", **more).memory
        return memory.update, memory.momentum, memory.ratio

    assert kept("cars") == kept("cub") == kept("own") == kept("glyphs", trunk="googlenet") == ("moving_average", 0.9, 1.0)
    assert kept("sop") == ("queue", None, 1.0) and kept("inshop", trunk="resnet50") == ("queue", None, 0.2)  # Table 7's
    assert kept("glyphs") == kept("cars", trunk="small") == kept("cars", weights="none") == ("queue", None, 1.0)


def test_the_recipes_meet_the_same_anchor_rule():
    assert {preset("sop", recipe=recipe).loss.exclude for recipe in RECIPES} == {"copy"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "car"}, "unknown preset 'car': did you mean 'cars'"),
        ({"name": "cars", "loss": "tripelt"}, "unknown loss 'tripelt': did you mean 'triplet'"),
        ({"name": "cars", "trunk": "googlenett"}, "unknown trunk 'googlenett': did you mean 'googlenet'"),
        ({"name": "cars", "recipe": "offical"}, "unknown recipe 'offical': did you mean 'official'"),
        ({"name": "glyphs", "recipe": "official"}, "recipe official is for photographs"),
    ],
)
def test_unknown_names_are_told_the_nearest(given, message):
    with pytest.raises(InputError, match=message):
        preset(**given)


def test_every_loss_and_trunk_there_is_can_be_asked_for():
    assert {preset("sop", loss).loss.name for loss in LOSSES} == set(LOSSES)
    assert {preset("sop", trunk=trunk).model.trunk for trunk in TRUNKS} == set(TRUNKS)
    assert preset("sop", trunk="timm/vit_tiny_patch16_224").model.dim == 512
    assert preset("own", trunk="small").model.weights == "none" and preset("glyphs").model.weights == "none"


def test_the_default_config_is_a_whole_one():
    check(Config())


# ---------------------------------------------------------------- every data set, as a miniature

_spec = importlib.util.spec_from_file_location("miniatures", Path(__file__).parents[1] / "data" / "benchmarks" / "conftest.py")
assert _spec is not None and _spec.loader is not None
miniatures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(miniatures)

SMALL = {"data.resize": 18, "data.crop": 16, "model.dim": 8, "model.weights": "none", "batch.size": 4, "batch.per_class": 2}
SHORT = {"device": "cpu", "optim.iterations": 3, "log.every": 1, "seed": 1}


def miniature(name: str, root: Path) -> Path:
    numbers = count(1)

    def draw(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = next(numbers)
        image = Image.new("RGB", (23, 19), (number * 37 % 256, number * 91 % 256, 40))
        image.paste((number * 53 % 256, 200, number * 11 % 256), (number % 17, number % 13, 20, 16))
        image.save(path)

    root.mkdir()
    miniatures.MAKERS[name](root, draw)
    return root


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
@pytest.mark.filterwarnings("ignore:.*have no relevant item")
def test_every_benchmark_trains_and_is_scored_by_its_own_protocols(tmp_path, name):
    root = miniature(name, tmp_path / name)
    loss = ("contrastive", "triplet", "ms")[len(name) % 3]
    start = {} if preset(name).memory.start == 0 else {"memory.start": 1}
    config = override(preset(name, loss, "small"), {**SMALL, **SHORT, **start, "data.root": str(root)})
    result = train(config, tmp_path / "run", quiet=True)
    dataset = read_benchmark(name, root)
    assert list(result["protocols"]) == [protocol.name for protocol in dataset.protocols]
    for protocol, scores in zip(dataset.protocols, result["protocols"].values()):
        assert {f"recall@{k}" for k in BENCHMARKS[name].ks} <= scores.keys()
        assert ("one_per_class/recall@1" in scores) is (protocol.one_per_class > 0)
        assert protocol.one_per_class == 0 or name == "vehicleid"
        assert scores["queries"] + scores["without_relevant"] == len(protocol.query)
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert int(state["memory"]["count"]) == max(1, round(config.memory.ratio * len(dataset.train)))
    assert evaluate_run(tmp_path / "run")["protocols"].keys() == result["protocols"].keys()


def test_glyphs_train_and_are_scored(tmp_path, monkeypatch):
    monkeypatch.setenv("XBM_CACHE", str(tmp_path / "cache"))
    short = {**SHORT, "data.resize": 16, "data.crop": 16, "memory.start": 1, "memory.ratio": 0.01}
    result = train(override(preset("glyphs"), short), tmp_path / "run", quiet=True)
    assert list(result["protocols"]) == ["test"] and 0 < result["recall@1"] < 0.9
    assert not (tmp_path / "run" / "split.csv").exists()


def test_every_recipe_runs(tmp_path):
    root = miniature("sop", tmp_path / "sop")
    for recipe in RECIPES:
        chosen = preset("sop", "contrastive", "small", recipe)
        few = {"optim.schedule": "step", "log.evaluate_every": 0, "data.holdout": 0} if recipe == "official" else {}
        config = override(chosen, {**SMALL, **SHORT, **few, "memory.start": 1, "data.root": str(root)})
        train(config, tmp_path / recipe, quiet=True)
        memory = torch.load(tmp_path / recipe / "checkpoints" / "last.pt", weights_only=True)["memory"]
        # two steps with memory; before them, with one recipe, two calls that filled it
        assert int(memory["clock"]) == {"auto": 2, "paper": 2 + 2, "official": 2}[recipe]


@pytest.mark.slow
@pytest.mark.parametrize("trunk", ["googlenet", "bn_inception", "resnet50", "efficientnet_lite0"])
def test_the_papers_trunks_train(tmp_path, trunk):
    root = miniature("cub", tmp_path / "cub")
    sizes = {"data.resize": 72, "data.crop": 64, "batch.size": 4, "batch.per_class": 2, "model.weights": "none"}
    config = override(preset("cub", "ms", trunk), {**SHORT, **sizes, "data.root": str(root)})
    result = train(config, tmp_path / "run", quiet=True)
    assert 0 <= result["recall@1"] <= 1 and config.model.dim == (128 if trunk == "resnet50" else 512)
    assert evaluate_run(tmp_path / "run")["recall@1"] == pytest.approx(result["recall@1"])
