"""The paper's tables and figures as named experiments: planned, run in parallel, stored as JSON files, drawn as pages."""
