"""Re-identification on a synthetic set with cameras, scored in plain Python by the protocol of that field."""

import csv
import json

import numpy as np
import pytest

import xbm as package
from tests.tiny import SETTINGS, draw_photos, set_options, xbm
from tests.xbm.retrieval.retrieval_plain import similarity
from xbm.errors import InputError
from xbm_app.data.own_images import Columns, read_table, write_split

VEHICLES, CAMERAS = 9, 3
COLUMNS = Columns("vehicle_id", "part", "camera")


def cameras(root):
    """A table of vehicles: five to train on; of the others, one query per camera. Returns its rows of the test."""
    draw_photos(root, classes=VEHICLES, each=2 * CAMERAS)
    rows = []
    for vehicle in range(VEHICLES):
        for number in range(2 * CAMERAS):
            part = "train" if vehicle < 5 else "query" if number < CAMERAS else "gallery"
            camera = f"c{number % CAMERAS}" if part != "train" else ""
            if vehicle == 8 and part == "gallery":
                camera = "c0"  # seen by one camera only: the query of that camera has nothing to find
            # the column "label" is not the class, and the boxes' and roles' columns are not there
            rows.append([f"class_{vehicle:02d}/{number}.png", f"note {number}", f"v{vehicle}", part, camera])
    with (root / "vehicles.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "label", "Vehicle_ID", "part", "camera"], *rows])
    return [row for row in rows if row[3] != "train"]


def by_hand(queries, gallery):
    """CMC at 1, 5 and 10 and mAP over (vector, vehicle, camera): images of the query's vehicle and camera are junk."""
    hits_at, precisions = {1: 0, 5: 0, 10: 0}, []
    for vector, vehicle, camera in queries:
        ranked = sorted(gallery, key=lambda item: -similarity(vector, item[0]))
        kept = [item for item in ranked if not (item[1] == vehicle and item[2] == camera)]
        places = [place for place, item in enumerate(kept, start=1) if item[1] == vehicle]
        if not places:
            continue  # a query without a match does not count
        for k in hits_at:
            hits_at[k] += places[0] <= k
        precisions.append(sum((n / place) for n, place in enumerate(places, start=1)) / len(places))
    counted = len(precisions)
    return {**{f"recall@{k}": hits / counted for k, hits in hits_at.items()}, "map": sum(precisions) / counted}, counted


@pytest.mark.filterwarnings("ignore:1 of 12 queries have no relevant item")
def test_a_run_with_cameras_is_scored_as_by_hand(tmp_path):
    rows, run = cameras(tmp_path / "data"), tmp_path / "run"
    columns = {"data__label": "vehicle_id", "data__split": "part", "data__exclude_same": "camera"}
    words = ["train", "--data", tmp_path / "data" / "vehicles.csv", "--trunk", "small", "--out", run]
    code, out, err = xbm(*words, *set_options(optim__iterations=5, **columns))
    assert code == 0, err
    result = json.loads((run / "result.json").read_text())

    vectors = package.load(run).embed([tmp_path / "data" / row[0] for row in rows]).tolist()
    items = [(vector, row[2], row[4], row[3]) for vector, row in zip(vectors, rows)]
    queries, gallery = ([item[:3] for item in items if item[3] == part] for part in ("query", "gallery"))
    expected, counted = by_hand(queries, gallery)
    assert counted == 11 and (result["queries"], result["without_relevant"]) == (11, 1)
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert result["protocol"] == "re-identification" and result["curve"][0] == result["recall@1"]
    assert expected != pytest.approx(by_hand(queries, [(v, name, None) for v, name, _ in gallery])[0])  # cameras count

    with np.load(run / "examples.npz") as examples:  # what the report shows leaves out the same images
        for q, neighbours in enumerate(examples["neighbours"]):
            assert not [j for j in neighbours if j >= 0 and gallery[j][1:] == queries[q][1:]]
    assert "cmc@1" in out and "cmc@10" in out and f"{100 * expected['map']:.2f}" in out
    page = (run / "report.html").read_text()
    assert "mAP" in page and "R@K is CMC@K" in page

    code, out, err = xbm("evaluate", run, "--json", tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert code == 0 and {name: again[name] for name in expected} == {name: result[name] for name in expected}


def test_a_store_and_the_split_of_a_run_keep_the_cameras(tmp_path):
    cameras(tmp_path / "data")
    dataset = read_table(tmp_path / "data" / "vehicles.csv", columns=COLUMNS)
    (protocol,) = dataset.protocols
    assert dataset.train.groups is None and sorted(set(protocol.query.groups)) == [0, 1, 2]
    write_split(dataset, tmp_path / "split.csv")
    (again,) = read_table(tmp_path / "split.csv", tmp_path / "data", columns=Columns(group="exclude_same")).protocols
    assert again.query.groups.tolist() == protocol.query.groups.tolist()
    assert again.gallery.groups.tolist() == protocol.gallery.groups.tolist()
    assert protocol.gallery.take(np.array([5, 0])).groups.tolist() == protocol.gallery.groups[[5, 0]].tolist()

    options = ["--label", "vehicle_id", "--split", "part", "--exclude-same", "camera", "--resize", SETTINGS["data.resize"]]
    assert xbm("prepare", tmp_path / "data" / "vehicles.csv", "--out", tmp_path / "store", *options).code == 0
    from xbm_app.data.store import read_stored

    (stored,) = read_stored(tmp_path / "store").protocols
    assert stored.name == "re-identification" and stored.gallery.groups.tolist() == protocol.gallery.groups.tolist()


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (Columns("vehicle"), "unknown column 'vehicle': did you mean 'vehicle_id'"),
        (Columns("vehicle_id", "part", "cam"), "unknown column 'cam'"),
        (Columns("vehicle_id", "part", "part"), "must name different columns"),
        (Columns("vehicle_id", "camera"), "unknown split ''"),
    ],
)
def test_columns_that_are_not_there_are_refused(tmp_path, columns, text):
    cameras(tmp_path)
    with pytest.raises(InputError) as caught:
        read_table(tmp_path / "vehicles.csv", columns=columns)
    assert text in str(caught.value)


def test_a_test_row_without_a_camera_is_refused(tmp_path):
    cameras(tmp_path)
    file = tmp_path / "vehicles.csv"
    file.write_text(file.read_text().replace("query,c1", "query,", 1))
    with pytest.raises(InputError, match=r"line 33: the column of data.exclude_same is empty"):
        read_table(file, columns=COLUMNS)


def test_columns_of_a_folder_are_refused(tmp_path):
    cameras(tmp_path / "data")
    code, _, err = xbm("train", "--data", tmp_path / "data", "--trunk", "small", "--set", "data.exclude_same=camera")
    assert code == 2 and "has no columns, its folders are the classes" in err
