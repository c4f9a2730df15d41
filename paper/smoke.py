"""Runs every experiment in miniature on the built-in glyphs, a few iterations per run, to test that everything works."""

import os
from collections.abc import Callable
from pathlib import Path

from paper.experiment import Setting, config_of
from paper.experiments import ALL, RESULTS, ROBUSTNESS
from paper.page import write_page
from paper.plan import plan
from paper.record import Records
from paper.workers import Outcome, run_all

GLYPHS = Setting("glyphs", "small", "none", mini=True)
MOST = 8  # processes; each of them loads torch


def run_smoke(out: Path, names: list[str] | None = None, tell: Callable[[str], None] = print) -> Outcome:
    """Runs the named experiments, by default all of them, and writes results and pages under `out`."""
    from xbm_app.data.glyphs import read_glyphs

    # generated once, before several processes need them
    glyphs = read_glyphs(size=config_of(GLYPHS, {}).data.resize)
    chosen = [ALL[name] for name in names or ALL]
    records = Records(out / "results")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    outcome = run_all(
        lambda: plan(chosen, [GLYPHS], 1, records), lambda config: config, records, out / "runs", min(cores, MOST), tell=tell
    )
    for document in (RESULTS, ROBUSTNESS):
        write_page(records, document, out, {"glyphs": glyphs}, mini=True)
    return outcome
