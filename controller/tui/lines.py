"""How one line of the screen is put together of styled parts: no markup is ever parsed here.

Pure: parts and a width in columns to lines of `rich.text.Text`. Text of the remote must have passed
`controller.text` before it becomes a `Text` (`remote`). What does not fit is left out whole (`fitted`),
folded below itself (`hanging`) or shortened with a mark.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import get_console
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from controller.health import age_text
from controller.text import safe_line
from controller.tui.palette import HEADING, LABEL, RULE_STYLE, WARN


def remote(text: str, style: Style | str = "") -> Text:
    """Text that came from the other machine, as one safe line without markup."""
    return Text(safe_line(text), style=style, no_wrap=True, end="")


def line(*parts: str | tuple[str, Style | str] | Text) -> Text:
    """One line assembled of plain, styled and ready parts. Only our own words go in as plain ones."""
    assembled = Text(no_wrap=True, end="")
    for part in parts:
        if isinstance(part, tuple):
            assembled.append(*part)
        else:
            assembled.append(part)
    return assembled


def shortened(text: str, columns: int) -> str:
    """`text` in at most `columns` cells: its middle is left out, since names differ at their ends."""
    if cell_len(text) <= columns:
        return text
    end = ""
    for character in reversed(text):
        if cell_len(character + end) > (columns - 1) // 2:
            break
        end = character + end
    return set_cell_size(text, max(0, columns - 1 - cell_len(end))).rstrip() + "…" + end


def hanging(lead: Text, body: Text, width: int) -> list[Text]:
    """`body` in `width` columns, broken at spaces into as many lines as it needs; `lead` stands before the
    first, and the others begin below the first's body.
    """
    room = max(20, width - lead.cell_len)
    if body.cell_len <= room:
        return [line(lead, body)]
    parts = body.wrap(get_console(), room, overflow="fold", no_wrap=False)
    for part in parts:
        part.rstrip()
    return [line(lead if not n else " " * lead.cell_len, part) for n, part in enumerate(parts)]


Part = tuple[int, str, Text]
"""A part of a line: how soon it goes when the line is too long (0 never, 9 first), what stands before it,
and its text.
"""


def fitted(parts: Sequence[Part], width: int, right: Text | None = None) -> Text:
    """One line of the parts that fit into `width`, the least important left out; `right` at its end.

    `right` goes before any part does, unless it is in `WARN`'s style, which says that the parts are old.
    """
    kept = list(parts)
    end = right if right is not None else Text()
    urgent = any(span.style == WARN for span in end.spans)

    def cells() -> int:
        return sum(len(lead) + text.cell_len for _, lead, text in kept) - (len(kept[0][1]) if kept else 0)

    while kept and cells() + (1 + end.cell_len if end.plain and urgent else 0) > width:
        worst = max(range(len(kept)), key=lambda n: (kept[n][0], n))
        if not kept[worst][0]:
            break
        del kept[worst]
    text = line()
    for place, (_, lead, part) in enumerate(kept):
        if place:
            text.append(lead, style=RULE_STYLE)
        text.append_text(part)
    if urgent:
        text.truncate(max(0, width - 1 - end.cell_len), overflow="ellipsis")
    if end.plain and text.cell_len + 1 + end.cell_len <= width:
        text.append(" " * (width - text.cell_len - end.cell_len))
        text.append_text(end)
    return text


def heading(title: str, width: int, age_s: float | None, stale_s: float) -> Text:
    """A panel's heading: its title, a rule, and how old its data is; old data is said to be so."""
    if age_s is None:
        age = Text("no data yet", style=LABEL)
    elif age_s > stale_s:
        age = Text(f"○ stale {age_text(age_s)}", style=WARN)
    else:
        age = Text(age_text(age_s), style=LABEL)
    start = line((f"{title} ", HEADING))
    rule = max(1, width - start.cell_len - age.cell_len - 1)
    return line(start, ("─" * rule, RULE_STYLE), " ", age)
