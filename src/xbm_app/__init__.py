"""The applications: data, models, training, reports, search, serving, export and the `xbm` command."""
