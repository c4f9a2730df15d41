"""The loop, held against Algorithm 1: what is enqueued when, what is compared with what, what is written down."""

import inspect
import math

import pytest
import torch
from torch import nn

from tests.tiny import tiny_config
from tests.worlds import on_ranks
from xbm.distributed import Ranks
from xbm.errors import InputError
from xbm.losses import ContrastiveLoss
from xbm.memory import CrossBatchMemory
from xbm_app.files import locked, read_checkpoint
from xbm_app.train import loop, optimization, state
from xbm_app.train.config import override
from xbm_app.train.dataset import begin_run
from xbm_app.train.label_errors import IGNORED
from xbm_app.train.load import evaluate_run
from xbm_app.train.loop import train
from xbm_app.train.metrics import read_metrics
from xbm_app.train.state import RunState


class Witness:
    """Writes down what the loop asks of the memory and of the loss, in order."""

    def __init__(self, monkeypatch) -> None:
        self.events: list[tuple] = []
        enqueue, forward, update = CrossBatchMemory.enqueue, ContrastiveLoss.forward, loop.update_weights

        def enqueued(memory, embeddings, labels, ids=None, mask=None):
            self.events.append(("enqueue", ids.tolist(), embeddings.clone(), embeddings.requires_grad))
            enqueue(memory, embeddings, labels, ids, mask)

        def compared(loss, anchors, labels, memory=None, **rest):
            against = None if memory is None else (len(memory), memory.ids[-len(labels) :].tolist())
            self.events.append(("compare", rest["ids"].tolist(), anchors.detach().clone(), against, torch.is_grad_enabled()))
            value = forward(loss, anchors, labels, memory, **rest)
            self.events.append(("loss", value[0].detach().item()))
            return value

        def updated(run):
            self.events.append(("update", None if run.memory is None else len(run.memory)))
            update(run)

        monkeypatch.setattr(CrossBatchMemory, "enqueue", enqueued)
        monkeypatch.setattr(ContrastiveLoss, "forward", compared)
        monkeypatch.setattr(loop, "update_weights", updated)

    def steps(self) -> list[list[tuple]]:
        """The events of each iteration."""
        found: list[list[tuple]] = [[]]
        for event in self.events:
            found[-1].append(event)
            if event[0] == "update":
                found.append([])
        return found[:-1]


def test_the_loop_is_short_enough_to_read_at_once():
    assert len(inspect.getsource(loop).splitlines()) <= 220
    assert len(inspect.getsource(loop.run_loop).splitlines()) <= 50 and len(inspect.getsource(loop.learn).splitlines()) <= 40


def test_warm_up_compares_in_the_batch_only_and_leaves_the_memory_empty(photos, tmp_path, monkeypatch):
    witness = Witness(monkeypatch)
    train(tiny_config(photos, memory__start=3, memory__batch_weight=0.0, memory__fill=False), tmp_path / "run", quiet=True)
    steps = witness.steps()
    assert len(steps) == 17
    for step in steps[:3]:
        assert [event[0] for event in step] == ["compare", "loss", "update"]
        assert step[0][3] is None and step[0][4] and step[-1] == ("update", 0)


def test_then_it_enqueues_and_only_then_compares_with_the_memory(photos, tmp_path, monkeypatch):
    witness = Witness(monkeypatch)
    train(tiny_config(photos, memory__start=3, memory__batch_weight=0.0, memory__fill=False), tmp_path / "run", quiet=True)
    for number, step in enumerate(witness.steps()[3:], start=1):
        assert [event[0] for event in step] == ["compare", "loss", "enqueue", "compare", "loss", "update"]
        (_, ids, anchors, none, gradient), _, (_, written, rows, live), (_, compared, again, against, _), _, _ = step
        assert none is None and not gradient  # only looked at, for the count of negatives
        assert ids == written == compared and torch.equal(anchors, rows) and torch.equal(anchors, again) and not live
        assert against == (min(36, 8 * number), ids)  # the batch is in the bank, newest last


def test_the_memory_starts_from_all_images_when_filled(photos, tmp_path, monkeypatch):
    witness = Witness(monkeypatch)
    train(tiny_config(photos, memory__start=3, memory__ratio=0.5), tmp_path / "run", quiet=True)
    first = witness.steps()[3]
    filling = [event for event in first if event[0] == "enqueue"][:-1]
    assert sum(len(event[1]) for event in filling) >= 18
    compared = [event for event in first if event[0] == "compare"]
    assert [event[3] and event[3][0] for event in compared] == [None, 18]  # round(0.5 · 36), the batch among them


def test_a_memory_that_starts_at_once_has_no_warm_up(photos, tmp_path, monkeypatch):
    witness = Witness(monkeypatch)
    config = tiny_config(photos, memory__start=0, memory__update="backprop", optim__iterations=5)
    train(config, tmp_path / "run", quiet=True)
    assert all(event[3][0] == 36 for step in witness.steps() for event in step if event[0] == "compare" and event[3])


def test_without_memory_nothing_of_it_is_built(photos, tmp_path, monkeypatch):
    def never(*_, **__):
        raise AssertionError("a memory was built")

    monkeypatch.setattr(CrossBatchMemory, "__init__", never)
    train(tiny_config(photos, memory__ratio=0.0), tmp_path / "run", quiet=True)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["memory"] is None
    for row in read_metrics(tmp_path / "run" / "metrics.csv"):
        assert math.isnan(row["memory_loss"]) and math.isnan(row["valid_negatives_memory"]) and row["loss"] == row["batch_loss"]


@pytest.mark.parametrize(("in_batch", "against"), [(0.0, 1.0), (1.0, 1.0), (0.25, 2.0)])
def test_the_loss_is_the_weighted_sum(photos, tmp_path, monkeypatch, in_batch, against):
    witness = Witness(monkeypatch)
    weights = {"memory__batch_weight": in_batch, "memory__weight": against}
    train(tiny_config(photos, memory__start=2, log__every=1, optim__iterations=6, **weights), tmp_path / "run", quiet=True)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    for number, (step, row) in enumerate(zip(witness.steps(), rows)):
        losses = [event[1] for event in step if event[0] == "loss"]
        assert row["batch_loss"] == losses[0]
        if number < 2:
            assert row["loss"] == losses[0] and math.isnan(row["memory_loss"])
        else:
            assert row["memory_loss"] == losses[1]
            assert row["loss"] == pytest.approx(in_batch * losses[0] + against * losses[1], rel=1e-6)


def test_the_banks_ids_are_positions_in_the_training_set(photos, tmp_path):
    train(tiny_config(photos, data__holdout=0.4, batch__size=6), tmp_path / "run", quiet=True)
    memory = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["memory"]
    from xbm_app.train.dataset import read_run

    dataset = read_run(tiny_config(photos, data__holdout=0.4), tmp_path / "run")
    assert len(memory["row_ids"]) == len(dataset.train) == 24
    assert memory["row_ids"].min() >= 0 and memory["row_ids"].max() < 24
    assert memory["row_labels"].tolist() == dataset.train.labels[memory["row_ids"].numpy()].tolist()


def test_gradients_are_accumulated_as_their_mean(photos, tmp_path, monkeypatch):
    """Two batches a step without augmentation or batch statistics: the step that both together would make."""
    steps = []

    def remember(run):
        steps.append(run.model.head.weight.grad.clone())
        run.optimizer.zero_grad()

    monkeypatch.setattr(loop, "update_weights", remember)
    plain = {"memory__ratio": 0.0, "model__freeze_batch_norm": True, "data__augmentation": "none"}
    train(tiny_config(photos, **plain, optim__iterations=4), tmp_path / "one", quiet=True)
    train(tiny_config(photos, **plain, optim__iterations=2, batch__accumulate=2), tmp_path / "two", quiet=True)
    single, double = steps[:4], steps[4:]
    for k in range(2):
        torch.testing.assert_close(double[k], (single[2 * k] + single[2 * k + 1]) / 2)


def test_lines_are_means_since_the_last_and_the_last_iteration_has_one(photos, tmp_path):
    train(tiny_config(photos, log__every=1), tmp_path / "each", quiet=True)
    train(tiny_config(photos), tmp_path / "fifth", quiet=True)
    each, fifth = (read_metrics(tmp_path / name / "metrics.csv") for name in ("each", "fifth"))
    assert [row["step"] for row in each] == list(range(17)) and [row["step"] for row in fifth] == [4, 9, 14, 16]
    for row, (first, last) in zip(fifth, ((0, 5), (5, 10), (10, 15), (15, 17))):
        part = each[first:last]
        assert row["loss"] == pytest.approx(sum(e["loss"] for e in part) / len(part), rel=1e-12)
        assert row["lr"] == part[-1]["lr"] and row["mean_cosine"] == part[-1]["mean_cosine"]


def test_drift_is_written_where_it_can_be_told(photos, tmp_path):
    train(tiny_config(photos, optim__iterations=23), tmp_path / "run", quiet=True)
    rows = {row["step"]: row["drift_10"] for row in read_metrics(tmp_path / "run" / "metrics.csv")}
    assert [step for step, drift in rows.items() if not math.isnan(drift)] == [19]  # θ_20 against θ_10; θ_0 is not kept


def test_learning_rate_falls_as_told(photos, tmp_path):
    train(tiny_config(photos, log__every=1, optim__decay_at=(3, 11)), tmp_path / "run", quiet=True)
    rates = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert rates == pytest.approx([1e-3] * 3 + [1e-4] * 8 + [1e-5] * 6)


def test_choosing_scores_held_out_classes_when_due_and_keeps_the_best(photos, tmp_path):
    config = tiny_config(photos, data__holdout=0.4, log__evaluate_every=3, batch__size=6, optim__lr=3e-3)
    train(config, tmp_path / "run", quiet=True)
    rows = read_metrics(tmp_path / "run" / "metrics.csv")
    scored = {row["step"]: row["recall@1"] for row in rows if not math.isnan(row["recall@1"])}
    assert list(scored) == [2, 5, 8, 11, 14]  # also where no line of metrics was due
    assert [row["step"] for row in rows if not math.isnan(row["map@r"])] == list(scored)
    assert all(0 <= row["map@r"] <= row["recall@1"] for row in rows if row["step"] in scored)
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    precisions = {row["step"]: row["map@r"] for row in rows if row["step"] in scored}
    top = max(precisions.values())
    assert best["best"] == top and best["step"] - 1 == next(step for step, value in precisions.items() if value == top)
    assert read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["step"] == 17


def test_a_plateau_looks_at_held_out_classes_and_the_test_classes_score_the_result(photos, tmp_path, monkeypatch):
    looked = []
    score = loop.score
    monkeypatch.setattr(loop, "score", lambda run, which: looked.append([each.name for each in which]) or score(run, which))
    config = tiny_config(photos, data__holdout=0.4, log__evaluate_every=6, batch__size=6, optim__schedule="plateau")
    result = train(config, tmp_path / "run", quiet=True)
    assert looked == [["held-out"]] * 2 and list(result["protocols"]) == ["held-out", "test"]
    assert evaluate_run(tmp_path / "run")["protocols"] == result["protocols"]
    chosen = train(override(config, {"optim.schedule": "step"}), tmp_path / "step", quiet=True)
    assert list(chosen["protocols"]) == ["held-out"]  # a run that only chooses never meets the test classes


def test_held_out_images_are_loaded_once_however_often_they_are_scored(photos, tmp_path, monkeypatch):
    sets = []
    feed_of = state.feed_of
    monkeypatch.setattr(state, "feed_of", lambda images, *more: sets.append(len(images)) or feed_of(images, *more))
    train(tiny_config(photos, data__holdout=0.4, log__evaluate_every=3, batch__size=6), tmp_path / "run", quiet=True)
    assert len(sets) == 2  # the training images, and the held-out ones


def test_of_equal_scores_the_first_is_the_best(photos, tmp_path, monkeypatch):
    scores = iter((0.3, 0.5, 0.5, 0.4, 0.1))
    monkeypatch.setattr(loop, "score", lambda run, which: ({"held-out": {"recall@1": 0.1, "map@r": next(scores)}}, {}))
    train(tiny_config(photos, data__holdout=0.4, log__evaluate_every=3, batch__size=6), tmp_path / "run", quiet=True)
    best = read_checkpoint(tmp_path / "run" / "checkpoints" / "best.pt")
    assert (best["step"], best["best"]) == (6, 0.5)


def test_a_run_that_does_not_choose_keeps_no_best(photos, tmp_path):
    train(tiny_config(photos), tmp_path / "run", quiet=True)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.pt"]


def test_checkpoints_are_written_when_due_and_at_the_end(photos, tmp_path, monkeypatch):
    steps = []
    save = RunState.save
    monkeypatch.setattr(RunState, "save", lambda run, step, path: steps.append(step) or save(run, step, path))
    train(tiny_config(photos), tmp_path / "run", quiet=True)
    assert steps == [7, 14, 17]


def test_a_collapse_is_said_once_and_kept_with_the_run(photos, tmp_path, capsys, monkeypatch):
    from xbm_app.models import EmbeddingModel

    def collapsed(model, images):
        bias = torch.nn.functional.normalize(model.head.bias[None])
        return bias.expand(len(images), -1).contiguous()

    monkeypatch.setattr(EmbeddingModel, "forward", collapsed)
    result = train(tiny_config(photos, loss__reduction="balanced"), tmp_path / "run")
    assert capsys.readouterr().err.count("the embeddings are collapsing") == 1
    ((severity, note),) = result["notes"]
    assert severity == "warning" and note.startswith("iteration 4: the embeddings are collapsing")


def test_a_run_says_why_a_summed_memory_hurts(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("xbm_app.train.metrics.OUTWEIGHED", 0.01)
    said = [train(tiny_config(photos, loss__reduction=how), tmp_path / how)["notes"] for how in ("sum", "balanced")]
    assert [sum("outweigh its positives" in note for _, note in notes) for notes in said] == [1, 0]
    assert capsys.readouterr().err.count("try memory.reduction=balanced") == 1


def test_a_folder_in_use_is_not_written_to(photos, tmp_path):
    train(tiny_config(photos, optim__iterations=2), tmp_path / "run", quiet=True)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(InputError, match=r"already holds a run: continue it with --resume .*run, or use another --out"):
        train(tiny_config(photos), tmp_path / "run", quiet=True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_run_that_is_being_trained_is_not_resumed_by_another(photos, tmp_path):
    config = tiny_config(photos, optim__iterations=2)
    train(config, tmp_path / "run", quiet=True)
    with locked(tmp_path / "run"), pytest.raises(InputError, match="is being trained by another process"):
        train(config, tmp_path / "run", resume=True, quiet=True)
    train(config, tmp_path / "run", resume=True, quiet=True)


def test_a_folder_without_a_run_is_not_resumed(photos, tmp_path):
    with pytest.raises(InputError, match="holds no run"):
        train(tiny_config(photos), tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()


def test_a_run_that_cannot_be_built_leaves_its_name_free(photos, tmp_path):
    with pytest.raises(InputError, match="unknown loss"):
        train(tiny_config(photos, loss__name="no"), tmp_path / "run", quiet=True)
    train(tiny_config(photos, optim__iterations=2), tmp_path / "run", quiet=True)


def test_half_precision_trains_too(photos, tmp_path):
    result = train(tiny_config(photos, optim__precision="bf16", memory__dtype="bfloat16"), tmp_path / "run", quiet=True)
    memory = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["memory"]
    assert memory["rows"].dtype == torch.bfloat16 and 0 <= result["recall@1"] <= 1


def test_the_memory_learns_something(photos, tmp_path):
    """Not a benchmark: the loss against the memory goes down."""
    train(tiny_config(photos, optim__iterations=60, optim__decay_at=(), optim__lr=3e-3), tmp_path / "run", quiet=True)
    losses = [row["memory_loss"] for row in read_metrics(tmp_path / "run" / "metrics.csv")]
    assert losses[-1] < 0.7 * losses[1]


def test_the_memory_has_a_reduction_of_its_own(photos, tmp_path):
    """At the first step both nets are the same: the batch's loss agrees, the one against the memory does not."""
    rows = []
    for how in (None, "balanced"):
        changes = {"memory__start": 0, "memory__fill": True, "loss__options": "{margin: -0.9}", "memory__reduction": how}
        train(tiny_config(photos, optim__iterations=1, log__every=1, **changes), tmp_path / str(how), quiet=True)
        rows.append(read_metrics(tmp_path / str(how) / "metrics.csv")[0])
    summed, balanced = rows
    assert balanced["batch_loss"] == summed["batch_loss"] and balanced["memory_loss"] < summed["memory_loss"]
    assert balanced["valid_negatives_memory"] == summed["valid_negatives_memory"] > summed["valid_positives_memory"] > 0


def test_images_whose_labels_are_in_doubt_do_not_move_the_model_but_are_written_anew(photos, tmp_path):
    config = tiny_config(photos, memory__update="moving_average", memory__doubt="skip", optim__weight_decay=0.0)
    run = RunState(config, begin_run(config, tmp_path), tmp_path)
    for (step, *batch), moves in zip(run.data.batches(0), (True, False)):
        *_, ids = batch
        run.memory.stamps[ids] = IGNORED if not moves else run.memory.stamps[ids]
        run.optimizer.state.clear()  # Adam would go on without a gradient
        before = [p.detach().clone() for p in run.model.parameters()]
        loop.learn(run, step, [batch], True)
        assert any(not torch.equal(p, old) for p, old in zip(run.model.parameters(), before)) == moves
        assert (run.memory.stamps[ids] > 0).all()


def shared() -> dict[str, torch.Tensor]:
    ranks = Ranks()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[2].bias.requires_grad_(False)
    x = torch.randn(6, 3)[3 * ranks.rank : 3 * ranks.rank + 3]
    model(x).square().sum().backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimization.average_gradients(model, ranks)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"alone": alone, "shared": found}


def test_gradients_are_means_over_the_ranks():
    one, other = on_ranks(2, shared)
    assert one["shared"].keys() == one["alone"].keys() and "2.bias" not in one["shared"]
    for name, value in one["shared"].items():
        assert torch.equal(value, other["shared"][name]), name
        torch.testing.assert_close(value, (one["alone"][name] + other["alone"][name]) / 2)


def test_one_process_keeps_its_own():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    before = model.weight.grad
    optimization.average_gradients(model, Ranks())
    assert model.weight.grad is before
