"""MemoryRankingLoss in sentence-transformers itself: equal values, trained by its trainer, and resumed bit for bit."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from xbm import InputError
from xbm.integrations import MemoryRankingLoss
from xbm.integrations.sentence_transformers_loss import others, text_hash


@pytest.fixture(scope="module")
def scene():
    """Imported here: sentence-transformers takes some 20 s to import, which should not happen in every worker."""
    for package in ("sentence_transformers", "datasets", "accelerate"):
        pytest.importorskip(package)
    return import_module("tests.xbm.integrations.sentence_scene")


@pytest.fixture(scope="module")
def bert(scene, tmp_path_factory):
    return scene.write_bert(tmp_path_factory.mktemp("bert") / "model")


# ------------------------------------------------------------------ its value is theirs


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [2, 3, 4])
def test_with_an_empty_memory_it_equals_their_loss(scene, bert, columns, symmetric):
    """In train mode, with the same dropout, and in float64 to see any difference."""
    model = scene.new_model(bert).double().train()
    kinds = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"} if symmetric else {}
    theirs = scene.MultipleNegativesRankingLoss(model, **kinds)
    mine = MemoryRankingLoss(model, size=50, symmetric=symmetric)
    found = []
    for loss in (theirs, mine):
        torch.manual_seed(5)
        value = loss(scene.tokens(model, scene.pairs(9, columns)), None)
        found.append((value, torch.autograd.grad(value, [*model.parameters()], allow_unused=True)))
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-12)
    compared = [(a, b) for a, b in zip(found[0][1], found[1][1]) if a is not None]
    assert len(compared) > 30 and all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in compared)
    assert len(mine.documents) == 9


@pytest.mark.parametrize("columns", [2, 3])
def test_a_full_memory_is_a_longer_column_of_documents(scene, bert, columns):
    """Their loss, with the texts of past batches among the documents of each batch; the model does not change between."""
    model = scene.new_model(bert).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    theirs, mine = scene.MultipleNegativesRankingLoss(model), MemoryRankingLoss(model, size=14, dtype=torch.float64)
    rows, past = scene.pairs(30, columns), []
    for start in (0, 10, 20):
        batch = rows.select(range(start, start + 10))
        embeddings = [model(column)["sentence_embedding"] for column in scene.tokens(model, batch)]
        past = past[-14:]
        documents = torch.cat([*embeddings[1:], *past])  # MNRL takes any number of documents after the positives
        S = 20 * F.normalize(embeddings[0]) @ F.normalize(documents).T
        expected = F.cross_entropy(S, torch.arange(10))
        if not past:
            assert torch.allclose(theirs(scene.tokens(model, batch), None), expected)
        assert torch.allclose(mine(scene.tokens(model, batch), None), expected, rtol=1e-9)
        past += [row[None].detach() for row in embeddings[1]]


def test_a_text_is_recognized_in_batches_of_other_lengths_and_columns(scene, bert):
    model = scene.new_model(bert)
    loss = MemoryRankingLoss(model.train(), size=50)
    first = scene.Dataset.from_dict({"a": ["word1 word2", "word3"], "p": ["word4 word5", "word6 word7"]})
    later = scene.Dataset.from_dict({"a": ["word8 " * 9, "word4 word5"], "p": ["word9", "word6 word7"]})
    loss(scene.tokens(model, first), None)
    hashes = torch.cat([text_hash(column, loss.token_kinds) for column in scene.tokens(model, later)])
    assert len(others(loss.documents, hashes).labels) == 0


def test_a_text_is_recognized_after_any_prompt_or_none(scene, bert):
    model = scene.new_model(bert)
    if not hasattr(model, "preprocess"):
        pytest.skip("before version 6, the length of a prompt is stated for few models")
    loss = MemoryRankingLoss(model, size=50)
    found = [
        text_hash(model.preprocess(["word5 word6", "word7", ""], prompt=prompt), loss.token_kinds).tolist()
        for prompt in (None, "word1 ", "word2 word3: ")
    ]
    assert found[0] == found[1] == found[2] and len({*found[0]}) == 3


def test_the_trainer_passes_prompts_on_to_the_loss(scene, bert, tmp_path):
    """The same texts in every batch, after other prompts: all of the memory is left out."""
    rows = scene.Dataset.from_dict({"anchor": ["word1 word2", "word3"], "positive": ["word4", "word5 word6"]})
    settings = scene.SentenceTransformerTrainingArguments(
        str(tmp_path), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no",
        per_device_train_batch_size=2, prompts={"anchor": "word8 word9: ", "positive": "word7 "},
    )  # fmt: skip
    model = scene.new_model(bert)
    if not hasattr(model, "preprocess"):
        pytest.skip("before version 6, the length of a prompt is stated for few models")
    loss = MemoryRankingLoss(model, size=50)
    scene.SentenceTransformerTrainer(model, settings, rows, loss=loss).train()
    assert len(loss.documents) == 4
    plain = torch.cat([text_hash(column, loss.token_kinds) for column in scene.tokens(model, rows)])
    assert len(others(loss.documents, plain).labels) == 0


def test_a_model_that_truncates_trains_on_whole_embeddings(scene, bert):
    model = scene.new_model(bert, truncate_dim=5)
    loss = MemoryRankingLoss(model.train(), size=50)
    loss(scene.tokens(model, scene.pairs(4)), None)
    assert loss.documents.dim == 16 and model.truncate_dim == 5


def test_static_embeddings_work_too(scene):
    from examples import sentence_pairs

    model = sentence_pairs.tiny_model().train()
    loss, theirs = MemoryRankingLoss(model, size=50), scene.MultipleNegativesRankingLoss(model)
    rows = scene.pairs(6, 3)
    assert torch.allclose(loss(scene.tokens(model, rows), None), theirs(scene.tokens(model, rows), None))
    assert len(loss.documents.labels.unique()) == 6


# ------------------------------------------------------------------ their trainer


@pytest.fixture(scope="module")
def uninterrupted(scene, bert, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "whole"
    trainer = scene.new_trainer(folder, bert)
    trainer.train()
    return trainer


def at_step_5(uninterrupted, tmp_path) -> Path:
    """A copy of the run as it was when its first checkpoint had been written."""
    folder = tmp_path / "run"
    shutil.copytree(Path(uninterrupted.args.output_dir) / "checkpoint-5", folder / "checkpoint-5")
    return folder


def differing(a: dict, b: dict) -> list[str]:
    assert a["tensors"].keys() == b["tensors"].keys()
    return [name for name, value in a["tensors"].items() if not torch.equal(value, b["tensors"][name])]


def test_training_fills_the_memory_and_learns_the_temperature(uninterrupted):
    loss, start = uninterrupted.loss, 20.0
    assert len(loss.documents) == len(loss.anchors) == 43 and int(loss.documents.clock) == 8
    assert loss.loss_fn.log_temperature.grad is None or loss.loss_fn.log_temperature.grad == 0
    assert abs(loss.scale - start) > 0.1


def test_a_resumed_run_ends_bit_for_bit_as_an_uninterrupted_one(scene, uninterrupted, bert, tmp_path):
    trainer = scene.new_trainer(at_step_5(uninterrupted, tmp_path), bert)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.train(resume_from_checkpoint=True)
    whole, resumed = scene.outcome(uninterrupted), scene.outcome(trainer)
    assert not differing(whole, resumed) and whole["losses"] == resumed["losses"] and len(whole["losses"]) == 8


def test_without_the_callback_a_resumed_run_differs(scene, uninterrupted, bert, tmp_path):
    trainer = scene.new_trainer(at_step_5(uninterrupted, tmp_path), bert, keep=False)
    trainer.train(resume_from_checkpoint=True)
    assert len(trainer.loss.documents) == 21
    assert differing(scene.outcome(uninterrupted), scene.outcome(trainer))


@pytest.mark.slow
def test_a_new_process_resumes_bit_for_bit(scene, uninterrupted, bert, tmp_path):
    folder, result = at_step_5(uninterrupted, tmp_path), tmp_path / "result.pt"
    given = json.dumps({"folder": str(folder), "bert": str(bert), "result": str(result)})
    around = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, scene.__file__, given], capture_output=True, text=True, env=around, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not differing(scene.outcome(uninterrupted), torch.load(result))


def test_a_checkpoint_elsewhere_is_found_by_the_argument(scene, uninterrupted, bert, tmp_path):
    elsewhere = at_step_5(uninterrupted, tmp_path / "elsewhere") / "checkpoint-5"
    trainer = scene.new_trainer(tmp_path / "run", bert, resume_from_checkpoint=str(elsewhere))
    trainer.train(resume_from_checkpoint=str(elsewhere))
    assert not differing(scene.outcome(uninterrupted), scene.outcome(trainer))


def test_a_checkpoint_without_the_memory_is_refused(scene, uninterrupted, bert, tmp_path):
    folder = at_step_5(uninterrupted, tmp_path)
    (folder / "checkpoint-5" / "loss.pt").unlink()
    with pytest.raises(
        InputError, match=r"resumes at step 5, but .* no loss\.pt of that step: .*leave out the callback"
    ) as error:
        scene.new_trainer(folder, bert).train(resume_from_checkpoint=True)
    assert "\n" not in str(error.value)


def test_a_checkpoint_is_small_and_complete(uninterrupted):
    folder = Path(uninterrupted.args.output_dir) / "checkpoint-5"
    saved = torch.load(folder / "loss.pt", weights_only=True)
    state = saved["loss"]
    assert saved["step"] == 5
    assert not [name for name in state if name.startswith("model")] and not [*folder.glob("*.part")]
    assert int(state["documents.count"]) == 35 and "loss_fn.log_temperature" in state


def test_checkpoints_of_the_model_alone_have_no_memory(scene, bert, tmp_path):
    scene.new_trainer(tmp_path / "run", bert, save_only_model=True, max_steps=5).train()
    assert not (tmp_path / "run" / "checkpoint-5" / "loss.pt").exists()


def test_evaluation_and_accumulated_gradients(scene, bert, tmp_path):
    trainer = scene.new_trainer(
        tmp_path / "run", bert, eval_strategy="steps", eval_steps=2, gradient_accumulation_steps=2, max_steps=4,
        loss_options={"size": 1000, "symmetric": False}, evaluated=scene.pairs(10),
        per_device_eval_batch_size=10,
    )  # fmt: skip
    trainer.train()
    assert int(trainer.loss.documents.clock) == 8 and len(trainer.loss.documents) == 7 * 8  # and nothing of the 10
    theirs = scene.MultipleNegativesRankingLoss(trainer.model.eval(), scale=trainer.loss.scale)
    expected = theirs(scene.tokens(trainer.model, trainer.eval_dataset), None).item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_one_file_for_each_loss(scene, bert, tmp_path):
    trainer = scene.new_trainer(tmp_path / "run", bert, keep=False, max_steps=5)
    other = MemoryRankingLoss(trainer.model, size=3)
    LossCheckpoint = type(trainer.loss.callback)
    for callback in (LossCheckpoint(trainer.loss, "first.pt"), LossCheckpoint(other, "second.pt")):
        trainer.add_callback(callback)
    trainer.train()
    folder = tmp_path / "run" / "checkpoint-5"
    assert len(torch.load(folder / "first.pt")["loss"]["documents.rows"]) == 43
    assert len(torch.load(folder / "second.pt")["loss"]["documents.rows"]) == 3


def test_two_losses_with_the_same_file_are_refused(scene, bert, tmp_path):
    """Each would write loss.pt, and on resuming both would get the rows of the latter."""
    model = scene.new_model(bert)
    losses = {name: MemoryRankingLoss(model, size=size) for name, size in (("a", 43), ("b", 43))}
    data = {name: scene.pairs() for name in losses}
    callbacks = [loss.callback for loss in losses.values()]
    settings = scene.SentenceTransformerTrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[])
    trainer = scene.SentenceTransformerTrainer(model, settings, data, loss=losses, callbacks=callbacks)
    with pytest.raises(InputError, match=r"the same loss\.pt .* with different names"):
        trainer.train()
    assert not len(losses["a"].documents)


def test_the_model_card_names_the_loss(uninterrupted):
    card = (Path(uninterrupted.args.output_dir) / "checkpoint-5" / "README.md").read_text()
    assert "MemoryRankingLoss" in card and "Cross-Batch Memory for Embedding Learning" in card and '"size": 43' in card
    assert "SupCon" not in card


def test_the_code_of_the_page_runs(scene, bert, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "integrations.md").read_text()
    (code,) = re.findall(
        r"```python\n(.*?)```", page.split("## How do I use a memory in sentence-transformers?")[1], re.DOTALL
    )[:1]
    monkeypatch.setattr("sentence_transformers.SentenceTransformer", lambda name: scene.new_model(bert))
    names: dict = {}
    exec(code, names)
    assert len(names["loss"].documents) == 2 and [*tmp_path.glob("run/checkpoint-*/loss.pt")]
