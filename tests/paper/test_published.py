"""The paper's figures, against what its text says of them."""

import pytest

from paper import published as p


def test_the_gains_that_the_text_names():
    assert p.TABLE_1["sop"]["contrastive"][0] == 64.0 and p.TABLE_1["sop"]["contrastive w/ M"][0] == 77.8
    assert p.S_TABLE_3["cars"]["contrastive w/ M"][0] - p.S_TABLE_3["cars"]["contrastive"][0] == pytest.approx(7.8)
    assert p.S_TABLE_3["cub"]["contrastive w/ M"][0] - p.S_TABLE_3["cub"]["contrastive"][0] == pytest.approx(4.4)
    large = {name: row[4] for name, row in p.TABLE_1_VEHICLEID.items()}
    assert large["MS"] - large["contrastive"] == pytest.approx(16.7)
    assert large["contrastive w/ M"] - large["MS"] == pytest.approx(5.8)
    assert p.S_TABLE_5[2][2][0] - p.S_TABLE_5[1][2][0] == pytest.approx(11.2)
    assert p.TABLE_2["batch 64, R_M = 1"][2] - p.TABLE_2["batch 64"][2] == pytest.approx(13.5)


def test_every_row_is_as_long_as_its_data_sets_recalls():
    for data, rows in {**p.TABLE_1, **p.S_TABLE_3}.items():
        assert all(len(row) == len(p.KS[data]) for row in rows.values()) and len(rows) == 6
    for rows, k in ((p.TABLE_3, 4), (p.TABLE_4, 6), (p.TABLE_5, 6), (p.S_TABLE_5, 3)):
        assert all(len(row) == k for _, _, row in rows)
    assert all(len(cub) == len(cars) == 6 for _, _, cub, cars in p.S_TABLE_4)
    assert all(len(row) == 6 for row in p.TABLE_1_VEHICLEID.values())
    assert all(len(row) == len(p.MOMENTA) for table in (p.S_TABLE_1, p.S_TABLE_2) for row in table.values())


def test_recall_never_falls_with_k():
    rows = [row for table in (*p.TABLE_1.values(), *p.S_TABLE_3.values()) for row in table.values()]
    rows += [row for table in (p.TABLE_3, p.TABLE_4, p.S_TABLE_5) for _, _, row in table]
    rows += [half for _, _, *both in p.S_TABLE_4 for half in both]
    for row in rows:
        known = [value for value in row if value is not None]
        assert known == sorted(known)


def test_the_papers_conflict_is_told_with_its_three_values():
    values = {p.TABLE_3[13][2][0], p.TABLE_1["sop"]["contrastive w/ M"][0], p.S_TABLE_1["sop"][0]}
    assert values == {77.4, 77.8, 78.2} and all(str(value) in p.SOP_CONFLICT for value in values)
