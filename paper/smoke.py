"""Runs every experiment in miniature on the built-in glyphs, a few iterations per run, to test that everything works."""

from collections.abc import Callable
from pathlib import Path

from paper.experiment import Setting, config_of
from paper.experiments import ALL, DOCUMENTS
from paper.page import write_page
from paper.plan import plan
from paper.record import Records
from paper.workers import Outcome, run_all
from xbm_app.data.glyphs import read_glyphs
from xbm_app.data.parallel import default_workers

GLYPHS = Setting("glyphs", "small", "none", mini=True)


def run_smoke(out: Path, names: list[str] | None = None, tell: Callable[[str], None] = print) -> Outcome:
    """Runs the named experiments, by default all of them, and writes results and pages under `out`."""
    glyphs = read_glyphs(size=config_of(GLYPHS, {}).data.resize)  # generated once, before several processes need them
    chosen = [ALL[name] for name in names or ALL]
    records = Records(out / "results")
    jobs = default_workers()  # at most 8: each of these processes loads torch
    outcome = run_all(lambda: plan(chosen, [GLYPHS], 1, records), lambda config: config, records, out / "runs", jobs, tell=tell)
    for document in DOCUMENTS:
        write_page(records, document, out, {"glyphs": glyphs}, mini=True)
    return outcome
