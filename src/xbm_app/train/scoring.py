"""Scores embeddings by the protocols of a data set: at the end of a run, and again from its checkpoint alone."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from xbm.distributed import Ranks
from xbm.retrieval import score as score_protocol
from xbm_app.data.images import ImageSet, Protocol
from xbm_app.train.dataset import read_run
from xbm_app.train.load import load

Scores = dict[str, dict[str, float]]  # by protocol and metric


def score_protocols(
    protocols: Iterable[Protocol], embed: Callable[[ImageSet], Tensor], ranks: Ranks | None = None
) -> tuple[Scores, dict[int, Tensor]]:
    """Embeds every image set once and scores every protocol; returns the scores and the embeddings by `id(image_set)`."""
    embeddings: dict[int, Tensor] = {}
    scores = {}
    for protocol in protocols:
        for images in (protocol.query, protocol.gallery):
            if images is not None and id(images) not in embeddings:
                embeddings[id(images)] = embed(images)
        gallery = None if protocol.gallery is None else embeddings[id(protocol.gallery)]
        scores[protocol.name] = score_protocol(protocol, embeddings[id(protocol.query)], gallery, ranks)
    return scores, embeddings


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
    scores, _ = score_protocols(dataset.protocols, model.embed_set)
    first = dataset.protocols[0].name
    return {**scores[first], "protocol": first, "protocols": scores, "iterations": model.step}
