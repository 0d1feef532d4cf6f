"""Why a sample cannot be trained on: counted by reason, the first few named, and never an end of a run.

What lengths tell is known when a dataset is opened. What only content tells (ids, loss_mask) is looked at
when a batch first touches the sample; the finding is kept in `Findings`, one byte a sample, in a file of the
run directory, so that a later attempt of the run counts the same samples as an uninterrupted one would.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from remote_payload.train.allocated_file import allocate

EMPTY = "empty"
NULL = "null (no ids, no loss_mask or prompt_length, or a null among them)"
TOO_SHORT = "shorter than the first bucket"
TOO_LONG = "longer than the largest bucket or the token budget"
OTHER_LENGTH = "loss_mask and input_ids differ in length"
NO_ANSWER = "no two supervised tokens in a row (a prompt without an answer)"
OUTSIDE_VOCABULARY = "ids outside the vocabulary"
NO_MASK = "loss_mask holds other values than 0 and 1"
MASK_TOKEN = "the mask token in its answer (mask_token_id must be an id that no text holds)"

REASONS = (
    *(EMPTY, NULL, TOO_SHORT, TOO_LONG, OTHER_LENGTH, NO_ANSWER, OUTSIDE_VOCABULARY, NO_MASK),
    MASK_TOKEN,
)
"""Their places are codes in files of runs: new ones come last."""

NAMED = 10
"""How many samples of each reason are named."""


class DataError(ValueError):
    """A dataset that cannot be used; the text names the file, what was expected and what to do."""

    def __init__(self, text: str) -> None:
        super().__init__("; ".join(line.strip() for line in text.splitlines()))  # Arrow's texts have several


@dataclasses.dataclass(slots=True)
class Skipped:
    """Samples left out, by reason: how many, and the first few by number."""

    count: dict[str, int] = dataclasses.field(default_factory=dict)
    first: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def add(self, reason: str, samples: Sequence[int] | npt.NDArray[np.int64]) -> list[int]:
        """Count `samples` under `reason`; those that are named because of it."""
        if not len(samples):
            return []
        self.count[reason] = self.count.get(reason, 0) + len(samples)
        named = self.first.setdefault(reason, [])
        more = [int(sample) for sample in samples[: NAMED - len(named)]]
        named += more
        return more

    def __str__(self) -> str:
        return "; ".join(f"{count} {reason}" for reason, count in self.count.items())


class Findings:
    """What looking at each sample's content found: nothing yet, usable, or one of REASONS.

    The file is written through a memory map: it need not reach the disk at once, since what is lost is looked
    at again.
    """

    _UNKNOWN, _USABLE = 0, 1

    def __init__(self, samples: int, path: Path | None = None) -> None:
        """All unknown, or as an earlier attempt left them in `path`; a file of another size starts anew."""
        self._codes: npt.NDArray[np.uint8]
        if path is None:
            self._codes = np.zeros(samples, np.uint8)
        else:
            self._codes = np.memmap(_allocated(path, samples), np.uint8, "r+", shape=(samples,))

    def known(self, sample: int) -> bool:
        """Whether `sample` was looked at."""
        return bool(self._codes[sample] != self._UNKNOWN)

    def reason(self, sample: int) -> str | None:
        """Why `sample`, which was looked at, is unusable; None when it is not."""
        code = int(self._codes[sample])
        return REASONS[code - 2] if 2 <= code < 2 + len(REASONS) else None

    def set(self, sample: int, reason: str | None) -> None:
        """Note what looking at `sample` found."""
        self._codes[sample] = self._USABLE if reason is None else 2 + REASONS.index(reason)

    def unusable(self, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of `samples`, in their order, that were looked at and found unusable."""
        return samples[self._codes[samples] > self._USABLE]


def _allocated(path: Path, size: int) -> Path:
    """`path` with `size` bytes; a file of another size starts anew, with zeros. Raises DataError."""
    try:
        if path.exists() and path.stat().st_size != size:
            path.unlink()
        allocate(path, size)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); make room for the run") from error
    return path
