"""The report: one self-contained HTML page about runs, and what the memory did for them."""

from xbm_app.report.groups import Doubtful, Match, Mined, Query, RunView, Trace
from xbm_app.report.page import write_report

__all__ = ["Doubtful", "Match", "Mined", "Query", "RunView", "Trace", "write_report"]
