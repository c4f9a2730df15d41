"""Every benchmark, as a miniature in its owners' layout, through reader, sampler, protocol and `xbm datasets check`."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from xbm.errors import InputError
from xbm.retrieval import score
from xbm_app.cli.datasets import app
from xbm_app.data import benchmarks
from xbm_app.data.benchmarks import BENCHMARKS, count, read_benchmark
from xbm_app.data.images import parts
from xbm_app.data.samplers import PKSampler

NAMES = sorted(BENCHMARKS)


@pytest.mark.parametrize("name", NAMES)
def test_labels_are_dense_and_every_image_opens(miniature, name):
    dataset = read_benchmark(name, miniature(name))
    assert dataset.name == name
    for images in parts(dataset).values():
        assert images.labels.dtype == np.int64
        assert images.labels.min() >= 0 and images.labels.max() < images.num_classes
        assert len(set(images.class_names)) == images.num_classes
        assert all(images.open(index).mode == "RGB" for index in range(len(images)))
    assert np.array_equal(np.unique(dataset.train.labels), np.arange(dataset.train.num_classes))


@pytest.mark.parametrize("name", NAMES)
def test_the_training_set_goes_through_the_sampler(miniature, name):
    train = read_benchmark(name, miniature(name)).train
    sampler = PKSampler(train.labels, classes_per_batch=2, images_per_class=2, seed=3)
    shown = np.concatenate([sampler.batch(step) for step in range(sampler.steps_per_epoch)])
    assert set(shown.tolist()) == set(range(len(train)))
    assert len(np.unique(train.labels[sampler.batch(0)])) == 2


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_that_know_the_class_score_one_and_those_that_do_not_score_less(miniature, name):
    for protocol in read_benchmark(name, miniature(name)).protocols:
        assert protocol.ks == BENCHMARKS[name].ks
        known = np.eye(protocol.query.num_classes, dtype=np.float32)
        searched = None if protocol.gallery is None else known[protocol.gallery.labels]
        assert score(protocol, known[protocol.query.labels], searched)["recall@1"] == 1.0
        turned = known[(protocol.query.labels + 1) % protocol.query.num_classes]
        if searched is not None:
            assert score(protocol, turned, searched)["recall@1"] < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_check_prints_the_counts_and_refuses_a_miniature(miniature, name):
    result = CliRunner().invoke(app, ["check", name, "--root", str(miniature(name))])
    assert isinstance(result.exception, InputError)
    part, release = next(iter(BENCHMARKS[name].release.items()))
    assert f"{part} has" in str(result.exception) and f"release has {release.images:,}" in str(result.exception)
    assert str(release) in result.stdout
    if BENCHMARKS[name].paper:
        assert str(BENCHMARKS[name].paper[part]) in result.stdout


@pytest.mark.parametrize("name", NAMES)
def test_check_accepts_a_copy_with_the_counts_of_the_release(miniature, name, monkeypatch):
    root = miniature(name)
    release = {part: count(images) for part, images in parts(read_benchmark(name, root)).items()}
    whole = replace(BENCHMARKS[name], release=release, missing=lambda dataset: [])
    monkeypatch.setitem(benchmarks.BENCHMARKS, name, whole)
    result = CliRunner().invoke(app, ["check", name, "--root", str(root)])
    assert result.exception is None, result.exception
    assert "every image opens" in result.stdout


def test_an_unknown_benchmark_is_told_the_nearest_name(tmp_path):
    with pytest.raises(InputError, match="did you mean 'vehicleid'"):
        read_benchmark("vehicle_id", tmp_path)


def test_a_root_that_is_no_folder_is_told_so(tmp_path):
    with pytest.raises(InputError, match="Stanford Online Products was unpacked in"):
        read_benchmark("sop", tmp_path / "nowhere")


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_root_is_one_sentence_that_names_the_folder(tmp_path, name):
    with pytest.raises(InputError) as error:
        read_benchmark(name, tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)
