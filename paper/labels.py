"""The classes of a data set's test queries, kept beside the results, so that the statistics need no images.

`labels/NAME.json` in the results folder has the queries of the first protocol in the order of the data set, as runs of equal
labels; `python -m paper labels --data NAME=DIR` writes it.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from xbm.errors import InputError
from xbm_app.data.images import Dataset
from xbm_app.files import replacing


def labels_file(results: Path, data: str) -> Path:
    return results / "labels" / f"{data}.json"


def write_labels(results: Path, dataset: Dataset) -> Path:
    """Writes the classes of the queries of a data set's first protocol."""
    protocol = dataset.protocols[0]
    runs = runs_of(np.asarray(protocol.query.labels).tolist())
    path = labels_file(results, dataset.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        text = json.dumps({"data": dataset.name, "protocol": protocol.name, "queries": len(protocol.query), "runs": runs})
        beside.write_text(text + "\n", encoding="utf-8")
    return path


def read_labels(results: Path, data: str, queries: int) -> np.ndarray | None:
    """(queries,): the class of each query, or None if there is no such file.

    Args:
        results: folder of result files.
        queries: number of hits that the labels are for.

    Raises:
        InputError: the file has another number of queries.
    """
    path = labels_file(results, data)
    if not path.exists():
        return None
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    labels = np.repeat(*np.array(runs, np.int64).T)
    if len(labels) != queries:
        raise InputError(
            f"{path} has {len(labels)} queries, the results have {queries}: write it with `python -m paper labels --data "
            f"{data}=DIR` from the images that the runs were scored on"
        )
    return labels


def runs_of(labels: Sequence[int]) -> list[tuple[int, int]]:
    """(label, length) of each run of equal labels.

    Example:
        >>> runs_of([7, 7, 2, 7])
        [(7, 2), (2, 1), (7, 1)]
    """
    return [(label, len(list(run))) for label, run in groupby(labels)]
