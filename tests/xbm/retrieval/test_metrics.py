import ctypes
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

import tests.xbm.retrieval.retrieval_plain as plain
from xbm.errors import InputError
from xbm.retrieval import cumulative, evaluate, ranking, similarity


def tied_rows(count, dim, rng):
    """Rows with 1, 4 or 16 entries of ±1: their cosines are exact in float32, so many pairs are exactly tied."""
    rows = []
    for _ in range(count):
        filled = rng.choice([k for k in (1, 4, 16) if k <= dim])
        row = [0] * dim
        for place in rng.sample(range(dim), filled):
            row[place] = rng.choice([-1, 1]) if rng.random() < 0.5 else 1
        scale = rng.choice([1, 2, 8])
        rows.append([scale * x for x in row])
    for _ in range(count // 4):
        rows[rng.randrange(count)] = list(rows[rng.randrange(count)])
    return rows


def near_rows(count, dim, rng):
    """Random floats among which a third are copies of others."""
    rows = [[float(np.float32(rng.gauss(0, 1))) for _ in range(dim)] for _ in range(count)]
    for _ in range(count // 3):
        rows[rng.randrange(count)] = list(rows[rng.randrange(count)])
    return rows


def agree(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name] == pytest.approx(value, abs=1e-12), name


def quietly(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate(*args, **kwargs)


@pytest.fixture(params=[ranking.SORT_ABOVE, 3, 0], ids=["counting", "both", "sorting"])
def way(request, monkeypatch):
    monkeypatch.setattr(ranking, "SORT_ABOVE", request.param)


@pytest.fixture(params=[similarity.WORK_BYTES, 20_000], ids=["one block", "many blocks"])
def work(request, monkeypatch):
    monkeypatch.setattr(similarity, "WORK_BYTES", request.param)


@pytest.mark.usefixtures("way", "work")
@pytest.mark.parametrize("rows", [tied_rows, near_rows])
class TestEqualsThePlainDoubleLoop:
    @pytest.mark.parametrize(
        ("count", "dim", "classes"),
        [(2, 1, 1), (3, 4, 1), (17, 5, 3), (63, 4, 20), (64, 7, 9), (65, 19, 65 // 2), (130, 6, 40), (129, 16, 2)],
    )
    def test_each_row_against_the_others(self, rows, count, dim, classes):
        rng = random.Random(count)
        x, labels = rows(count, dim, rng), [rng.randrange(classes) for _ in range(count)]
        agree(quietly(torch.tensor(x).float(), labels, ks=(1, 2, 5, 64)), plain.evaluate(x, labels, ks=(1, 2, 5, 64)))

    @pytest.mark.parametrize(("count", "different"), [(40, 31), (71, 12), (30, 3)])
    def test_ids_that_repeat(self, rows, count, different):
        rng = random.Random(different)
        x, labels = rows(count, 5, rng), [rng.randrange(4) for _ in range(count)]
        ids = [rng.randrange(different) for _ in range(count)]
        agree(quietly(np.array(x, "f4"), labels, ids=ids), plain.evaluate(x, labels, ids=ids))

    @pytest.mark.parametrize(("queries", "size"), [(1, 3), (5, 64), (33, 1), (50, 67), (9, 140)])
    @pytest.mark.parametrize("with_ids", [False, True])
    def test_a_gallery(self, rows, queries, size, with_ids):
        rng = random.Random(queries * size)
        x = rows(queries + size, 6, rng)
        labels = [0] + [rng.randrange(7) for _ in range(queries + size - 2)] + [0]
        ids = [rng.randrange(20) for _ in range(queries + size - 1)] + [99]
        arguments = (x[:queries], labels[:queries], x[queries:], labels[queries:])
        if with_ids:
            arguments += (ids[:queries], ids[queries:])
        tensors = [torch.tensor(part) for part in arguments]
        tensors[0], tensors[2] = tensors[0].float(), tensors[2].double()
        agree(quietly(*tensors, ks=(1, 3, 500)), plain.evaluate(*arguments, ks=(1, 3, 500)))


def test_ties_go_to_the_lower_index_in_every_strip_of_the_gallery():
    # One relevant item somewhere in a gallery of equal rows: its rank is its index + 1.
    for size, place in [(1, 0), (64, 63), (65, 64), (200, 0), (200, 63), (200, 64), (200, 100), (200, 199)]:
        labels = torch.zeros(size, dtype=torch.int64)
        labels[place] = 1
        scores = evaluate(torch.ones(1, 3), [1], torch.ones(size, 3), labels, ks=(place + 1,))
        assert scores["map"] == pytest.approx(1 / (place + 1))
        assert scores[f"recall@{place + 1}"] == 1
        if place:
            assert evaluate(torch.ones(1, 3), [1], torch.ones(size, 3), labels, ks=(place,))[f"recall@{place}"] == 0


def test_negative_and_zero_similarities_tie_like_others():
    gallery = torch.tensor([[-1.0, 0.0], [0.0, 1.0], [0.0, -1.0], [-2.0, 0.0], [0.0, 0.0]])
    for place, expected in [(0, 4), (1, 1), (2, 2), (3, 5), (4, 3)]:
        labels = torch.arange(5) == place
        assert evaluate([[1.0, 0.0]], [True], gallery, labels)["map"] == pytest.approx(1 / expected)


@pytest.mark.parametrize("dim", [3, 37, 385, 512])
@pytest.mark.parametrize("count", [7, 70, 300])
def test_copies_of_a_row_are_tied_wherever_they_stand(dim, count):
    """A product that rounds its edges differently from its middle would rank copies by noise."""
    torch.manual_seed(dim)
    gallery = torch.randn(1, dim).repeat(count, 1)
    for place in (0, count // 2, count - 1):
        labels = torch.arange(count) == place
        assert evaluate(torch.randn(1, dim), [True], gallery, labels)["map"] == pytest.approx(1 / (place + 1))


def drops_column_zero(x, labels):
    """Mistake 9 of the design: sorts everything, the query included, and takes the first column for the query itself."""
    hits = [[labels[g] == label for g in plain.ranking(row, x, set())[1:]] for row, label in zip(x, labels, strict=True)]
    return sum(row[0] for row in hits) / len(hits)


def test_exact_duplicates_of_another_class_do_not_pass_for_the_query_itself():
    # Rows 0 and 1 are one picture under two labels. For query 1 row 0 is in column 0: dropping it leaves the query, a "hit".
    x = [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]
    labels = [0, 1, 1, 0]
    assert drops_column_zero(x, labels) == 0.25
    assert evaluate(x, labels, ks=(1,))["recall@1"] == plain.evaluate(x, labels, ks=(1,))["recall@1"] == 0.0


def test_self_is_found_by_id_when_the_gallery_is_the_query_set_in_another_order():
    torch.manual_seed(0)
    x, labels = torch.randn(50, 8), torch.arange(50) % 9
    ids, shuffle = torch.arange(50) + 1000, torch.randperm(50)
    agree(evaluate(x, labels, x[shuffle], labels[shuffle], ids, ids[shuffle]), evaluate(x, labels))


@pytest.mark.parametrize(("count", "classes"), [(60, 12), (300, 50), (400, 2)])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_equals_accuracy_calculator(count, classes, with_gallery):
    torch.manual_seed(count)
    labels = torch.randint(classes, (count,))
    x = torch.nn.functional.normalize(torch.randn(classes, 24)[labels] + 1.5 * torch.randn(count, 24), dim=1)
    names = {
        "precision_at_1": "recall@1",
        "r_precision": "r_precision",
        "mean_average_precision_at_r": "map@r",
        "mean_average_precision": "map",
    }
    calculator = AccuracyCalculator(include=tuple(names), device=torch.device("cpu"))
    if with_gallery:
        half = count // 2
        theirs = calculator.get_accuracy(x[:half], labels[:half], x[half:], labels[half:])
        ours = quietly(x[:half], labels[:half], x[half:], labels[half:])
    else:
        theirs, ours = calculator.get_accuracy(x, labels), quietly(x, labels)
    for name, our_name in names.items():
        assert ours[our_name] == pytest.approx(theirs[name], abs=1e-6), name


def test_cumulative_is_recall_at_every_k():
    torch.manual_seed(1)
    x, labels = torch.randn(40, 3), torch.arange(40) % 11
    curve = cumulative(x, labels, up_to=45)
    scores = evaluate(x, labels, ks=range(1, 46))
    assert curve.tolist() == pytest.approx([scores[f"recall@{k}"] for k in range(1, 46)])
    assert curve[38] == curve[44] == 1


def test_a_query_without_a_relevant_item_leaves_every_mean_and_is_warned_about():
    x = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0], [-1.0, 0.0]])
    with pytest.warns(UserWarning, match="1 of 5 queries have no relevant item"):
        scores = evaluate(x, [0, 0, 1, 1, 2])
    assert scores == {f"recall@{k}": 1.0 for k in (1, 10, 100, 1000)} | {
        "map@r": 1.0,
        "r_precision": 1.0,
        "map": 1.0,
        "queries": 4,
        "without_relevant": 1,
    }


def test_no_query_with_a_relevant_item_is_an_error():
    with pytest.raises(InputError, match="no query has a relevant item"):
        evaluate(torch.randn(3, 2), [0, 1, 2])
    with pytest.raises(InputError, match="no query has a relevant item"):
        evaluate(torch.randn(3, 2), [0, 0, 0], ids=[4, 4, 4])
    with pytest.raises(InputError, match="no query has a relevant item"):
        evaluate(torch.randn(1, 2), [0])


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 2.0), (torch.bfloat16, 2.0**20), (torch.float32, 2.0**100), (torch.float64, 1e200)]
)
def test_any_float_type_and_any_length_of_row(dtype, scale):
    torch.manual_seed(0)
    x, labels = torch.randn(60, 5).to(dtype), torch.arange(60) % 13
    expected = evaluate(x.float(), labels)
    x[::2] *= scale
    x[::3] /= scale
    agree(evaluate(x, labels), expected)


def test_rows_of_huge_and_tiny_numbers_keep_their_direction():
    x = torch.tensor([[3e38, 0.0], [3e38, 1e37], [0.0, 1e-44], [1e-45, 1e-44]])
    assert evaluate(x, [0, 0, 1, 1])["recall@1"] == 1


def test_a_caller_that_trains_in_low_precision_gets_the_same_scores_and_keeps_its_settings():
    torch.manual_seed(0)
    x, labels = 1 + 0.01 * torch.randn(300, 256), torch.arange(300) % 60  # cosines that 16 bits cannot tell apart
    expected = evaluate(x, labels)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = evaluate(x.clone().requires_grad_(), labels)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    agree(scores, expected)


PEAKS = """
import ctypes
from pathlib import Path
import torch
from xbm.retrieval import evaluate, similarity

def mib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))

similarity.WORK_BYTES = 32 * 2**20
for count, classes in [(6000, 2000), (3500, 20)]:  # counting, sorting; all at once would be 140 MiB and more
    x, labels = torch.randn(count, 8), torch.arange(count) % classes
    evaluate(x[: classes * 2], labels[: classes * 2])
    ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide what is taken
    before = mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    evaluate(x, labels)
    print(mib("VmHWM") - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the peak is read from Linux' /proc")
@pytest.mark.slow
def test_the_work_space_stays_within_its_bound():
    # A process of its own: the heap that thousands of tests leave behind is in pieces and grows by more than is asked for.
    printed = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True).stdout
    counting, sorting = map(float, printed.split())
    assert 8 < counting < 32 + 8
    assert 8 < sorting < 32 + 8
