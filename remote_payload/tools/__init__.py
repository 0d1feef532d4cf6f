"""Programs around the trainer: prepare a dataset, evaluate a drafter."""
