"""Every experiment in miniature on the built-in glyphs: a few iterations of each run, to see that everything works."""

import os
from collections.abc import Callable
from pathlib import Path

from paper.experiment import config_of
from paper.machine import Machine
from paper.page import BEYOND_THE_PAPER, RESULTS, write_page
from paper.plan import plan
from paper.record import Records
from paper.registry import ALL
from paper.workers import Outcome, run_all

GLYPHS = Machine({"glyphs": None}, {})
MOST = 8  # processes: each loads torch


def run_smoke(out: Path, names: list[str] | None = None, tell: Callable[[str], None] = print) -> Outcome:
    """Runs the experiments named, all of them by default, and writes their page; results and page stay under `out`.

    The glyphs are made once, before several processes want them.
    """
    from xbm_app.data.glyphs import read_glyphs

    settings = GLYPHS.settings(mini=True)
    glyphs = read_glyphs(size=config_of(settings[0], {}).data.resize)
    chosen = [ALL[name] for name in names or ALL]
    records = Records(out / "results")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    outcome = run_all(
        lambda: plan(chosen, settings, 1, records), GLYPHS.place, records, out / "runs", min(cores, MOST), tell=tell
    )
    for document in (RESULTS, BEYOND_THE_PAPER):
        write_page(records, out, {"glyphs": glyphs}, mini=True, document=document)
    return outcome
