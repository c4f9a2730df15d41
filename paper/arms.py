"""Arms that several experiments share. One definition each: what is run and measured for one is there for the others."""

from typing import Any

from paper.experiment import OFF, QUEUE, SMALL, Arm, Setting, base
from xbm_app.train.presets import FULL_QUEUE, SLOTS

LOSSES = {"contrastive": "contrastive", "triplet": "triplet", "MS": "multi_similarity"}
SUMMED = {"loss.reduction": "sum"}
SCRATCH = {"model.weights": "none", "optim.iterations": 6000, "optim.decay_at": (4500,)}
# What everybody else does with a memory: all the rows, every pair of theirs added to the batch's
PLAIN_QUEUE = {**FULL_QUEUE, **SUMMED, "memory.reduction": None, "memory.batch_weight": 1.0}


def memory_of(setting: Setting) -> dict[str, Any]:
    """The memory of the paper's "w/ M" rows: Table 7 gives m = 0.9 for CUB and Cars, a queue for the others."""
    return SLOTS if setting.data in ("cub", "cars") else QUEUE


def loss_arms(setting: Setting) -> list[Arm]:
    """Each loss without and with memory. Small nets from scratch average over pairs, and have the paper's sum beside it."""
    kinds = [(label, {"loss.name": name}) for label, name in LOSSES.items()]
    if setting.data in SMALL:
        kinds.insert(1, ("contrastive, summed", {"loss.name": "contrastive", **SUMMED}))
    arms = []
    for label, loss in kinds:
        measured = {"contrastive": ("retrieved", "outliers"), "MS": ("outliers",)}.get(label, ())
        arms.append(Arm(label, {**loss, **OFF}, measures=("retrieved",) if label == "contrastive" else ()))
        arms.append(Arm(f"{label} w/ M", {**loss, **memory_of(setting)}, measures=measured))
    return arms


def contrastive(setting: Setting) -> tuple[Arm, Arm]:
    """Contrastive without and with memory."""
    arms = {arm.label: arm for arm in loss_arms(setting)}
    return arms["contrastive"], arms["contrastive w/ M"]


def queue(setting: Setting) -> Arm:
    """Contrastive with a queue of the whole training set: what is looked at for drift, negatives and Lemma 1."""
    return Arm("contrastive, queue R_M = 1", {"loss.name": "contrastive", **FULL_QUEUE}, measures=("lemma", "mined"))


def sized(setting: Setting, loss: str, size: int, ratio: float, sampler: str = "pk", passes: bool = False) -> Arm:
    """A loss at some batch size and memory ratio. The learning rate is the one chosen at the usual size, PK, R_M 0 or 1.

    Args:
        passes: as many passes through the training images as at the usual size, instead of as many iterations.
    """
    optim, many = base(setting).optim, base(setting).batch.size
    label = f"{loss}, batch {size}, {sampler}, R_M = {ratio:g}"
    settings = {"loss.name": LOSSES[loss], **QUEUE, "memory.ratio": ratio, "batch.size": size, "batch.sampler": sampler}
    usual: dict[str, Any] = {"batch.size": many, "batch.sampler": "pk", "memory.ratio": min(1.0, ratio * 1e9)}
    if passes:
        label += ", equal passes"
        times = many / size
        usual |= {"optim.iterations": optim.iterations, "optim.decay_at": optim.decay_at}
        decays = tuple(round(times * step) for step in optim.decay_at)
        settings |= {"optim.iterations": round(times * optim.iterations), "optim.decay_at": decays}
    off = OFF if ratio == 0 else {}
    chosen_as = f"{loss}, batch {many}, pk, R_M = {1 if ratio else 0}"
    is_queue = (loss, size, ratio, sampler) == ("contrastive", many, 1.0, "pk")
    return Arm(label, {**settings, **off}, {**usual, **off}, chosen_as, queue(setting).measures if is_queue else ())
