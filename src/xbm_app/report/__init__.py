"""The report: one self-contained HTML page about runs, and what the memory did for them."""
