"""The trainer: frozen targets and drafter replicas, one thread and one device each."""

import os

# Read by tqdm when it is imported: a log file is no place for progress bars.
os.environ.setdefault("TQDM_DISABLE", "1")

# Read by OpenMP when torch is imported. Its default lets a waiting thread spin, which keeps the core from the
# one it waits for as soon as anything else runs: with one busy neighbour on two cores a forward pass of the
# demo's target took 5.3 s that way and 1.2 s so; alone 0.5 and 0.6 s.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
