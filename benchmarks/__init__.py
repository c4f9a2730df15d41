"""Speed as ratios, measured in one process on the same inputs. `make bench` prints every table."""
