"""The trainer: frozen targets and drafter replicas, one thread and one device each."""

import os

# Read by tqdm when it is imported: a log file is no place for progress bars.
os.environ.setdefault("TQDM_DISABLE", "1")
