"""The search server: a web page and an API for an index, meant for one person's machine."""
