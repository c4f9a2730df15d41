"""A web page and an API to search an index with, for one person's machine."""
