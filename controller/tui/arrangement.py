"""What fits: the rows of a terminal are given to the parts in the order an operator looks at them.

Pure and total: every size from 1x1 up has an arrangement, and none is refused. Going down from a large
terminal, first the threads leave the panels, then the curves leave the side (below 100 columns), then GPUs
beyond four rows scroll, buckets beyond the first go, then all of them, the GPUs shrink to one line, the flow
line, the GPUs, the key line, the speed line and the learning line go. The status line stays to the last row.
"""

from __future__ import annotations

import dataclasses

BESIDE_COLUMNS = 100
"""From this width on the curves stand beside the panels."""

PANEL_COLUMNS = 76
WIDE_COLUMNS = 150
"""From this width on the panels get `WIDE_PANEL_COLUMNS`."""

WIDE_PANEL_COLUMNS = 80
GPU_CELL_COLUMNS = 38
LEAST_LOG_ROWS = 4
LEAST_SIDE_ROWS = 7
LEAST_GPU_ROWS = 5
"""A heading and four rows; more GPUs scroll until everything else has its room."""

LEAST_BUCKET_ROWS = 5
BUCKET_COLUMNS = 66
ROWS_A_PLOT = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Which one-line parts are shown, and the rows and columns of the others (0: not shown)."""

    learning: bool
    speed: bool
    flow: bool
    tabs: bool
    footer: bool
    detail_rows: int
    gpu_rows: int
    """1: the summary; more: heading and cells."""
    bucket_rows: int
    thread_rows: int
    crash_rows: int
    panel_columns: int
    curves_columns: int
    side_plots: int

    @property
    def middle_rows(self) -> int:
        """Rows of the panels together."""
        return self.gpu_rows + self.flow + self.bucket_rows + self.thread_rows


def gpus_per_row(columns: int) -> int:
    """GPUs side by side."""
    return 2 if columns >= 2 * GPU_CELL_COLUMNS else 1


def arrange(
    width: int, height: int, *, gpus: int, buckets: int, threads: int, detail: int, zoomed: bool,
    crash: int,
) -> Arrangement:  # fmt: skip
    """The arrangement for a terminal of `width` x `height` and what there is to show.

    `detail` is how many rows it takes to say what is wrong; a small terminal has fewer. `zoomed` gives the
    room of the panels to the tab; a crash of `crash` rows takes their place.
    """
    left = height - 1
    shown = dict.fromkeys(("tabs", "footer", "learning", "speed", "flow"), False)

    def take(name: str, wanted: bool, reserve: int) -> None:
        nonlocal left
        if wanted and left - 1 >= reserve:
            left -= 1
            shown[name] = True

    take("learning", True, 2)
    detail_rows = max(0, min(detail, left - 2, 1 + height // 12))
    left -= detail_rows
    take("tabs", True, 2)
    take("speed", True, 3)
    take("footer", True, 4)
    beside = width >= BESIDE_COLUMNS
    columns = WIDE_PANEL_COLUMNS if width >= WIDE_COLUMNS else PANEL_COLUMNS
    panels = columns if beside else width
    gpu_rows = bucket_rows = thread_rows = crash_rows = 0
    if crash:
        crash_rows = max(0, min(crash, left - 3, left * 3 // 4))
    elif not zoomed:
        if left - 1 >= LEAST_LOG_ROWS:
            gpu_rows, left = 1, left - 1
        take("flow", True, LEAST_LOG_ROWS)
        all_gpus = 1 + max(1, -(-gpus // gpus_per_row(panels)))
        few = min(all_gpus, LEAST_GPU_ROWS)
        if gpu_rows and width >= GPU_CELL_COLUMNS and left - (few - 1) >= LEAST_LOG_ROWS:
            gpu_rows, left = few, left - (few - 1)
            full = 2 + max(1, buckets)
            rows = min(full, left - LEAST_LOG_ROWS)
            if panels >= BUCKET_COLUMNS and rows >= min(full, LEAST_BUCKET_ROWS):
                bucket_rows, left = rows, left - rows
            more = max(0, min(all_gpus - gpu_rows, left - LEAST_LOG_ROWS))
            gpu_rows, left = gpu_rows + more, left - more
        full = 2 + max(1, threads)
        if bucket_rows and panels >= PANEL_COLUMNS and left - full >= 2 * LEAST_LOG_ROWS:
            thread_rows = full
    middle = gpu_rows + shown["flow"] + bucket_rows + thread_rows
    beside = beside and middle >= LEAST_SIDE_ROWS
    return Arrangement(
        **shown,
        detail_rows=detail_rows,
        gpu_rows=gpu_rows,
        bucket_rows=bucket_rows,
        thread_rows=thread_rows,
        crash_rows=crash_rows,
        panel_columns=columns if beside else width,
        curves_columns=width - columns - 1 if beside else 0,
        side_plots=min(3, max(1, middle // ROWS_A_PLOT)) if beside else 0,
    )
