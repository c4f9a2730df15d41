"""Training with a cross-batch memory: the paper's Algorithm 1.

train network f conventionally with K epochs            the first `memory.start` iterations: with_memory is False
initialize XBM as queue M                               fill_memory(...)
for x, y in loader:                                     run_loop(...)
    anchors = f.forward(x)                              learn(...): model(images)
    enqueue(M, (anchors.detach(), y)); dequeue(M)       memory.enqueue(...)
    sim = anchors · M.feats                             memory_loss_fn(anchors, labels, memory): similarities, weights
    loss = pair_based_loss(sim, y, M.labels)            and gradient in one pass over the bank
    loss.backward(); optimizer.step()                   loss.backward(), update_weights(...)
"""

import math
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xbm.distributed import the_ranks
from xbm.errors import DivergedError, InputError
from xbm.memory import statistics_kept
from xbm_app.files import explain_disk_errors, locked
from xbm_app.progress import Console
from xbm_app.train.config import Config, check
from xbm_app.train.cuda_graphs import RecordedStep, Replayed, why_not
from xbm_app.train.dataset import Batch, begin_run, read_run
from xbm_app.train.finish import describe, finish, hints, score
from xbm_app.train.label_errors import ignore_label_errors, is_ignored
from xbm_app.train.metrics import Metrics, cosine_and_rank, one_line
from xbm_app.train.optimization import changes_rate, learn_in_chunks, update_weights
from xbm_app.train.state import COUNTS, NO_HOOKS, SUMS, Hooks, RunState, keys_of

CHECKPOINT_SECONDS = 300  # a slow run of one process saves at least this often, however few iterations that is


def train(config: Config, folder: Path, resume: bool = False, quiet: bool = False, hooks: Hooks = NO_HOOKS) -> dict[str, Any]:
    """Trains as `config` says, writes everything under `folder`, and returns the final figures."""
    check(config)
    hooks.check(config)
    ranks = the_ranks()
    if resume and not (folder / "config.yaml").exists():
        raise InputError(f"{folder} holds no run: pass the folder that `xbm train` printed")
    with explain_disk_errors(folder), locked(folder, ranks.first):
        if not resume and (folder / "config.yaml").exists():
            raise InputError(f"{folder} already holds a run: continue it with --resume {folder}, or use another --out")
        dataset = read_run(config, folder) if resume else begin_run(config, folder, ranks)
        run = RunState(config, dataset, folder, hooks)
        start = run.restore() if resume and run.last.exists() else 0
        ranks.wait()  # from here on rank 0 writes
        with (
            Metrics(folder, start, config, ranks.first) as metrics,
            Console(config.optim.iterations, start, quiet or not ranks.first) as console,
        ):
            console.say(describe(run))
            for hint in hints(run):
                console.say(hint)
            if resume and not run.last.exists():
                console.say("it had been stopped before its first checkpoint: starting at the first iteration")
            run_loop(run, start, metrics, console)
            result = finish(run, console)
            metrics.finish(config.optim.iterations, result["protocols"][result["protocol"]])
            return result


def run_loop(run: RunState, start: int, metrics: Metrics, console: Console) -> None:
    """Trains from iteration `start` to the last."""
    config, model, memory, drift, log = run.config, run.model, run.memory, run.drift, run.config.log
    train_step, next_save = steps(run, start, console), time.monotonic() + CHECKPOINT_SECONDS
    model.train()
    for step in range(start, config.optim.iterations):
        if step == start or changes_rate(config.optim, step):
            run.set_learning_rate(step)
        if step == config.memory.start and memory is not None and config.memory.fill:
            fill_memory(run, console)
        anchors = train_step(step, memory is not None and step >= config.memory.start)
        run.summed += config.batch.accumulate

        done = step + 1
        last = done == config.optim.iterations
        if run.label_memory is not None and done % run.label_check_every == 0:
            ignore_label_errors(run.label_memory, run.dataset.train.num_classes)
        drifts = drift(done, run.probe_model) if done % drift.every in drift.phases else {}
        evaluates = log.evaluate_every > 0 and done % log.evaluate_every == 0
        if evaluates or last or done % log.every == 0:
            row = row_of_metrics(run, step, anchors, drifts)
            if evaluates:
                with nullcontext() if run.average is None else run.average.in_model():
                    (scores,) = score(run, run.dataset.protocols[:1])[0].values()
                row |= {name: scores[name] for name in ("recall@1", "map@r")}
                if run.ranks.first and run.hooks.on_evaluate is not None:
                    run.hooks.on_evaluate(done, scores)
                if config.optim.schedule == "plateau":
                    run.plateau.step(row["recall@1"])
                if row["map@r"] > run.best:
                    run.best = row["map@r"]
                    run.save(done, run.chosen)
            metrics.write(row, console.speed)
            if run.ranks.first and run.hooks.on_log is not None:
                run.hooks.on_log({name: value for name, value in row.items() if not math.isnan(value)})
            for warning in run.watcher.check(row):
                console.say(f"warning: {warning}")
            console.text = one_line(row)
        if last or time.monotonic() >= console.next_update:
            console.advance(done)
        overdue = run.ranks.world == 1 and time.monotonic() >= next_save  # clocks of several ranks differ
        if last or overdue or done % log.checkpoint_every == 0:
            # a model that cannot embed the probes has diverged
            stop_if_diverged(run, step, run.sums.sum() + drift.embed(run.probe_model).sum())
            metrics.record()
            run.save(done, run.last)
            next_save = time.monotonic() + CHECKPOINT_SECONDS


def learn(run: RunState, step: int, batches: list[Batch], with_memory: bool) -> Tensor:
    """Makes one optimizer step and returns the last batch's anchors. On a GPU nothing in here waits for the device."""
    model, memory = run.model, run.memory
    n = len(batches) // run.config.batch.accumulate  # the ×n update: the last of every n batches has anchors
    if with_memory and memory is not None and n > 1:
        with statistics_kept(model), run.autocast:
            for k, (images, labels, ids) in enumerate(batches):
                if k % n != n - 1:
                    memory.enqueue((run.keys or model)(images), labels, ids)
    for images, labels, ids in batches[n - 1 :: n]:

        def loss_of(anchors: Tensor, batch: Batch = (images, labels, ids)) -> Tensor:
            return loss_of_anchors(run, step, anchors, batch, with_memory) / (len(batches) // n)

        if run.config.batch.chunk:
            anchors = learn_in_chunks(run, images, loss_of)
            continue
        with run.autocast:
            anchors = model(images)
        run.scaler.scale(loss_of(anchors)).backward()
    update_weights(run)
    return anchors


def loss_of_anchors(run: RunState, step: int, anchors: Tensor, batch: Batch, with_memory: bool) -> Tensor:
    """The loss of one batch, whose anchors are written to the memory; adds its figures to `run.sums`."""
    memory, weights, (images, labels, ids) = run.memory, run.config.memory, batch
    if run.label_memory is not None:  # images with likely wrong labels are written to the memory, but learn nothing
        anchors = torch.where(is_ignored(run.label_memory, ids)[:, None], anchors.detach(), anchors)
    if run.device.type == "cpu":
        stop_if_diverged(run, step, anchors)
    with torch.set_grad_enabled(not with_memory or weights.batch_weight > 0):
        batch_loss, batch_stats = run.loss_fn(anchors, labels, ids=ids, return_stats=True)
    loss, memory_loss, *memory_counts = batch_loss, *torch.zeros_like(batch_loss).expand(3)
    if with_memory and memory is not None:
        memory.enqueue(anchors.detach() if run.keys is None else keys_of(run, images), labels, ids)
        memory_loss, stats = run.memory_loss_fn(anchors, labels, memory, ids=ids, return_stats=True)
        loss = weights.batch_weight * batch_loss + weights.weight * memory_loss
        memory_counts = [stats.valid_negatives.sum(), stats.valid_positives.sum()]
    if run.device.type == "cpu":
        stop_if_diverged(run, step, loss)
    values = (loss, batch_loss, memory_loss, batch_stats.valid_negatives.sum(), *memory_counts)
    run.sums += torch.stack([value.detach().to(run.sums.dtype) for value in values])
    return loss


def fill_memory(run: RunState, console: Console) -> None:
    """Initializes the memory with embeddings of random training images."""
    assert run.memory is not None
    parts = run.data.random_indices()
    images = console.track(run.data.random_batches(parts), "filling the memory", len(parts))
    # several ranks communicate within a pass, about batch norm: such a pass cannot be recorded
    model = Replayed(run.model) if run.ranks.world == 1 and not run.model.compiled else run.model
    with run.autocast, closing(images):
        run.memory.fill(model, images)


def steps(run: RunState, start: int, console: Console) -> Callable[[int, bool], Tensor]:
    """What makes one step after the other: a recorded graph if possible, else `learn` on batches prepared ahead of time."""
    reason = why_not(run)
    if reason is None:
        console.say("the first iterations compile GPU kernels, which takes up to a minute, once per machine")
        return RecordedStep(run, learn, console.say)
    if run.device.type == "cuda":
        console.say(f"a step runs kernel by kernel: {reason}")
    batches, n = run.data.batches(start), run.data.batches_per_step
    return lambda step, with_memory: learn(run, step, [batch[1:] for batch in islice(batches, n)], with_memory)


def row_of_metrics(run: RunState, step: int, anchors: Tensor, drifts: dict[int, Tensor]) -> dict[str, float]:
    """One row of metrics: means since the last row. This is where a run waits for its device."""
    stop_if_diverged(run, step, run.sums.sum() + anchors.sum())
    means = (run.global_sums() / max(1, run.summed)).tolist()
    run.sums.zero_()
    run.summed = 0
    cosine, rank = cosine_and_rank(anchors)
    row = {"step": float(step), "lr": float(run.optimizer.param_groups[-1]["lr"]), **dict(zip(SUMS, means))}
    row |= {"mean_cosine": float(cosine), "effective_rank": float(rank)}
    row |= {f"drift_{delta}": float(value) for delta, value in drifts.items()}
    if run.memory is None or step < run.config.memory.start:
        row |= dict.fromkeys(("memory_loss", "valid_negatives_memory", "valid_positives_memory"), math.nan)
    else:
        run.memory.check()
    if not run.counts_pairs:
        row |= dict.fromkeys(SUMS[COUNTS], math.nan)
    return row


def stop_if_diverged(run: RunState, step: int, values: Tensor) -> None:
    """Stops a run whose values are not finite, before it can overwrite a good checkpoint. Waits for the device."""
    if not bool(torch.isfinite(values.detach()).all()):
        raise DivergedError(step, run.last if run.last.exists() else None)
