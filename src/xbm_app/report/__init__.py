"""One self-contained HTML page that shows what runs did, and what the memory did for them."""

from xbm_app.report.page import write_report
from xbm_app.report.view import Doubtful, Match, Mined, Query, RunView, Trace

__all__ = ["Doubtful", "Match", "Mined", "Query", "RunView", "Trace", "write_report"]
