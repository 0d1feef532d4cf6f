"""The length buckets: how far each is through its batches, how much of it is padding, how it learns.

Columns: token range, batches trained on so far, batches of an epoch, share of all batches, padding, tokens
per second, loss, and peak GPU memory.
"""

from __future__ import annotations

from rich.text import Text

from controller import figures
from controller.run_state import RunState
from controller.tui.lines import heading, line
from controller.tui.overview import PROGRESS_STALE_S
from controller.tui.palette import FAINT, LABEL, PLAIN, SKY, VALUE


def bucket_lines(state: RunState, width: int, height: int | None = None) -> list[Text]:
    """Heading, column names, and a row for each bucket; of too many for `height`, the first ones."""
    progress = state.progress
    buckets = progress.buckets if progress else ()
    stale = float("inf") if state.ended else PROGRESS_STALE_S
    head = heading("Buckets", width, state.ages.progress, stale)
    if not buckets:
        return [head, line(("  not known yet", LABEL))]
    dim = state.ages.progress is not None and state.ages.progress > stale
    value = FAINT if dim else VALUE
    wide = width >= 76
    names = f"{'tokens':>14}  {'batches':>8}{'epoch':>7}  {'share':>6}  {'pad':>5}  {'tok/s':>6}  {'loss':>6}"
    rows = [head, line((names + (f"  {'peak':>6}" if wide else ""), LABEL))]
    cut = 0 if height is None else max(0, len(buckets) + 2 - height)
    for bucket in buckets[: len(buckets) - cut - 1] if cut else buckets:
        low, high = (figures.UNKNOWN if v is None else f"{v}" for v in (bucket.low, bucket.high))
        span = f"[{low:>5},{high:>5})"
        text = line((f"{span:>14}  ", PLAIN), (f"{figures.count(bucket.batches):>8}", value))
        text.append(f"{figures.count(bucket.planned):>7}  ", style=LABEL)
        text.append(f"{figures.share(bucket.planned_share, 1):>6}  ", style=value)
        text.append(f"{figures.share(bucket.padding_share, 1):>5}  ", style=value)
        text.append(f"{figures.short(bucket.tokens_per_s):>6}  ", style=value)
        text.append(f"{figures.decimal(bucket.loss):>6}", style=value)
        if wide:
            peak = figures.UNKNOWN if bucket.peak_gib is None else f"{bucket.peak_gib:.0f}G"
            text.append(f"  {peak:>6}", style=value)
        share = bucket.planned_share
        room = width - text.cell_len - 2
        if share is not None and room >= 4:
            text.append("  " + figures.bar(share, min(room, 20)), style=FAINT if dim else SKY)
        rows.append(text)
    if cut:
        rows.append(line((f"{'':>14}  {cut + 1} more: a taller terminal shows them", LABEL)))
    return rows
