"""Scores a finished run again, from its checkpoint alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from xbm.retrieval import score as score_protocol
from xbm_app.train.dataset import read_run
from xbm_app.train.load import load


def evaluate_run(folder: Path, root: Path | None = None) -> dict[str, Any]:
    """The figures of every protocol of the run's data set.

    Args:
        folder: a run folder, or one of the checkpoints in it.
        root: where the data lies now.
    """
    model = load(folder)
    config = model.config
    if root is not None:
        config = replace(config, data=replace(config.data, root=str(root.resolve())))
    dataset = read_run(config, folder.parents[1] if folder.is_file() else folder)
    kept: dict[int, Tensor] = {}
    found = {}
    for protocol in dataset.protocols:
        for images in (protocol.query, protocol.gallery):
            if images is not None and id(images) not in kept:
                kept[id(images)] = model.embed_set(images)
        gallery = None if protocol.gallery is None else kept[id(protocol.gallery)]
        found[protocol.name] = score_protocol(protocol, kept[id(protocol.query)], gallery)
    first = dataset.protocols[0].name
    return {**found[first], "protocol": first, "protocols": found, "iterations": model.step}
