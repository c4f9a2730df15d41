import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny import draw_photos, tiny_config
from xbm.errors import InputError
from xbm_app.data.feeds import DecodeFeed, ResidentFeed, StoreFeed
from xbm_app.data.images import Dataset, ImageSet, Protocol
from xbm_app.data.samplers import PKSampler, ShuffleSampler
from xbm_app.data.store import prepare
from xbm_app.train.config import Config, Data, override
from xbm_app.train.dataset import (
    AUGMENTATIONS,
    augmentation_of,
    begin_run,
    feed_of,
    flip_labels,
    hold_out,
    read_data,
    read_run,
    sampler_of,
    store_of,
)
from xbm_app.train.load import evaluate_run
from xbm_app.train.loop import train
from xbm_app.train.state import RunState, model_of


@pytest.fixture
def own(tmp_path) -> Path:
    """Photographs that a test may change."""
    return draw_photos(tmp_path / "my.photos", classes=8, each=3)


def contents(dataset: Dataset) -> list:
    sets = [dataset.train, dataset.protocols[0].query]
    return [(dataset.name, dataset.protocols[0].ks), *((s.name, list(s.paths), s.labels.tolist(), s.class_names) for s in sets)]


def test_the_split_is_written_and_names_every_image_once(own, tmp_path):
    dataset = begin_run(tiny_config(own), tmp_path / "run")
    rows = list(csv.DictReader((tmp_path / "run" / "split.csv").open()))
    assert sorted(row["path"] for row in rows) == sorted(str(path.relative_to(own)) for path in own.rglob("*.png"))
    train = {row["label"] for row in rows if row["split"] == "train"}
    tested = {row["label"] for row in rows if row["split"] == "test"}
    assert len(train) == len(tested) == 4 and not train & tested
    assert dataset.name == "my.photos" and dataset.train.name == "my.photos train"
    assert {row["path"] for row in rows if row["split"] == "train"} == set(dataset.train.paths)


def test_the_split_is_the_same_on_every_reading_and_in_every_run(own, tmp_path):
    first = contents(begin_run(tiny_config(own), tmp_path / "a"))
    assert contents(read_run(tiny_config(own), tmp_path / "a")) == first
    assert contents(begin_run(tiny_config(own, seed=5), tmp_path / "b")) == first
    assert contents(read_data(tiny_config(own).data)) == first  # and the same as without a file of its own
    assert (tmp_path / "a" / "split.csv").read_bytes() == (tmp_path / "b" / "split.csv").read_bytes()


def test_the_written_split_wins_over_what_came_later(own, tmp_path):
    config = tiny_config(own)
    before = contents(begin_run(config, tmp_path / "run"))
    for label in range(8):
        shutil.copytree(own / "class_00", own / f"new_{label}")
    assert contents(read_run(config, tmp_path / "run")) == before
    assert contents(read_data(config.data)) != before


def test_a_run_goes_on_and_is_scored_as_it_began_when_the_folder_has_grown(own, tmp_path):
    config = tiny_config(own, batch__size=4, optim__iterations=7)
    result = train(config, tmp_path / "run", quiet=True)
    for label in range(8):
        shutil.copytree(own / "class_00", own / f"new_{label}")
    again = train(override(config, {"optim.iterations": 9}), tmp_path / "run", resume=True, quiet=True)
    assert again["data"] == result["data"]
    assert evaluate_run(tmp_path / "run")["queries"] == result["queries"] == 12


def test_a_moved_folder_is_found_again(own, tmp_path):
    train(tiny_config(own, batch__size=4, optim__iterations=2), tmp_path / "run", quiet=True)
    before = evaluate_run(tmp_path / "run")
    own.rename(tmp_path / "moved")
    with pytest.raises(InputError, match="is missing"):
        evaluate_run(tmp_path / "run")
    assert evaluate_run(tmp_path / "run", tmp_path / "moved") == before


def test_a_table_is_written_down_too_and_not_needed_again(own, tmp_path):
    table = own / "list.csv"
    rows = [f"{path.relative_to(own)},{path.parent.name}" for path in sorted(own.rglob("*.png"))]
    table.write_text("\n".join(["path,label", *rows]) + "\n")
    config = tiny_config(table)
    first = contents(begin_run(config, tmp_path / "run"))
    table.unlink()
    assert contents(read_run(config, tmp_path / "run")) == first and first[0][0] == "list"


def test_broken_images_stop_a_run_before_it_begins(own, tmp_path, capsys):
    (own / "class_03" / "1.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"1 image is broken in .*: repair them, or add --skip-problems"):
        begin_run(tiny_config(own), tmp_path / "run")
    assert "class_03/1.png" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_skipped_images_stay_out_of_all_that_follows(own, tmp_path):
    dataset = read_data(Data(name="own", root=str(own)))
    bad, tested = dataset.train.paths[1], dataset.protocols[0].query.paths[4]
    (own / bad).write_bytes(b"no picture")
    (own / tested).write_bytes(b"no picture")
    config = tiny_config(own, data__skip_problems=True, batch__size=4, optim__iterations=2)
    result = train(config, tmp_path / "run", quiet=True)
    assert result["data"]["train_images"] == 11 and result["queries"] == 11
    scored = evaluate_run(tmp_path / "run")
    assert {name: scored[name] for name in ("recall@1", "queries")} == {name: result[name] for name in ("recall@1", "queries")}
    paths = read_run(config, tmp_path / "run").train.paths
    assert bad not in paths and len(paths) == 11


def made(classes: int, each: int = 2) -> Dataset:
    labels = np.repeat(np.arange(classes), each)
    pixels = np.zeros((len(labels), 4, 4), np.uint8)
    images = ImageSet("made train", labels, [f"class {k}" for k in range(classes)], pixels=pixels)
    return Dataset("made", images, (Protocol("test", images, (1, 2)),))


def test_held_out_classes_are_disjoint_and_complete():
    held = hold_out(made(10), 0.3)
    kept, scored = set(held.train.class_names), set(held.protocols[0].query.class_names)
    assert len(kept) == 7 and len(scored) == 3 and not kept & scored
    assert len(held.train) == 14 and len(held.protocols[0].query) == 6
    assert held.protocols[0].name == "held-out" and held.protocols[0].ks == (1, 2) and len(held.protocols) == 1
    assert np.array_equal(np.unique(held.train.labels), np.arange(7))


def test_held_out_classes_are_the_same_for_every_seed_and_order(photos, tmp_path):
    chosen = [
        set(begin_run(tiny_config(photos, data__holdout=0.4, seed=seed), tmp_path / str(seed)).protocols[0].query.class_names)
        for seed in (0, 1)
    ]
    assert chosen[0] == chosen[1] and len(chosen[0]) == 2
    turned = made(10)
    order = np.arange(20)[::-1]
    images = ImageSet("made train", 9 - turned.train.labels[order], turned.train.class_names[::-1], pixels=turned.train.pixels)
    other = Dataset("made", images, turned.protocols)
    assert set(hold_out(made(10), 0.3).train.class_names) == set(hold_out(other, 0.3).train.class_names)


def test_folds_hold_out_different_classes():
    folds = [hold_out(made(10), 0.3, fold) for fold in range(3)]
    scored = [set(each.protocols[0].query.class_names) for each in folds]
    assert [len(each) for each in scored] == [3, 3, 3] and len(set().union(*scored)) == 9
    assert all(not set(each.train.class_names) & names and len(each.train) == 14 for each, names in zip(folds, scored))
    first = hold_out(made(10), 0.3)
    assert (first.train.class_names, first.train.labels.tolist()) == (
        folds[0].train.class_names,
        folds[0].train.labels.tolist(),
    )
    with pytest.raises(InputError, match=r"data\.fold must be less than 3"):
        hold_out(made(10), 0.3, 3)


@pytest.mark.parametrize("share", [0.1, 0.95, 1.0, 2.0])
def test_a_share_that_leaves_too_few_classes_is_refused(share):
    with pytest.raises(InputError, match=f"data.holdout={share} of 10 classes leaves fewer than 2"):
        hold_out(made(10), share)


@pytest.mark.parametrize("classes", [4, 5, 7, 9, 10, 33])
def test_the_share_that_is_advised_instead_works(classes):
    with pytest.raises(InputError, match=r"try [\d.]+$") as error:
        hold_out(made(classes), 0.01)
    assert hold_out(made(classes), float(str(error.value).split()[-1])).train.num_classes >= 2


def test_too_few_classes_to_hold_any_out_are_refused():
    with pytest.raises(InputError, match=r"at least 4 training classes, got 3: set it to 0"):
        hold_out(made(3), 0.5)


def test_test_classes_are_never_held_out(photos):
    dataset = read_data(Data(name="own", root=str(photos)))
    held = hold_out(dataset, 0.4)
    tested = set(dataset.protocols[0].query.class_names)
    assert not tested & (set(held.train.class_names) | set(held.protocols[0].query.class_names))


def test_a_store_serves_a_part_of_what_it_holds(own, tmp_path):
    dataset = read_data(Data(name="own", root=str(own)))
    store = prepare(dataset.train, tmp_path / "store", resize=16, quiet=True)
    data = Data(name="own", root=str(own), store=str(store), holdout=0.5)
    held = hold_out(dataset, 0.5)
    for images in (held.train, held.protocols[0].query):
        part = store_of(images, data)
        assert np.array_equal(part.labels, images.labels)
        assert all(np.array_equal(part.view(k), np.asarray(images.open(k))) for k in range(len(images)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Data(name="birds"), "unknown data set 'birds'"),
        (Data(name="car"), "did you mean 'cars'"),
        (Data(name="cars"), r"pass --root DIR \(data.root\)"),
        (Data(name="own"), r"pass --data DIR \(data.root\)"),
        (Data(name="own", root="/no/such/folder"), "/no/such/folder is not a folder"),
        (Data(name="own", root="/no/such/list.csv"), "/no/such/list.csv is missing"),
    ],
)
def test_data_that_cannot_be_read_is_one_sentence(data, message):
    with pytest.raises(InputError, match=message) as error:
        read_data(data)
    assert "\n" not in str(error.value)


def test_as_many_labels_are_flipped_as_asked_and_to_other_classes_that_are_there():
    right = made(10).train
    wrong = flip_labels(right, 0.3)
    assert (wrong.labels != right.labels).sum() == round(0.3 * len(right)) and wrong.labels.max() < 10
    assert wrong.class_names == right.class_names and (flip_labels(right, 0.3).labels == wrong.labels).all()
    assert (flip_labels(right, 0.0).labels == right.labels).all()
    with pytest.raises(InputError, match=r"data\.noise must satisfy 0 ≤ noise < 1, got 1\.5"):
        flip_labels(right, 1.5)
    with pytest.raises(InputError, match="must satisfy 0 ≤ noise < 1"):
        flip_labels(right, 1.0)
    with pytest.raises(InputError, match="at least 2 training classes, got 1"):
        flip_labels(made(1).train, 0.5)
    assert (flip_labels(made(1).train, 0.0).labels == 0).all()


def test_held_out_and_test_classes_keep_their_labels_and_the_training_feed_has_the_wrong_ones(own, tmp_path):
    config = tiny_config(own, data__holdout=0.5)
    noisy = tiny_config(own, data__holdout=0.5, data__noise=0.5)
    right, wrong = begin_run(config, tmp_path / "a"), begin_run(noisy, tmp_path / "b")
    assert (wrong.protocols[0].query.labels == right.protocols[0].query.labels).all()
    assert (wrong.train.labels != right.train.labels).sum() == round(0.5 * len(right.train))
    store = prepare(read_data(config.data).train, tmp_path / "store", resize=16, quiet=True)
    stored = store_of(wrong.train, override(noisy, {"data.store": str(store)}).data)
    assert stored.labels.tolist() == wrong.train.labels.tolist()


# ---------------------------------------------------------------- batches


@pytest.fixture
def run(photos, tmp_path):
    def build(name: str = "run", **changes) -> RunState:
        config = tiny_config(photos, **changes)
        return RunState(config, begin_run(config, tmp_path / name), tmp_path / name)

    return build


def test_a_step_has_a_batch_of_the_sampler_from_any_start(run):
    data = run().data
    expected = [data.sampler.batch(step).tolist() for step in range(17)]
    for start in (0, 5, 16, 17):
        assert [(step, ids.tolist()) for step, _, _, ids in data.batches(start)] == list(enumerate(expected))[start:]


def test_labels_and_images_belong_to_the_ids(run):
    state = run()
    for step, images, labels, ids in state.data.batches(14):
        assert torch.equal(labels, torch.from_numpy(state.dataset.train.labels)[ids])
        assert torch.equal(images, state.data.feed.train(ids.numpy(), step))


@pytest.mark.parametrize(("updates", "parts"), [(3, 1), (1, 2), (2, 3)])
def test_a_step_with_several_batches_takes_them_in_order(run, updates, parts):
    data = run(memory__updates_per_step=updates, batch__accumulate=parts, optim__iterations=4).data
    n = updates * parts
    assert data.batches_per_step == n
    assert [ids.tolist() for _, _, _, ids in data.batches(1)] == [data.sampler.batch(k).tolist() for k in range(n, 4 * n)]


def test_without_memory_nothing_extra_is_read(run):
    state = run(memory__ratio=0.0, memory__updates_per_step=5)
    assert state.memory is None and state.data.batches_per_step == 1
    assert len(list(state.data.batches(10))) == 7


@pytest.mark.parametrize("size", [5, 7, 36, 64])
def test_random_batches_have_each_image_once_in_views_that_training_never_shows(run, size):
    state = run(batch__size=size, batch__sampler="shuffle") if size < 64 else run()
    data, labels = state.data, torch.from_numpy(state.dataset.train.labels)
    data.config = tiny_config(state.config.data.root, batch__size=size)
    batches = list(data.random_batches(data.random_indices()))
    ids = torch.cat([ids for _, _, ids in batches])
    assert sorted(ids.tolist()) == list(range(36)) and ids.tolist() != list(range(36))
    assert all(1 < len(batch[2]) <= size for batch in batches)  # batch norm fails on a single image
    assert torch.equal(torch.cat([labels for _, labels, _ in batches]), labels[ids])
    views = [data.feed.train(batches[0][2].numpy(), step) for step in (-1, *range(17))]
    assert torch.equal(batches[0][0], views[0]) and not any(torch.equal(batches[0][0], view) for view in views[1:])


def config(**changes):
    return override(Config(), {name.replace("__", "."): value for name, value in changes.items()})


@pytest.mark.parametrize("kind", ["pk", "shuffle"])
def test_the_ranks_samplers_share_the_batches_of_one(kind, photos):
    chosen = config(batch__size=6, batch__per_class=2, batch__sampler=kind)
    images = read_data(tiny_config(photos).data).train
    for k in (0, 3):
        parts = [sampler_of(images, chosen, rank, 3).batch(k) for rank in range(3)]
        assert np.concatenate(parts).tolist() == sampler_of(images, chosen).batch(k).tolist()


def test_samplers():
    images = ImageSet("made", np.repeat(np.arange(5), 3), list("abcde"), pixels=np.zeros((15, 4, 4), np.uint8))
    sampler = sampler_of(images, config(batch__size=6, batch__per_class=2))
    assert isinstance(sampler, PKSampler) and len(np.unique(images.labels[sampler.batch(3)])) == 3
    assert isinstance(sampler_of(images, config(batch__size=6, batch__sampler="shuffle")), ShuffleSampler)
    with pytest.raises(InputError, match=r"batch.size=7 must be a multiple of batch.per_class=2"):
        sampler_of(images, config(batch__size=7, batch__per_class=2))
    with pytest.raises(InputError, match="did you mean 'shuffle'"):
        sampler_of(images, config(batch__sampler="shufle"))


def test_the_feed_suits_the_set(photos, tmp_path):
    chosen = tiny_config(photos)
    images = read_data(chosen.data).train
    augmentation = augmentation_of(chosen, model_of(chosen))

    def feed(of=images, **changes):
        return feed_of(of, tiny_config(photos, **changes), augmentation, torch.device("cpu"))

    assert type(feed()) is DecodeFeed
    pixels = np.stack([np.asarray(images.open(k)) for k in range(len(images))])
    assert type(feed(ImageSet("made", images.labels, images.class_names, pixels=pixels))) is ResidentFeed
    store = str(prepare(images, tmp_path / "store", resize=16, quiet=True))
    assert type(feed(data__store=store)) is StoreFeed
    assert type(feed(data__store=store, data__feed="resident")) is ResidentFeed
    assert type(feed(data__store=store, data__feed="decode")) is DecodeFeed
    batches = [feed(data__store=s, data__feed=f).train(np.array([5, 2]), 3) for s, f in ((store, "store"), (None, "decode"))]
    assert torch.equal(*batches)
    with pytest.raises(InputError, match="create a store with `xbm prepare`"):
        feed(data__feed="store")
    with pytest.raises(InputError, match="did you mean 'resident'"):
        feed(data__feed="residnt")


def test_augmentations():
    model = model_of(config(model__trunk="small", model__weights="none"))
    kinds = {name: augmentation_of(config(data__augmentation=name), model) for name in AUGMENTATIONS}
    assert {name: (a.kind, a.flip, a.padding, a.channels) for name, a in kinds.items()} == {
        "paper": ("crop", True, 0, 1), "official": ("resized_crop", True, 0, 1), "shift": ("shift", False, 14, 1),
        "strong": ("resized_crop", True, 0, 1), "none": ("none", False, 0, 1),
    }  # fmt: skip
    assert [name for name, a in kinds.items() if a.strong] == ["strong"]
    assert kinds["paper"].resize == 256 and kinds["paper"].crop == 224
    with pytest.raises(InputError, match="did you mean 'paper'"):
        augmentation_of(config(data__augmentation="papr"), model)
