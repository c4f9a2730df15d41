"""Experiments: many runs put together to show something."""
