"""Labels in doubt against a plain-Python model, and rows that are set aside."""

import pytest
import torch
import torch.nn.functional as F

from xbm import ContrastiveLoss, CrossBatchMemory
from xbm.errors import InputError
from xbm_app.train import label_errors
from xbm_app.train.label_errors import contradicted, find_label_errors, ignore_label_errors, is_ignored, suspects


def clusters(classes=20, each=12, dim=16, spread=0.6):
    centres = torch.randn(classes, dim)
    labels = torch.arange(classes).repeat(each)
    return F.normalize(centres[labels] + spread * torch.randn(len(labels), dim)), labels


def model(rows, labels, classes):
    """One row after the other."""
    several = [c for c in range(classes) if int((labels == c).sum()) >= 5]
    doubted = []
    for j, label in enumerate(labels.tolist()):
        near = {}
        for c in several:
            others = [k for k in range(len(labels)) if labels[k] == c and k != j]
            near[c] = float((rows[others] @ rows[j]).mean())
        doubted.append(
            label in near and sum(value > near[label] for value in near.values()) >= label_errors.NEAREST * len(several)
        )
    too_many = sum(doubted) > label_errors.MOST * int((labels >= 0).sum())
    return [False] * len(labels) if too_many else doubted


@pytest.mark.parametrize("block", [1, 77, 1 << 22])
def test_the_same_as_row_by_row(monkeypatch, block):
    monkeypatch.setattr(label_errors, "BLOCK", block)
    some = 0
    for seed in range(6):
        torch.manual_seed(seed)
        rows, labels = clusters(classes=11, each=6, spread=0.2 + 0.15 * seed)
        labels[torch.randperm(66)[:5]] = torch.randint(0, 11, (5,))
        labels[5], labels[labels == 9] = -1, 8  # a row that does not count, a class without rows
        labels[labels == 10] = 7
        labels[:4] = 10  # a class of four rows
        wanted = model(rows, labels, 11)
        assert contradicted(rows, labels, 11).tolist() == wanted
        some += sum(wanted)
    assert some > 10


def test_wrong_labels_are_found_and_right_ones_left():
    torch.manual_seed(0)
    rows, right = clusters()
    given = right.clone()
    wrong = torch.randperm(len(right))[:24]
    given[wrong] = (right[wrong] + torch.randint(1, 20, (24,))) % 20
    found = contradicted(rows, given, 20)
    assert found[wrong].float().mean() > 0.9 and found.sum() - found[wrong].sum() <= 4
    assert contradicted(rows, right, 20).sum() <= 2
    assert torch.equal(contradicted(rows.bfloat16(), given, 20), found)


def test_embeddings_that_tell_nothing_doubt_nothing():
    torch.manual_seed(0)
    rows, labels = F.normalize(torch.randn(200, 16)), torch.arange(200) % 20
    assert not contradicted(rows, labels, 20).any()
    assert contradicted(rows[:0], labels[:0], 20).shape == (0,)


def test_too_many_wrong_labels_are_told_from_none():
    torch.manual_seed(0)
    rows, right = clusters()
    for wrong, too_many in ((0, False), (24, False), (96, True)):  # of 240, and the classes are as far apart as before
        memory = CrossBatchMemory(250, 16, "moving_average")
        memory.enqueue(rows, torch.cat([(right[:wrong] + 7) % 20, right[wrong:]]), torch.arange(240))
        assert label_errors.too_many(memory, 20) == too_many
        assert bool(suspects(memory, 20).any()) == (wrong == 24)


def remembered(update="moving_average"):
    """240 rows of 20 classes, of which 24 have wrong labels, in a memory with room for 250; the rows, labels and which."""
    torch.manual_seed(0)
    rows, labels = clusters()
    wrong = torch.randperm(240)[:24]
    labels[wrong] = (labels[wrong] + 7) % 20
    memory = CrossBatchMemory(250, 16, update)
    memory.enqueue(rows, labels, torch.arange(240))
    return memory, rows, labels, contradicted(rows, labels, 20)


@pytest.mark.parametrize("update", ["moving_average", "backprop"])
def test_rows_in_doubt_are_set_aside(update):
    memory, rows, labels, doubted = remembered(update)
    ignore_label_errors(memory, 20)
    assert doubted.sum() > 20 and torch.equal(is_ignored(memory, torch.arange(240)), doubted)
    assert not is_ignored(memory, torch.arange(240, 250)).any()  # never written
    assert not memory.is_full  # ten rows were never written
    memory.enqueue(rows[:10], labels[:10], torch.arange(240, 250))
    assert memory.is_full and len(memory) == 250 - doubted.sum()
    memory.stamps[240:] = -1
    assert torch.equal(memory.ids, (~doubted).nonzero()[:, 0])
    anchors = F.normalize(torch.randn(5, 16))
    rest = CrossBatchMemory(250, 16, update)
    rest.enqueue(rows[~doubted], labels[~doubted], torch.arange(240)[~doubted])
    met = [ContrastiveLoss()(anchors, torch.arange(5), each, ids=torch.arange(5)) for each in (memory, rest)]
    assert torch.equal(*met) and met[0] > 0


def test_what_is_set_aside_stays_so_until_it_is_written_anew():
    memory, _, labels, doubted = remembered()
    ignore_label_errors(memory, 20)
    before = memory.stamps.clone()
    ignore_label_errors(memory, 20)
    assert ((before == label_errors.IGNORED) <= (memory.stamps == label_errors.IGNORED)).all()
    count = len(memory)
    k = int(doubted.nonzero()[0, 0])
    new = F.normalize(torch.randn(1, 16))
    memory.enqueue(new, labels[k : k + 1], torch.tensor([k]))
    assert not is_ignored(memory, torch.tensor([k])).any() and len(memory) == count + 1
    assert torch.equal(memory.rows[k], new[0])  # nothing of the old row is left


@pytest.mark.parametrize("block", [1, 77, 1 << 22])
def test_the_most_doubtful_come_first_with_the_class_they_lie_among(monkeypatch, block):
    memory, rows, labels, _ = remembered()
    ignore_label_errors(memory, 20)
    again = is_ignored(memory, torch.arange(240)).nonzero()[:3, 0]
    memory.enqueue(rows[again], labels[again], again)  # in doubt, and not set aside
    memory.stamps[(labels == 3).nonzero()[4:, 0]] = -1  # a class of few rows is nobody's nearest
    right = int((memory.stamps[:240] >= 0).nonzero()[0, 0])
    memory.stamps[right] = label_errors.IGNORED  # one that lies among its own class by now
    found = suspects(memory, 20)
    assert found[right]
    found[right] = False
    monkeypatch.setattr(label_errors, "BLOCK", block)
    index, nearest, lead = find_label_errors(memory, 20)
    assert sorted(index.tolist()) == found.nonzero()[:, 0].tolist() and set(again.tolist()) & set(index.tolist())
    assert lead.tolist() == sorted(lead.tolist(), reverse=True) and len(lead) > 20
    counts = memory.stamps[:240] >= 0
    for k, c, by in zip(index.tolist(), nearest.tolist(), lead.tolist()):
        near = {}
        for each in range(20):
            others = [j for j in range(240) if counts[j] and labels[j] == each and j != k]
            if each != 3 or labels[k] == 3:
                near[each] = float((rows[others] @ rows[k]).mean())
        mine = near.pop(int(labels[k]))
        assert c == max(near, key=lambda each: near[each]) and by == pytest.approx(near[c] - mine, abs=1e-5)


def test_of_nothing_in_doubt_there_is_nothing_to_look_at():
    memory = CrossBatchMemory(250, 16, "moving_average")
    assert [each.shape for each in find_label_errors(memory, 20)] == [(0,)] * 3


def test_a_queue_has_no_rows_to_set_aside():
    with pytest.raises(InputError, match="no slot per image"):
        ignore_label_errors(CrossBatchMemory(4, 2), 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_same_rows_are_set_aside_without_waiting_for_them():
    memory, _, _, doubted = remembered()
    memory = memory.cuda()
    ids = torch.arange(240, device="cuda")
    contradicted(memory.rows, memory.row_labels, 20)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        ignore_label_errors(memory, 20)
        found = is_ignored(memory, ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.cpu(), doubted)
