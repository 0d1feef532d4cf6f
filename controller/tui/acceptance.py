"""How many drafted tokens are kept: the share of blocks that keep at least k, for k = 1 to the last.

Bars are what real decoding kept at the newest evaluation, lines what training's blocks promise: the product
of the conditional accuracies up to k. Where bars stay below lines, the estimate flatters.
"""

from __future__ import annotations

from rich.text import Text

from controller import figures
from controller.plots import decoded, promised
from controller.run_state import RunState
from controller.tui.lines import line
from controller.tui.palette import CURVE_COLOURS, FAINT, LABEL, RULE_STYLE
from controller.tui.plot import LABEL_COLUMNS

_BLOCKS = " ▁▂▃▄▅▆▇█"


def acceptance_values(state: RunState) -> Text:
    """The legend: which evaluation, and the first position's shares."""
    bars, lines = decoded(state), promised(state.history.conditional_accuracy)
    text = line()
    if bars:
        text.append(f" decoded {figures.share(bars[0])}", style=CURVE_COLOURS["tau"])
    if lines:
        text.append(f" est {figures.share(lines[0])}", style=CURVE_COLOURS["tau_estimate"])
    if not bars and not lines:
        return line(("no values yet", LABEL))
    text.append(" at k=1", style=LABEL)
    return text


def acceptance_lines(state: RunState, width: int, height: int, *, dim: bool) -> list[Text]:
    """`height` lines: bars, lines, and the positions below."""
    bars, lines = decoded(state), promised(state.history.conditional_accuracy)
    count, rows, columns = max(len(bars), len(lines)), height - 1, width - LABEL_COLUMNS
    if not count or rows < 1 or columns < count:
        return [line(" " * max(0, width)) for _ in range(height)]
    cell = min(6, columns // count)
    solid = max(1, cell - 1)
    green = FAINT if dim else CURVE_COLOURS["tau"]
    blue = FAINT if dim else CURVE_COLOURS["tau_estimate"]
    drawn = []
    for row in range(rows):
        below = rows - 1 - row
        label = "100%" if row == 0 else "0" if row == rows - 1 else "50%" if row == rows // 2 else ""
        text = line((f"{label:>{LABEL_COLUMNS - 1}}", LABEL), ("┤" if label else "│", RULE_STYLE))
        for k in range(count):
            promise = lines[k] * rows if k < len(lines) else -1.0
            share = bars[k] * rows if k < len(bars) else 0.0
            if promise >= 0 and below == min(rows - 1, int(promise)):
                text.append("─" * solid, style=blue)
            else:
                eighths = round(8 * min(1.0, max(0.0, share - below)))
                text.append(_BLOCKS[eighths] * solid, style=green)
            text.append(" " * (cell - solid))
        drawn.append(text)
    axis = line(" " * LABEL_COLUMNS)
    every = 1 if cell >= 3 else 2 if cell == 2 else 5
    for k in range(1, count + 1):
        named = k == 1 or k % every == 0
        start = LABEL_COLUMNS + (k - 1) * cell
        if named and start >= axis.cell_len:
            axis.append(" " * (start - axis.cell_len) + str(k), style=LABEL)
    for text in (*drawn, axis):
        text.pad_right(max(0, width - text.cell_len))
    return [*drawn, axis]
