"""What memory costs: time and GPU memory beside R@1 (Table 2). Times come from runs that had the machine for themselves."""

from collections.abc import Sequence

from paper import published
from paper.arms import sized
from paper.blocks import NONE, Block, Table, spread
from paper.experiment import Arm, Experiment, Setting, base
from paper.study import Study

KINDS = {"batch 64": (64, 0.0), "batch 256": (256, 0.0), "batch 64, R_M = 0.01": (64, 0.01), "batch 64, R_M = 1": (64, 1.0)}
SHORT = {"optim.iterations": 600, "optim.decay_at": (), "memory.start": 0, "memory.fill": False, "log.every": 100}


def cost_arms(setting: Setting) -> list[Arm]:
    """A short run of each kind to be timed, and a full one for its R@1."""
    timed, full = [], []
    for label, (size, ratio) in KINDS.items():
        arm = sized(setting, "contrastive", size, ratio)
        timed.append(Arm(f"{label}, timed", {**arm.settings, **SHORT}, choose=None, measures=("cost",), seeds=1))
        full.append(Arm(label, arm.settings, arm.choose))
    return timed + full


def draw_cost(data: str, studies: Sequence[Study]) -> list[Block]:
    rows = [["paper (SOP, GoogLeNet)"] + [""] * 4]
    for label, (hours, memory, recall) in published.TABLE_2.items():
        extra = "" if label == "batch 64" else "+"
        rows.append([label, NONE, f"{hours:.2f} h", f"{extra}{memory:g} GB", f"{recall:.1f}"])
    devices = set()
    for study in studies:
        rows.append([f"{study.setting.label}"] + [""] * 4)
        first = None
        iterations = base(study.setting).optim.iterations
        arms = {arm.label: arm for arm in study.arms}
        for label in KINDS:
            told = next((run for run in study.runs(arms[f"{label}, timed"]) if "cost" in run.measures), None)
            seconds = told.measures["cost"]["seconds_per_iteration"] if told else None
            peak = told.measures["cost"]["peak_memory_bytes"] if told else None
            if told:
                devices.add(told.values["device"])
            first = peak if label == "batch 64" else first
            taken = NONE
            if peak is not None:
                taken = f"{peak / 1e9:.2f} GB" if label == "batch 64" else f"{(peak - (first or 0)) / 1e9:+.2f} GB"
            rows.append([
                label, NONE if seconds is None else f"{1000 * seconds:.1f} ms",
                NONE if seconds is None else f"{seconds * iterations / 60:.1f} min", taken, spread(study.spread(arms[label])),
            ])  # fmt: skip
    where = f"Ours on {', '.join(sorted(devices))}: " if devices else ""
    said = (
        f"{where}an iteration takes the difference between a run of 600 and one of 100 iterations, divided by 500; a "
        "schedule that, times its iterations. Memory is the peak that tensors took, images on the device included."
    )
    return [Table(["", "an iteration", "schedule", "GPU memory", "R@1, %"], rows), said] if studies else []


EXPERIMENTS = (Experiment("table-2", "Time and GPU memory", "Table 2", ("sop",), cost_arms, draw_cost),)
