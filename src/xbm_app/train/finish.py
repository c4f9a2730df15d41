"""What a run says before it begins, and its end: scores by the data set's own protocol, and the examples for the report."""

import csv
import platform
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.memory import CrossBatchMemory
from xbm.retrieval import cumulative, nearest, own_group_ids
from xbm_app.data.feeds import sweep
from xbm_app.data.images import ImageSet, Protocol
from xbm_app.files import read_checkpoint, read_json, replacing, write_json
from xbm_app.progress import Console
from xbm_app.train.cuda_graphs import without_benchmarking
from xbm_app.train.label_errors import MOST, LabelErrors, find_label_errors, too_many
from xbm_app.train.load import EMBED_BATCH, Scores, score_protocols
from xbm_app.train.state import RunState

NEIGHBOURS = 8  # retrieved images stored for each query
SHOWN = 12  # anchors whose mined negatives are stored, and label errors whose neighbours are
MOST_PASSES = 100  # over the training images, from which on a run hints at overfitting
MINED = 10  # negatives stored for each anchor
ALIKE = 4  # images of either class stored for each likely label error
DOUBTED = ["filepath", "given_label", "predicted_label", "label_score", "is_label_issue"]  # the columns of doubted.csv


@torch.no_grad()
def embed(run: RunState, images: ImageSet) -> Tensor:
    """(N, D): the embeddings of a set, by the model in eval mode and full precision, as `Embedder` computes them.

    With several ranks each returns its part, consecutive images.
    """
    feed = run.test_feeds.get(id(images)) or run.feed_of(images)
    if run.config.log.evaluate_every:  # a set that is scored again and again is loaded once
        run.test_feeds[id(images)] = feed
    was_training = run.model.training
    run.model.eval()
    first, stop = part_of_rank(len(feed), EMBED_BATCH, run.ranks)
    with without_benchmarking():
        batches = sweep(feed, EMBED_BATCH, device=run.device, first=first, stop=stop)
        parts = [run.model(batch) for batch, _, _ in batches]
    run.model.train(was_training)
    return torch.cat(parts or [torch.zeros(0, run.config.model.dim, device=run.device)])


def part_of_rank(count: int, batch_size: int, ranks: Ranks) -> tuple[int, int]:
    """The images that this rank embeds: whole batches, as one process would embed them, so that the bits are the same."""
    batches = -(-count // batch_size)
    first, stop = (batches * r // ranks.world * batch_size for r in (ranks.rank, ranks.rank + 1))
    return first, min(stop, count)


def score(run: RunState, protocols: Sequence[Protocol]) -> tuple[Scores, dict[int, Tensor]]:
    """The scores of these protocols, and the embeddings by `id(image_set)`."""
    return score_protocols(protocols, partial(embed, run), run.ranks)


def describe(run: RunState) -> str:
    train, query, ranks = run.dataset.train, run.dataset.protocols[0].query, run.ranks
    what = "the features of a frozen trunk, without augmentation, of " if run.config.model.freeze == "trunk" else ""
    where = str(run.device) if ranks.world == 1 else f"{run.device.type}, {ranks.world} processes"
    return (
        f"{run.dataset.name}: training on {what}{len(train)} images of {train.num_classes} classes, testing on "
        f"{len(query)} of {query.num_classes} classes; device {where}"
    )


def hints(run: RunState) -> Iterator[str]:
    """What the user of a slow device, or of few images, should know before the run."""
    config, images = run.config, len(run.dataset.train)
    if run.device.type == "cpu" and config.model.weights != "none" and config.model.freeze == "none":
        yield (
            "on a CPU, training the whole trunk takes hours: --set model.freeze=trunk trains only the head, on features that "
            "are computed once"
        )
    passes = config.optim.iterations * config.batch.size / images
    if config.data.name == "own" and passes > MOST_PASSES:
        fewer = max(1, round(MOST_PASSES * images / config.batch.size))
        yield (
            f"{config.optim.iterations:,} iterations are {passes:,.0f} passes over {images:,} images, which can overfit: "
            f"compare with --no-memory, and with --set optim.iterations={fewer} or less"
        )


def finish(run: RunState, console: Console) -> dict[str, Any]:
    """Scores the finished run, writes `result.json`, `examples.npz` and `doubted.csv`, and returns the figures.

    A run that evaluates held-out classes during training is scored at its best checkpoint, the one that `load` takes.
    """
    cost = cost_of_training(run, console)
    checkpoint, trained = run.last, run.config.optim.iterations
    run.ranks.wait()  # until the first rank has written its last checkpoint
    if run.chosen.exists():
        state, checkpoint = read_checkpoint(run.chosen, run.device), run.chosen
        run.load_weights(state)
        trained = state["step"]
    elif run.average is not None:
        run.average.load_into_model()
    names = ", ".join(protocol.name for protocol in run.dataset.protocols)
    console.say(f"scoring {checkpoint.name} (iteration {trained}) on {names}")
    scores, embeddings = score(run, run.dataset.protocols)
    train = run.dataset.train
    if run.label_memory is not None and too_many(run.label_memory, train.num_classes):
        warning = (
            f"more than {MOST:.0%} of the training images lie among those of other classes, so no label was treated as wrong: "
            "either the embeddings do not separate the classes yet (train longer), or that many labels are wrong"
        )
        run.watcher.notes.append(("warning", warning))
        console.say(warning)
    first = run.dataset.protocols[0]
    curve, examples = recall_curve(first, embeddings, run.ranks), neighbours(first, embeddings, run.ranks)
    device = run.device
    result: dict[str, Any] = {
        **scores[first.name],
        "protocol": first.name,
        "curve": curve,
        "protocols": scores,
        "checkpoint": checkpoint.name,
        "checkpoint_iterations": trained,
        "iterations": run.config.optim.iterations,
        "seed": run.config.seed,
        **cost,
        "notes": [list(note) for note in run.watcher.notes],
        "data": {
            "name": run.dataset.name,
            "train_images": len(train),
            "train_classes": train.num_classes,
            "shared_classes": len({*map(str, train.class_names)} & {*map(str, first.query.class_names)}),
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "device": device_name(device)},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    if run.ranks.first:
        examples |= mined_negatives(run)
        if run.label_memory is not None:
            errors = find_label_errors(run.label_memory, train.num_classes)
            examples |= nearest_to_errors(run.label_memory, errors)
            write_label_errors(run, errors, console)
        write_examples(run, examples)
        write_json(run.folder / "result.json", result, checksum=True)  # last: a run that has it is finished
    return result


def write_label_errors(run: RunState, errors: LabelErrors, console: Console) -> None:
    """Writes `doubted.csv`: the likely label errors at the end of a run, the most likely first, for a person to review.

    The columns are those of the label issues of cleanlab's Datalab, and FiftyOne reads the file as a `CSVDataset`. A score
    is in [0, 1] and smaller for a more likely error: 0.5 is an image that is as similar to its own class as to the other.
    """
    images = run.dataset.train
    names = images.class_names
    with (
        replacing(run.folder / "doubted.csv", checksum=True) as temporary,
        temporary.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(DOUBTED)
        for index, label, lead in zip(*(each.tolist() for each in errors)):
            given = names[images.labels[index]]
            writer.writerow([images.describe(index), given, names[label], f"{(2 - lead) / 4:.4f}", True])
    if len(errors.rows):
        console.say(
            f"{len(errors.rows)} of {len(images)} training images lie among those of other classes: doubted.csv lists them, "
            "the most likely label errors first"
        )


def cost_of_training(run: RunState, console: Console) -> dict[str, float | None]:
    """Time and memory, before anything is scored; a finished run that is only scored again keeps what it had."""
    result = run.folder / "result.json"
    if not console.speed > 0 and result.exists():
        before = read_json(result)
        return {name: before.get(name) for name in ("seconds_per_iteration", "peak_memory_bytes")}
    peak = torch.cuda.max_memory_allocated(run.device) if run.device.type == "cuda" else None
    return {"seconds_per_iteration": 1 / console.speed if console.speed > 0 else None, "peak_memory_bytes": peak}


def recall_curve(protocol: Protocol, embeddings: dict[int, Tensor], ranks: Ranks | None = None, up_to: int = 32) -> list[float]:
    """Recall@K for K = 1, 2, ..."""
    queries = embeddings[id(protocol.query)]
    labels = torch.as_tensor(protocol.query.labels, device=queries.device)
    ids, gallery_ids = own_group_ids(protocol)
    if protocol.gallery is None:
        return cumulative(queries, labels, ids=ids, up_to=up_to, ranks=ranks).tolist()
    gallery = embeddings[id(protocol.gallery)]
    gallery_labels = torch.as_tensor(protocol.gallery.labels, device=queries.device)
    return cumulative(queries, labels, gallery, gallery_labels, ids, gallery_ids, up_to=up_to, ranks=ranks).tolist()


def neighbours(protocol: Protocol, embeddings: dict[int, Tensor], ranks: Ranks) -> dict[str, np.ndarray]:
    """What every query retrieves, as indices, and how similar it is."""
    queries, count = embeddings[id(protocol.query)], len(protocol.query)
    ids, gallery_ids = own_group_ids(protocol)
    if protocol.gallery is None:
        own = torch.arange(count) if ids is None else ids
        similarity, index = nearest(queries, queries, min(NEIGHBOURS, count - 1), own, own, ranks)
    else:
        gallery = embeddings[id(protocol.gallery)]
        similarity, index = nearest(queries, gallery, min(NEIGHBOURS, len(protocol.gallery)), ids, gallery_ids, ranks)
    return {"neighbours": index.cpu().numpy(), "similarities": similarity.cpu().numpy()}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    count = torch.get_num_threads()
    return f"cpu, {count} thread{'s' if count > 1 else ''}"


def write_examples(run: RunState, arrays: dict[str, np.ndarray]) -> None:
    """Writes `examples.npz`: what the report shows in pictures, as indices. The report opens the images."""
    with replacing(run.folder / "examples.npz") as temporary:
        np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]


@torch.no_grad()
def mined_negatives(run: RunState) -> dict[str, np.ndarray]:
    """For some anchors of one more batch: a positive, the hardest negatives of the batch, and those of the memory.

    Memory negatives are taken uniformly over the sorted similarities above 0.5, from hard to simple, as in the paper's
    supplementary figure 2; if fewer are above 0.5, the hardest ones are taken.
    """
    data, device = run.data, run.device
    indices = data.sampler.batch(data.batches_per_step * run.config.optim.iterations)
    ids, labels = torch.from_numpy(indices).to(device), torch.as_tensor(run.dataset.train.labels).to(device)
    run.model.eval()
    with run.autocast:
        anchors = run.model(data.feed.test(indices).to(device)).float()
    chosen = np.linspace(0, len(indices) - 1, min(SHOWN, len(indices))).astype(int)
    columns: dict[str, list] = {"anchor": [], "positive": [], "batch": [], "batch_s": [], "memory": [], "memory_s": []}
    pools = {"batch": (anchors, ids)}
    if run.memory is not None and len(run.memory):
        pools["memory"] = (run.memory.embeddings.float(), run.memory.ids)
    for a in chosen:
        label = labels[ids[a]]
        same = (labels == label).nonzero()[:, 0]
        others = same[same != ids[a]]
        columns["anchor"].append(int(ids[a]))
        columns["positive"].append(int(others[0]) if len(others) else int(ids[a]))
        for name, (pool, pool_ids) in pools.items():
            s = torch.where(labels[pool_ids] != label, pool @ anchors[a], -torch.inf)
            order = s.argsort(descending=True)[: int((s > -torch.inf).sum())]
            hard = order[s[order] > 0.5]
            if name == "memory" and len(hard) >= MINED:
                order = hard[torch.linspace(0, len(hard) - 1, MINED).long().to(hard.device)]
            index, similarity = padded(pool_ids[order], s[order], MINED)
            columns[name].append(index)
            columns[f"{name}_s"].append(similarity)
    return {f"mined_{name}": np.array(values) for name, values in columns.items()}


def nearest_to_errors(memory: CrossBatchMemory, errors: LabelErrors) -> dict[str, np.ndarray]:
    """For the most likely label errors: the most similar images of their own class, and of the class they lie among."""
    embeddings, labels = memory.rows.detach().float(), memory.row_labels.where(memory.stamps >= 0, -1)
    columns: dict[str, list] = {"own": [], "own_s": [], "other": [], "other_s": []}
    rows, nearest_classes = errors.rows[:SHOWN], errors.nearest[:SHOWN]
    for row, nearest_class in zip(rows.tolist(), nearest_classes.tolist()):
        s = embeddings @ embeddings[row]
        s[row] = -torch.inf
        for name, label in (("own", int(memory.row_labels[row])), ("other", nearest_class)):
            in_class = s.where(labels == label, -torch.inf)
            order = in_class.argsort(descending=True)[: int((in_class > -torch.inf).sum())]
            index, similarity = padded(order, s[order], ALIKE)
            columns[name].append(index)
            columns[f"{name}_s"].append(similarity)
    images = {"image": rows.cpu().numpy(), "nearest": nearest_classes.cpu().numpy()}
    return {f"doubted_{name}": np.array(values) for name, values in {**images, **columns}.items()}


def padded(index: Tensor, similarity: Tensor, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `length` of both, padded with −1 and NaN."""
    indices, similarities = np.full(length, -1), np.full(length, np.nan)
    indices[: len(index)], similarities[: len(index)] = index[:length].cpu().numpy(), similarity[:length].cpu().numpy()
    return indices, similarities
