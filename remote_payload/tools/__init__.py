"""Programs around the trainer: prepare a dataset, export a drafter, evaluate one."""

import remote_payload.train  # noqa: F401 (its environment variables, before torch is imported)
