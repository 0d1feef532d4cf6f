"""The GPUs: one cell each, two cells side by side where they fit, or one line for all of them.

A GPU that is in trouble has its word in the place of its bar, so that a table of eight stays eight cells of
one width. Columns: number, role (T target, D drafter), utilisation, memory used and there, power,
temperature. Where not all fit, they scroll, and the heading says which rows are shown and which GPU beyond
them is in trouble.
"""

from __future__ import annotations

from collections import Counter

from rich.text import Text

from controller import figures
from controller.gpu_state import Gpu, GpuWord, gpu_role
from controller.run_state import RunState
from controller.tui.arrangement import GPU_CELL_COLUMNS, gpus_per_row
from controller.tui.lines import heading, line, remote
from controller.tui.palette import FAINT, GOOD, GPU_WORDS, HEADING, LABEL, PLAIN, VALUE, WARN

STALE_S = 20.0
"""nvidia-smi is asked every 5 s."""

_BAR = 9


def gpu_lines(state: RunState, width: int, height: int | None = None, first: int = 0) -> list[Text]:
    """The full panel: heading and cells, or heading and the reason why there are no GPUs.

    Of more rows of cells than `height` - 1, those from `first` on.
    """
    table = state.gpu_table
    settled = state.ended or not table.gpus  # that there is no GPU is said once, and does not grow old
    stale = float("inf") if settled else STALE_S
    name = _names(state)
    if not table.gpus:
        return [heading(f"GPUs{name}", width, state.ages.gpu, stale), line("  ", _no_gpus(state))]
    dim = not state.ended and (state.ages.gpu is None or state.ages.gpu > STALE_S)
    columns = gpus_per_row(width)
    deep = -(-len(table.gpus) // columns)
    shown = deep if height is None else max(1, min(deep, height - 1))
    first = max(0, min(first, deep - shown))
    rows = []
    for row in range(first, first + shown):
        text = line()
        for column in range(columns):
            number = row + column * deep
            if number < len(table.gpus):
                cell = _cell(table.gpus[number], dim=dim)
                gap = min(4, width - 2 * GPU_CELL_COLUMNS)
                cell.pad_right(GPU_CELL_COLUMNS + gap - cell.cell_len if column + 1 < columns else 0)
                text.append_text(cell)
        rows.append(text)
    if shown < deep:
        name += f"  rows {first + 1}-{first + shown} of {deep} [ ]"
        hidden = [
            f"{gpu.word} {gpu.index}"
            for number, gpu in enumerate(table.gpus)
            if gpu.word is not GpuWord.WORKING and not first <= number % deep < first + shown
        ]
        name += f"  ! {', '.join(hidden[:3])}" if hidden else ""
    return [heading(f"GPUs{name}", width, state.ages.gpu, stale), *rows]


def gpu_summary(state: RunState, width: int) -> Text:
    """All GPUs in one line, for small terminals: how many, mean utilisation, and who is in trouble."""
    gpus = state.gpus
    if not gpus:
        return line(("GPUs ", LABEL), _no_gpus(state))
    known = [gpu.utilization_share for gpu in gpus if gpu.utilization_share is not None]
    mean = sum(known) / len(known) if known else None
    text = line((f"{len(gpus)} GPUs ", LABEL), (figures.share(mean), VALUE), (" mean", LABEL))
    if state.ages.gpu is not None and state.ages.gpu > STALE_S and not state.ended:
        text.append(" (old)", style=WARN)
    words = Counter(gpu.word for gpu in gpus if gpu.word is not GpuWord.WORKING)
    for word, _ in words.most_common():
        numbers = ",".join(str(gpu.index) for gpu in gpus if gpu.word is word)
        text.append("  ")
        text.append(f"{word} {numbers}", style=GPU_WORDS[word])
    return text


def _no_gpus(state: RunState) -> Text:
    reason = state.gpu_table.none_reason
    if reason:
        return line(("none: ", VALUE), remote(reason, PLAIN))
    if state.unread_bytes:
        return Text("being read", style=LABEL)
    if state.health.word.no_news or state.ended:
        return Text("nothing was heard of them", style=LABEL)
    return Text("not asked yet", style=LABEL)


def _names(state: RunState) -> str:
    names = {gpu.name for gpu in state.gpus if gpu.name}
    if state.gpus and state.gpu_table.none_reason:
        reason = remote(state.gpu_table.none_reason)
        reason.truncate(44, overflow="ellipsis")
        return f" no answer: {reason.plain}"
    if len(names) != 1:
        return ""
    sliced = " (MIG)" if any(gpu.mig for gpu in state.gpus) else ""
    return f" {len(state.gpus)} × {remote(names.pop().removeprefix('NVIDIA ')).plain}{sliced}"


def _cell(gpu: Gpu, *, dim: bool) -> Text:
    value = FAINT if dim else VALUE
    text = line(
        (f"{figures.UNKNOWN if gpu.index is None else gpu.index:>2} ", LABEL),
        (f"{gpu_role(gpu):<2} ", PLAIN),
    )
    if gpu.word in (GpuWord.LOST, GpuWord.NO_DATA):
        text.append(f" {gpu.word} ", style=GPU_WORDS[gpu.word])
        why = remote(gpu.why[0][1] if gpu.why else "", LABEL)
        text.append(" ")
        why.truncate(max(0, GPU_CELL_COLUMNS - text.cell_len), overflow="ellipsis")
        return text.append_text(why)
    if gpu.mig and gpu.word is GpuWord.WORKING and gpu.utilization_share is None:
        text.append(f"{'MIG':<{_BAR}}", style=FAINT if dim else HEADING)  # its slices have no utilisation
    elif gpu.word is GpuWord.WORKING:
        text.append(figures.bar(gpu.utilization_share, _BAR), style=FAINT if dim else GOOD)
    else:
        text.append(f"{gpu.word:<{_BAR}}", style=FAINT if dim else GPU_WORDS[gpu.word])
    used = figures.UNKNOWN if gpu.memory_used_gib is None else f"{gpu.memory_used_gib:.0f}"
    total = figures.UNKNOWN if gpu.memory_total_gib is None else f"{gpu.memory_total_gib:.0f}G"
    power = figures.UNKNOWN if gpu.power_w is None else f"{gpu.power_w:.0f}W"
    heat = figures.UNKNOWN if gpu.temperature_c is None else f"{gpu.temperature_c:.0f}C"
    text.append(f"{figures.share(gpu.utilization_share):>5}", style=value)
    text.append(f"{used + '/' + total:>9}", style=value)
    text.append(f"{power:>5}", style=value)
    text.append(f"{heat:>4}", style=value)
    return text
