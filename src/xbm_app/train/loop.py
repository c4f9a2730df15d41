"""Training with a cross-batch memory, as the paper's Algorithm 1:

train network f conventionally with K epochs            warm-up: `memory.start` iterations
initialize XBM as queue M                               job.start_memory()
for x, y in loader:                                     run(...), each step: learn(...)
    anchors = f.forward(x)                              model(images)
    enqueue(M, (anchors.detach(), y)); dequeue(M)       memory.enqueue(...)
    sim = anchors · M.feats                             loss_fn(anchors, labels, memory): product, weights
    loss = pair_based_loss(sim, y, M.labels)            and gradient in one pass over the bank
    loss.backward(); optimizer.step()                   job.update()
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import the_ranks
from xbm.errors import DivergedError, InputError
from xbm_app.train.config import Config, check
from xbm_app.train.console import Console
from xbm_app.train.cuda_graphs import Recorded, why_not
from xbm_app.train.dataset import begin_run, read_run
from xbm_app.train.files import disk_trouble_told, held
from xbm_app.train.finish import finish, score
from xbm_app.train.job import TALLY, Iteration, Job
from xbm_app.train.metrics import Metrics
from xbm_app.train.watch import spread_of


def train(config: Config, folder: Path, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Trains as `config` says, writes everything under `folder`, and returns the final figures."""
    check(config)
    first = the_ranks().first
    begun = (folder / "config.yaml").exists()
    if begun and not resume:
        raise InputError(f"{folder} already holds a run: go on with --resume {folder}, or give another --out")
    if resume and not begun:
        raise InputError(f"{folder} holds no run: give the folder that `xbm train` printed")
    with disk_trouble_told(folder):
        dataset = read_run(config, folder) if resume else begin_run(config, folder, the_ranks())
        with held(folder, first):
            job = Job(config, dataset, folder)
            start = job.restore() if resume and job.last.exists() else 0
            job.ranks.wait()  # from here on rank 0 writes
            with Metrics(folder, start, config, first) as metrics, Console(config, start, quiet, job.ranks) as console:
                console.say(job.about)
                run(job, start, metrics, console)
                return finish(job, console)


def run(job: Job, start: int, metrics: Metrics, console: Console) -> None:
    config, model = job.config, job.model
    learn_next = steps(job, start, console)
    for step in range(start, config.optim.iterations):
        model.train()
        job.set_learning_rate(step)
        remembering = step >= config.memory.start and job.memory is not None
        if step == config.memory.start:
            job.start_memory(console.track)
        anchors = learn_next(step, remembering)
        job.tallied += config.batch.accumulate

        done = step + 1
        job.doubt_labels(done)
        last = done == config.optim.iterations
        drifts = job.drift(done, job.probed)  # θ after this step
        choosing = config.log.evaluate_every > 0 and done % config.log.evaluate_every == 0
        if done % config.log.every == 0 or choosing or last:
            row = line(job, step, anchors, drifts)
            if choosing:
                scores = next(iter(score(job)[0].values()))
                row |= {name: scores[name] for name in ("recall@1", "map@r")}
                if row["recall@1"] > job.best:
                    job.best = row["recall@1"]
                    job.save(done, job.folder / "checkpoints" / "best.pt")
            metrics.write(row, console.speed)
            for warning in job.watch.look(row):
                console.say(f"warning: {warning}")
            console.show(row)
        console.advance(done)
        if done % config.log.checkpoint_every == 0 or last:
            finite(job, step, job.tally.sum() + job.probe().sum(), look=True)
            job.save(done)


def learn(job: Job, iteration: Iteration, remembering: bool) -> Tensor:
    """One optimizer step; gives the last batch's anchors. Nothing in here waits for a GPU."""
    step, extra, batches = iteration
    memory, weights = job.memory, job.config.memory
    if remembering:
        job.enqueue_extra(extra)
    for images, labels, ids in batches:
        with job.autocast():
            anchors = job.learning(job.model(images), ids)
        finite(job, step, anchors)
        with torch.set_grad_enabled(not remembering or weights.batch_weight > 0):
            in_batch, stats = job.loss_fn(anchors, labels, ids=ids, return_stats=True)
        loss, against, *met = in_batch, *torch.zeros_like(in_batch).expand(3)
        if remembering and memory is not None:
            memory.enqueue(anchors.detach(), labels, ids)
            against, found = job.memory_loss_fn(anchors, labels, memory, ids=ids, return_stats=True)
            loss = weights.batch_weight * in_batch + weights.weight * against
            met = [found.valid_negatives.sum(), found.valid_positives.sum()]
        finite(job, step, loss)
        job.scaler.scale(loss / len(batches)).backward()
        job.tally += torch.stack([x.detach().double() for x in (loss, in_batch, against, stats.valid_negatives.sum(), *met)])
    job.update()
    return anchors


def steps(job: Job, start: int, console: Console) -> Callable[[int, bool], Tensor]:
    """What makes one step after the other: a recorded graph where that can be, else `learn` on data made ahead of time."""
    if (reason := why_not(job)) is None:
        console.say("the first iterations compile GPU kernels: up to a minute, once a machine")
        return Recorded(job, learn, console.say)
    if job.device.type == "cuda":
        console.say(f"a step runs kernel by kernel: {reason}")
    iterations = job.iterations(start)
    return lambda step, remembering: learn(job, next(iterations), remembering)


def line(job: Job, step: int, anchors: Tensor, drifts: dict[int, Tensor]) -> dict[str, float]:
    """One line of metrics: means since the last line. This is where a run waits for its device."""
    finite(job, step, job.tally.sum() + anchors.sum(), look=True)
    means = (job.tally_of_all() / max(1, job.tallied)).tolist()
    job.tally.zero_()
    job.tallied = 0
    row = {"step": float(step), "lr": job.learning_rate(), **dict(zip(TALLY, means))}
    cosine, rank = spread_of(anchors)
    row |= {"mean_cosine": float(cosine), "effective_rank": float(rank)}
    row |= {f"drift_{delta}": float(value) for delta, value in drifts.items()}
    if job.memory is None or step < job.config.memory.start:
        row |= dict.fromkeys(("memory_loss", "valid_negatives_memory", "valid_positives_memory"), math.nan)
    else:
        job.memory.check()
    job.heed(row["loss"])
    return row


def finite(job: Job, step: int, values: Tensor, look: bool = False) -> None:
    """Stops a run that has diverged, before it can overwrite a good checkpoint. A GPU is only waited for with `look`."""
    if (look or job.device.type == "cpu") and not bool(torch.isfinite(values.detach()).all()):
        raise DivergedError(step, job.last if job.last.exists() else None)
