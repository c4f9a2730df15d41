"""The end of a run: scores by the data set's own protocol, and the examples that the report shows."""

import csv
import json
import platform
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xbm.distributed import Ranks
from xbm.memory import CrossBatchMemory
from xbm.retrieval import cumulative, nearest
from xbm_app.data.feeds import sweep
from xbm_app.data.images import ImageSet, Protocol
from xbm_app.train import task
from xbm_app.train.console import Console
from xbm_app.train.cuda_graphs import without_trials
from xbm_app.train.files import replacing
from xbm_app.train.job import Job
from xbm_app.train.label_errors import MOST, Doubted, doubted, too_many
from xbm_app.train.scoring import Scores, score_protocols

NEIGHBOURS = 8  # retrieved images kept for each query
SHOWN = 12  # anchors whose mined negatives are kept
MINED = 10  # negatives kept for each
ALIKE = 4  # images of either class kept for each image whose label is in doubt


@torch.no_grad()
def embed(job: Job, images: ImageSet) -> Tensor:
    """(N, D): the embeddings of a set, by the model in eval mode and full precision, as `Embedder` makes them.

    Of several ranks each has its part: consecutive images.
    """
    feed = job.test_feed(images)
    was_training = job.model.training
    job.model.eval()
    first, stop = share_of(len(feed), task.EMBEDDED, job.ranks)
    batches = sweep(feed, task.EMBEDDED, device=job.device, first=first, stop=stop)
    with without_trials():
        parts = [job.model(batch) for batch, _, _ in batches]
    job.model.train(was_training)
    return torch.cat(parts or [torch.zeros(0, job.config.model.dim, device=job.device)])


def share_of(count: int, at_once: int, ranks: Ranks) -> tuple[int, int]:
    """Which images this rank embeds: whole batches, as one process would make them, so that the bits are the same."""
    batches = -(-count // at_once)
    first, stop = (batches * r // ranks.world * at_once for r in (ranks.rank, ranks.rank + 1))
    return first, min(stop, count)


def score(job: Job) -> tuple[Scores, dict[int, Tensor]]:
    """The scores of every protocol, and the embeddings by `id(image_set)`."""
    return score_protocols(job.dataset.protocols, partial(embed, job), job.ranks)


def finish(job: Job, console: Console) -> dict[str, Any]:
    """Scores the finished run, writes `result.json`, `examples.npz` and `doubted.csv`, and returns the figures."""
    cost = cost_of_training(job, console)
    console.say("scoring " + ", ".join(protocol.name for protocol in job.dataset.protocols))
    scores, kept = score(job)
    if job.doubting is not None and too_many(job.doubting, job.dataset.train.num_classes):
        unsure = (
            f"more than {MOST:.0%} of the training images lie among those of other classes, so none was doubted: either the "
            "embeddings do not tell the classes apart, and longer training may, or that many labels are wrong"
        )
        job.watch.notes.append(("warning", unsure))
        console.say(unsure)
    first = job.dataset.protocols[0]
    curve, shown = recall_curve(first, kept, job.ranks), neighbours(first, kept, job.ranks)
    result: dict[str, Any] = {
        **scores[first.name],
        "protocol": first.name,
        "curve": curve,
        "protocols": scores,
        "iterations": job.config.optim.iterations,
        "seed": job.config.seed,
        **cost,
        "notes": [list(note) for note in job.watch.notes],
        "data": {
            "name": job.dataset.name,
            "train_images": len(job.dataset.train),
            "train_classes": job.dataset.train.num_classes,
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "device": device_name(job.device)},
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    if job.ranks.first:
        shown |= mine(job)
        if job.doubting is not None:
            found = doubted(job.doubting, job.dataset.train.num_classes)
            shown |= doubtful(job.doubting, found)
            write_doubted(job, found, console)
        write_examples(job, shown)
        write_json(job.folder / "result.json", result)  # last: a run that has it is finished
    return result


def write_doubted(job: Job, found: Doubted, console: Console) -> None:
    """The images whose labels are in doubt at the end, the most doubtful first, for a person to look at: `doubted.csv`."""
    images = job.dataset.train
    names = images.class_names
    with replacing(job.folder / "doubted.csv") as beside, beside.open("w", newline="", encoding="utf-8") as f:
        lines = csv.writer(f, lineterminator="\n")
        lines.writerow(["image", "label", "nearest", "lead"])
        for k, among, lead in zip(*(each.tolist() for each in found)):
            lines.writerow([images.describe(k), names[images.labels[k]], names[among], f"{lead:.3f}"])
    if len(found.rows):
        console.say(
            f"{len(found.rows)} of {len(images)} training images lie among those of other classes: doubted.csv lists them, "
            "the most doubtful first"
        )


def cost_of_training(job: Job, console: Console) -> dict[str, float | None]:
    """Time and memory, before anything is scored; a finished run that is only scored anew keeps what it had."""
    result = job.folder / "result.json"
    if not console.speed > 0 and result.exists():
        before = json.loads(result.read_text())
        return {name: before.get(name) for name in ("seconds_per_iteration", "peak_memory_bytes")}
    peak = torch.cuda.max_memory_allocated(job.device) if job.device.type == "cuda" else None
    return {"seconds_per_iteration": 1 / console.speed if console.speed > 0 else None, "peak_memory_bytes": peak}


def recall_curve(protocol: Protocol, kept: dict[int, Tensor], ranks: Ranks | None = None, up_to: int = 32) -> list[float]:
    """Recall@K for K = 1, 2, ..."""
    queries = kept[id(protocol.query)]
    labels = torch.as_tensor(protocol.query.labels, device=queries.device)
    if protocol.gallery is None:
        return cumulative(queries, labels, up_to=up_to, ranks=ranks).tolist()
    gallery_labels = torch.as_tensor(protocol.gallery.labels, device=queries.device)
    gallery = kept[id(protocol.gallery)]
    return cumulative(queries, labels, gallery, gallery_labels, up_to=up_to, ranks=ranks).tolist()


def neighbours(protocol: Protocol, kept: dict[int, Tensor], ranks: Ranks) -> dict[str, np.ndarray]:
    """What every query retrieves, as indices, and how similar it is."""
    queries, count = kept[id(protocol.query)], len(protocol.query)
    if protocol.gallery is None:
        own = torch.arange(count, device=queries.device)
        similarity, index = nearest(queries, queries, min(NEIGHBOURS, count - 1), own, own, ranks)
    else:
        gallery = kept[id(protocol.gallery)]
        similarity, index = nearest(queries, gallery, min(NEIGHBOURS, len(protocol.gallery)), ranks=ranks)
    return {"neighbours": index.cpu().numpy(), "similarities": similarity.cpu().numpy()}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        beside.write_text(json.dumps(value, indent=2) + "\n")


def write_examples(job: Job, found: dict[str, np.ndarray]) -> None:
    """What the report shows in pictures, as indices: it opens the images."""
    with replacing(job.folder / "examples.npz") as beside:
        np.savez_compressed(beside, **found)  # type: ignore[arg-type]


@torch.no_grad()
def mine(job: Job) -> dict[str, np.ndarray]:
    """For some anchors of one more batch: a positive, the hardest negatives of the batch, and those of the memory.

    Memory negatives are taken uniformly over the sorted similarities above 0.5, from hard to simple, as in the paper's
    supplementary figure 2; where fewer pass, the hardest ones are shown.
    """
    indices = job.sampler.batch(job.batches_per_step * job.config.optim.iterations)
    ids, labels = torch.from_numpy(indices).to(job.device), torch.as_tensor(job.dataset.train.labels).to(job.device)
    job.model.eval()
    with job.autocast():
        anchors = job.model(job.feed.test(indices).to(job.device)).float()
    picked = np.linspace(0, len(indices) - 1, min(SHOWN, len(indices))).astype(int)
    rows: dict[str, list] = {"anchor": [], "positive": [], "batch": [], "batch_s": [], "memory": [], "memory_s": []}
    pools = {"batch": (anchors, ids)}
    if job.memory is not None and len(job.memory):
        pools["memory"] = (job.memory.embeddings.float(), job.memory.ids)
    for a in picked:
        label = labels[ids[a]]
        same = (labels == label).nonzero()[:, 0]
        others = same[same != ids[a]]
        rows["anchor"].append(int(ids[a]))
        rows["positive"].append(int(others[0]) if len(others) else int(ids[a]))
        for name, (pool, pool_ids) in pools.items():
            s = torch.where(labels[pool_ids] != label, pool @ anchors[a], -torch.inf)
            order = s.argsort(descending=True)[: int((s > -torch.inf).sum())]
            hard = order[s[order] > 0.5]
            if name == "memory" and len(hard) >= MINED:
                order = hard[torch.linspace(0, len(hard) - 1, MINED).long().to(hard.device)]
            index, similarity = padded(pool_ids[order], s[order], MINED)
            rows[name].append(index)
            rows[f"{name}_s"].append(similarity)
    return {f"mined_{key}": np.array(value) for key, value in rows.items()}


def doubtful(memory: CrossBatchMemory, found: Doubted) -> dict[str, np.ndarray]:
    """For the most doubtful images: what is most like them in their own class, and in the one they lie among."""
    embeddings, labels = memory.rows.detach().float(), memory.row_labels.where(memory.stamps >= 0, -1)
    rows: dict[str, list] = {"own": [], "own_s": [], "other": [], "other_s": []}
    for k, among in zip(found.rows[:SHOWN].tolist(), found.nearest[:SHOWN].tolist()):
        s = embeddings @ embeddings[k]
        s[k] = -torch.inf
        for name, label in (("own", int(memory.row_labels[k])), ("other", among)):
            of_class = s.where(labels == label, -torch.inf)
            order = of_class.argsort(descending=True)[: int((of_class > -torch.inf).sum())]
            index, similarity = padded(order, s[order], ALIKE)
            rows[name].append(index)
            rows[f"{name}_s"].append(similarity)
    first = {"image": found.rows[:SHOWN].cpu().numpy(), "nearest": found.nearest[:SHOWN].cpu().numpy()}
    return {f"doubted_{key}": np.array(value) for key, value in {**first, **rows}.items()}


def padded(index: Tensor, similarity: Tensor, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first so many of both; where there are fewer, −1 and NaN."""
    out, out_s = np.full(length, -1), np.full(length, np.nan)
    out[: len(index)], out_s[: len(index)] = index[:length].cpu().numpy(), similarity[:length].cpu().numpy()
    return out, out_s
