"""Speed measured as ratios, in one process on the same inputs. `make bench` prints every table that runs on a CPU."""
