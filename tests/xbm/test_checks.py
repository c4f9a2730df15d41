"""Checks of what a caller hands in: one sentence each, and values looked at without stopping a device."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from xbm import CrossBatchMemory, MomentumEncoder, SupConLoss, TwoTowerLoss, cached_backward
from xbm.checks import INTEGERS, check_device, check_embeddings, check_integers, plain_integer, sound_rows, tolerance
from xbm.distributed import ShardedMemory
from xbm.errors import InputError
from xbm.retrieval.similarity import at_least_one

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, torch.float64, *HALVES]


def unit(m, dim=16, dtype=torch.float32):
    return F.normalize(torch.randn(m, dim, dtype=torch.float64)).to(dtype)


def yes(m):
    return torch.ones(m, dtype=torch.bool)


# ------------------------------------------------------------------ shapes and types


@pytest.mark.parametrize("dtype", FLOATS)
def test_float_matrices_of_any_precision_pass(dtype):
    check_embeddings(unit(3, 4, dtype), "anchors", 4)
    check_embeddings(unit(3, 4, dtype), "anchors")
    check_embeddings(unit(0, 4, dtype), "anchors", 4)


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (torch.ones(4), r"anchors must be a matrix \(rows, dim\), got \(4,\): pass one embedding per row"),
        (torch.ones(2, 3, 4), r"got \(2, 3, 4\)"),
        ([[1.0, 0.0]], "got list"),
        (torch.ones(2, 4, dtype=torch.int32), "anchors are torch.int32: pass float embeddings of unit length"),
        (torch.ones(2, 4, dtype=torch.complex64), "anchors are torch.complex64"),
        (torch.ones(2, 5), r"expected anchors of dimension 4, got 5: create the memory with CrossBatchMemory\(dim=5\)"),
    ],
)
def test_what_is_no_float_matrix_of_the_banks_width_is_refused(given_, message):
    with pytest.raises(InputError, match=message):
        check_embeddings(given_, "anchors", 4)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_of_any_width_come_back_as_int64(dtype):
    got = check_integers(torch.tensor([3, 1, 2], dtype=dtype), "labels", unit(3))
    assert got.dtype == torch.int64 and got.tolist() == [3, 1, 2]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ([1, 2, 3], "ids are list: pass an integer tensor"),
        (torch.ones(3), "ids are torch.float32: pass an integer tensor"),
        (torch.ones(3, dtype=torch.bool), "ids are torch.bool"),
        (torch.arange(2), r"3 embeddings but ids of shape \(2,\): pass one per row"),
        (torch.arange(3)[:, None], r"shape \(3, 1\)"),
        (torch.arange(3, device="meta"), "ids are on meta, the embeddings on cpu"),
    ],
)
def test_what_is_not_one_integer_a_row_is_refused(given_, message):
    with pytest.raises(InputError, match=message):
        check_integers(given_, "ids", unit(3))


def test_devices_that_differ_are_named_with_the_move_that_mends_it():
    check_device(unit(2), "the anchors", unit(3), "the memory")
    with pytest.raises(InputError, match=r"the anchors are on meta, the memory on cpu: move them with \.to\(cpu\)"):
        check_device(unit(2).to("meta"), "the anchors", unit(3), "the memory")


# ------------------------------------------------------------------ values


@pytest.mark.parametrize("dtype", FLOATS)
def test_rounding_to_any_type_keeps_rows_sound(dtype):
    assert sound_rows(unit(200, 512, dtype), yes(200), None, 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("side", [-1, 1])
def test_a_length_beyond_the_tolerance_is_refused_and_within_it_is_not(dtype, side):
    v = unit(3, 512, torch.float64)
    v[1] *= 1 + side * 0.5 * tolerance(dtype)
    assert sound_rows(v.to(dtype), yes(3), None, 0).all()
    v = unit(3, 512, torch.float64)
    v[1] *= 1 + side * 2 * tolerance(dtype)
    with pytest.raises(
        InputError, match=r"row 1 of the embeddings has length [01]\.\d+, not 1: pass torch.nn.functional.normalize"
    ):
        sound_rows(v.to(dtype), yes(3), None, 0)


def test_half_types_are_allowed_more_rounding():
    assert {tolerance(d) for d in HALVES} == {1e-2} and {tolerance(d) for d in FLOATS[:2]} == {1e-3}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_told_as_such(bad):
    v = unit(4)
    v[2, 5] = bad
    with pytest.raises(InputError, match="row 2 of the embeddings contains NaN or infinity"):
        sound_rows(v, yes(4), None, 0)


def test_the_first_bad_row_is_named():
    v = unit(5)
    v[4] = torch.nan
    v[3] *= 7
    with pytest.raises(InputError, match=r"row 3 .* length 7"):
        sound_rows(v, yes(5), None, 0)


@pytest.mark.parametrize(
    ("ids", "below", "message"),
    [
        ([0, 1, -1], 0, "row 2 has the id -1: instance ids must satisfy id ≥ 0"),
        ([0, 9, 1], 9, "row 1 has the id 9: instance ids must satisfy 0 ≤ id < 9, the memory's size"),
        ([-3, 8, 1], 9, "row 0 has the id -3"),
    ],
)
def test_ids_out_of_range_are_named(ids, below, message):
    with pytest.raises(InputError, match=message):
        sound_rows(unit(3), yes(3), torch.tensor(ids), below)


def test_ids_within_range_pass_and_without_a_limit_any_id_does():
    assert sound_rows(unit(3), yes(3), torch.tensor([0, 8, 4]), 9).all()
    assert sound_rows(unit(3), yes(3), torch.tensor([0, 10**15, 4]), 0).all()


def test_rows_that_are_not_kept_may_be_anything_and_are_not_marked_sound():
    v = unit(4)
    v[1], v[3] = torch.nan, 0
    keep = torch.tensor([True, False, True, False])
    assert sound_rows(v, keep, torch.tensor([0, -9, 1, 99]), 9).tolist() == keep.tolist()


def test_no_rows_no_complaint():
    assert len(sound_rows(unit(0), yes(0), None, 0)) == 0


def test_a_traced_check_has_the_shape_of_the_real_one():
    with FakeTensorMode() as mode:
        fake = sound_rows(mode.from_tensor(unit(3)), mode.from_tensor(yes(3)), None, 0)
    assert fake.shape == (3,) and fake.dtype == torch.bool


# ------------------------------------------------------------------ whole numbers

WHOLE = [7, np.int64(7), np.uint8(7), np.array(7), torch.tensor(7)]
NOT_WHOLE = [True, np.True_, torch.tensor(True), 7.0, np.float64(7), torch.tensor(7.0), torch.tensor([7, 8]), "7", None]


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_whole_numbers_of_other_libraries_become_plain_ones(value):
    assert plain_integer(value) == 7 and type(plain_integer(value)) is int


@pytest.mark.parametrize("value", NOT_WHOLE, ids=repr)
def test_anything_else_is_not_a_whole_number(value):
    assert plain_integer(value) is None


TAKE_A_SIZE = {
    "CrossBatchMemory": lambda n: CrossBatchMemory(n, n),
    "ShardedMemory": lambda n: ShardedMemory(n, n),
    "TwoTowerLoss": lambda n: TwoTowerLoss(SupConLoss(0.1), n, n),
}


@pytest.mark.parametrize("name", TAKE_A_SIZE)
def test_sizes_may_come_from_numpy_but_not_from_a_bool(name):
    plain, of_numpy = (TAKE_A_SIZE[name](n) for n in (7, np.int64(7)))
    assert repr(plain) == repr(of_numpy) and type(of_numpy.dim) is int
    for value in (True, 7.0, np.float32(7)):
        with pytest.raises(InputError, match=rf"size.* got {re.escape(repr(value))}"):
            TAKE_A_SIZE[name](value)


def test_a_chunk_and_a_count_of_neighbours_may_come_from_numpy():
    model, x = torch.nn.Linear(5, 3), torch.randn(7, 5)
    values = [cached_backward(model, x, lambda v: v.square().sum(), chunk=chunk) for chunk in (3, np.int64(3))]
    assert torch.equal(*values)
    with pytest.raises(InputError, match="chunk must be an integer of at least 1, got True"):
        cached_backward(model, x, lambda v: v.sum(), chunk=True)
    assert at_least_one("k", np.int64(3)) == at_least_one("k", torch.tensor(3)) == 3
    assert MomentumEncoder(model, momentum=np.int64(0)).momentum == 0
