"""The trainer: frozen targets and drafter replicas, one thread and one device each."""
