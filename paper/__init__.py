"""The paper's tables and figures as named experiments: planned, run side by side, kept as JSON, drawn as one page."""
